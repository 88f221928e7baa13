"""Sums over the values of one leaf, or of two of one shape, piece by piece, in float64. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_BLOCK = 2**20  # so many elements are in float64 at a time
_LOWEST, _HIGHEST = -1074, 1024  # exponents of the least and the greatest float64


@dataclass
class Sums:
    """What one leaf's values add up to. Of complex numbers, ``min`` and ``max`` are of the magnitude."""

    count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    finite_count: int = 0  # the rest is of these elements
    min: float = math.nan
    max: float = math.nan
    average: complex = 0.0  # mean; 0 if no element is finite
    squares: float = 0.0  # sum of the squared magnitudes
    spread: float = 0.0  # sum of the squared distances to the mean
    # how many negative, and how many positive values have a magnitude below each power of two, and not below half of it
    octave_counts: Array = field(
        default_factory=lambda: np.zeros((2, _HIGHEST - _LOWEST + 1), np.int64)
    )

    def add(self, array: Array) -> None:
        """Adds a piece."""
        for (block,) in _blocks(array):
            values = _as_numbers(block)
            finite = values[np.isfinite(values)]
            nan_count = int(np.isnan(values).sum())
            self.count += values.size
            self.nan_count += nan_count
            self.inf_count += values.size - finite.size - nan_count
            self.zero_count += values.size - int(np.count_nonzero(values))
            if finite.size:
                with np.errstate(over="ignore", invalid="ignore"):  # squares beyond all floats
                    self._add_finite(finite)

    def _add_finite(self, values: Array) -> None:
        sizes, is_complex = np.abs(values), values.dtype.kind == "c"
        ordered = sizes if is_complex else values
        self.min = float(np.fmin(self.min, ordered.min()))
        self.max = float(np.fmax(self.max, ordered.max()))
        taken = np.isfinite(sizes) & (sizes > 0)
        positive = is_complex or values[taken] > 0  # complex numbers count as positive ones
        width = self.octave_counts.shape[1]
        places = np.frexp(sizes[taken])[1] - _LOWEST + width * positive
        self.octave_counts += np.bincount(places, minlength=2 * width).reshape(2, width)
        # the squares of sums lose all digits where the mean is far from 0
        before, self.finite_count = self.finite_count, self.finite_count + values.size
        share, mean = values.size / self.finite_count, values.mean().item()
        apart = mean - self.average
        self.squares += _dot(values, values)
        between = before * share * np.longdouble(abs(apart)) ** 2
        self.spread += _dot(values - mean, values - mean) + between
        self.average = self.average * (1 - share) + mean * share

    @property
    def octaves(self) -> tuple[tuple[int, int, int], ...]:
        """(exponent, how many negative, how many positive) from the least to the greatest: ``2**(e-1) <= |x| < 2**e``."""
        found = np.flatnonzero(self.octave_counts.any(axis=0)).tolist()
        places = range(found[0], found[-1] + 1) if found else ()
        return tuple((place + _LOWEST, *self.octave_counts[:, place].tolist()) for place in places)

    @property
    def mean(self) -> complex:
        """Of the finite ones; NaN if there is none."""
        return self.average if self.finite_count else math.nan

    @property
    def norm(self) -> float:
        """Euclidean, of the finite ones."""
        return float(np.sqrt(self.squares))

    @property
    def std(self) -> float:
        """Standard deviation of the finite ones; NaN if there is none."""
        return float(np.sqrt(self.spread / self.finite_count)) if self.finite_count else math.nan


@dataclass
class PairSums:
    """How far the values of two leaves of one shape are apart."""

    count: int = 0
    changed: int = 0  # elements with other bits; with other values, if the dtypes differ
    largest: float = 0.0  # of the differences between elements that are finite on both sides
    squares: float = 0.0  # sum of the squares of these differences
    squares_a: float = 0.0  # of A, where both are finite
    squares_b: float = 0.0
    product: float = 0.0  # sum of A times B, of these
    finite_count: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0

    def add(self, a: Array, b: Array, are_numbers: bool) -> None:
        """Adds a piece of each; unless they are numbers, both are of one dtype, and their bits alone count."""
        for left, right in _blocks(a, b):
            self.count += left.size
            if left.dtype == right.dtype:
                self.changed += left.size - int(np.count_nonzero(_same_bits(left, right)))
            if are_numbers:
                with np.errstate(over="ignore", invalid="ignore"):  # squares beyond all floats
                    self._add_numbers(left, right)

    def _add_numbers(self, a: Array, b: Array) -> None:
        numbers_a, numbers_b = _as_numbers(a), _as_numbers(b)
        nan_a, nan_b = np.isnan(numbers_a), np.isnan(numbers_b)
        if a.dtype != b.dtype:
            same = (numbers_a == numbers_b) | (nan_a & nan_b)
            self.changed += a.size - int(np.count_nonzero(same))
        self.nan_a += int(nan_a.sum())
        self.nan_b += int(nan_b.sum())
        self.inf_a += int((np.isinf(numbers_a) & ~nan_a).sum())
        self.inf_b += int((np.isinf(numbers_b) & ~nan_b).sum())
        apart = np.abs(numbers_b - numbers_a)
        if a.dtype == b.dtype and a.dtype in (np.int64, np.uint64):
            # neighbours have the same float
            apart = (np.maximum(a, b) - np.minimum(a, b)).view(np.uint64).astype(np.float64)
        finite = np.isfinite(numbers_a) & np.isfinite(numbers_b)
        if finite.any():
            numbers_a, numbers_b, apart = (one[finite] for one in (numbers_a, numbers_b, apart))
            self.finite_count += apart.size
            self.largest = max(self.largest, float(apart.max()))
            self.squares += _dot(apart, apart)
            self.squares_a += _dot(numbers_a, numbers_a)
            self.squares_b += _dot(numbers_b, numbers_b)
            self.product += _dot(numbers_a, numbers_b)

    @property
    def rms(self) -> float:
        """Root of the mean square of the differences."""
        return float(np.sqrt(self.squares / self.finite_count)) if self.finite_count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over that of the first leaf; infinite if that is zero and the difference is not."""
        if self.squares_a == 0:
            return math.inf if self.squares else 0.0
        return float(np.sqrt(self.squares) / np.sqrt(self.squares_a))

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; NaN if one of them is zero."""
        sizes = np.sqrt(self.squares_a) * np.sqrt(self.squares_b)
        return float(self.product / sizes) if sizes else math.nan


def _blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Arrays of one shape, block by block: as float64, bytes take eight times their memory."""
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK):
        yield tuple(one[start : start + _BLOCK] for one in flat)


def _as_numbers(array: Array) -> Array:
    """The values in float64, or complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _dot(a: Array, b: Array) -> Any:
    """The sum of products, real part; beyond the range of floats, in the longest that the machine has."""
    found = np.vdot(a, b).real
    if 1e-290 < abs(found) < math.inf or not (a.any() and b.any()):
        return found
    long: Any = np.clongdouble if a.dtype.kind == "c" else np.longdouble
    return np.vdot(a.astype(long), b.astype(long)).real


def _same_bits(a: Array, b: Array) -> Array:
    """For each element of two blocks of one dtype, whether its bits are the same."""
    if a.dtype.itemsize in (1, 2, 4, 8):
        bits = f"u{a.dtype.itemsize}"
        return a.view(bits) == b.view(bits)
    bytes_a, bytes_b = (one.view(np.uint8).reshape(a.size, -1) for one in (a, b))
    return (bytes_a == bytes_b).all(axis=1)
