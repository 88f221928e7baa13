"""Sums over the values of one leaf, or of two of one shape, piece by piece. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt_core._look.octaves import Octaves
from ckpt_core._look.scaled import Scaled, divided, exponent_for, times

Array = np.ndarray[Any, Any]


def as_numbers(array: Array) -> Array:
    """The values in float64, or complex128; what is no number raises ``TypeError``."""
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return array.reshape(-1).astype(wide)


_BLOCK = 2**20
"""So many elements are in float64 at a time."""


def _blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Arrays of one shape, block by block, so that numbers of one byte do not take eight times their memory."""
    flat = [_flat(array) for array in arrays]
    for start in range(0, flat[0].size, _BLOCK):
        yield tuple(one[start : start + _BLOCK] for one in flat)


@dataclass
class Sums:
    """What one leaf's values add up to. Of complex numbers, least and most are of the magnitude."""

    count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    finite_count: int = 0  # the rest is of these elements
    least: float = math.inf
    most: float = -math.inf
    average: complex = 0.0  # mean; 0 if no element is finite
    squares: Scaled = field(default_factory=Scaled)  # sum of the squared magnitudes
    spread: Scaled = field(default_factory=Scaled)  # sum of the squared distances to the mean
    octaves: Octaves = field(default_factory=Octaves)

    def add(self, array: Array) -> None:
        """Adds a piece."""
        for (block,) in _blocks(array):
            values = as_numbers(block)
            nan = np.isnan(values)
            self.count += values.size
            self.nan_count += int(nan.sum())
            self.inf_count += int((np.isinf(values) & ~nan).sum())
            self.zero_count += values.size - int(np.count_nonzero(values))
            finite = values[np.isfinite(values)]
            if finite.size:
                self._add_finite(finite)

    def _add_finite(self, values: Array) -> None:
        with np.errstate(
            over="ignore"
        ):  # the magnitude of a complex number may be beyond all floats
            sizes = np.abs(values) if values.dtype.kind == "c" else values
        self.least = min(self.least, float(sizes.min()))
        self.most = max(self.most, float(sizes.max()))
        self.octaves.add(values)
        exponent = exponent_for(values)
        near = divided(values, exponent)
        mean = near.mean()
        self.squares.add(_square(near), 2 * exponent)
        self.spread.add(_square(near - mean), 2 * exponent)
        self._join_mean((mean * 2.0**exponent).item(), values.size)

    def _join_mean(self, mean: complex, count: int) -> None:
        """Takes in the mean of other values; their sum of squares is added to the spread already."""
        before, self.finite_count = self.finite_count, self.finite_count + count
        apart = np.array([mean / 2 - self.average / 2])
        if before:  # the squares of sums lose all digits where the mean is far from 0
            exponent = exponent_for(apart)
            weight = 4 * before * (count / self.finite_count)
            self.spread.add(weight * _square(divided(apart, exponent)), 2 * exponent)
        share = count / self.finite_count
        self.average = self.average * (1 - share) + mean * share

    @property
    def mean(self) -> complex:
        """Of the finite ones; NaN if there is none."""
        return self.average if self.finite_count else math.nan

    @property
    def norm(self) -> float:
        """Euclidean, of the finite ones."""
        return self.squares.root()

    @property
    def std(self) -> float:
        """Standard deviation of the finite ones; NaN if there is none."""
        return self.spread.root(self.finite_count) if self.finite_count else math.nan


@dataclass
class PairSums:
    """How far the values of two leaves of one shape are apart."""

    count: int = 0
    changed_count: int = 0  # elements with other bits; with other values, if the dtypes differ
    largest: float = 0.0  # of the differences between elements that are finite on both sides
    squares: Scaled = field(default_factory=Scaled)  # sum of the squares of these differences
    squares_a: Scaled = field(default_factory=Scaled)  # of A, where both are finite
    squares_b: Scaled = field(default_factory=Scaled)
    product: Scaled = field(default_factory=Scaled)  # sum of A times B, of these
    finite_count: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0

    def add(self, a: Array, b: Array) -> None:
        """Adds a piece of each."""
        for left, right in _blocks(a, b):
            self._add_block(left, right)

    def _add_block(self, a: Array, b: Array) -> None:
        self.count += a.size
        numbers_a, numbers_b = as_numbers(a), as_numbers(b)
        nan_a, nan_b = np.isnan(numbers_a), np.isnan(numbers_b)
        same = numbers_a == numbers_b if a.dtype != b.dtype else _same_bits(a, b)
        if a.dtype != b.dtype:
            same |= nan_a & nan_b
        self.changed_count += a.size - int(np.count_nonzero(same))
        self.nan_a += int(nan_a.sum())
        self.nan_b += int(nan_b.sum())
        self.inf_a += int((np.isinf(numbers_a) & ~nan_a).sum())
        self.inf_b += int((np.isinf(numbers_b) & ~nan_b).sum())
        finite = np.isfinite(numbers_a) & np.isfinite(numbers_b)
        if finite.any():
            apart = _apart(a, b, numbers_a, numbers_b)[finite]
            self._add_finite(numbers_a[finite], numbers_b[finite], apart)

    def _add_finite(self, a: Array, b: Array, apart: Array) -> None:
        self.finite_count += a.size
        with np.errstate(over="ignore", invalid="ignore"):  # a difference may be beyond all floats
            self.largest = max(self.largest, float(np.abs(apart).max()))
            near_a, near_b = (
                divided(a, by_a := exponent_for(a)),
                divided(b, by_b := exponent_for(b)),
            )
            by = exponent_for(apart)
            self.squares.add(_square(divided(apart, by)), 2 * by)
            self.squares_a.add(_square(near_a), 2 * by_a)
            self.squares_b.add(_square(near_b), 2 * by_b)
            self.product.add(float(np.vdot(near_a, near_b).real), by_a + by_b)

    @property
    def rms(self) -> float:
        """Root of the mean square of the differences."""
        return self.squares.root(self.finite_count) if self.finite_count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over that of the first leaf; infinite if that is zero and the difference is not."""
        apart, a = self.squares, self.squares_a
        if a.total == 0:
            return math.inf if apart.total else 0.0
        return times(math.sqrt(apart.total) / math.sqrt(a.total), apart.power // 2 - a.power // 2)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; NaN if one of them is zero."""
        a, b = self.squares_a, self.squares_b
        if a.total == 0 or b.total == 0:
            return math.nan
        found = self.product.total / (math.sqrt(a.total) * math.sqrt(b.total))
        return times(found, self.product.power - a.power // 2 - b.power // 2)


def _square(values: Array) -> float:
    return float(np.vdot(values, values).real)


def _apart(a: Array, b: Array, numbers_a: Array, numbers_b: Array) -> Array:
    """B less A; of whole numbers of 64 bits, not of their floats, which are the same for neighbours."""
    if a.dtype != b.dtype or a.dtype.kind not in "iu" or a.dtype.itemsize != 8:
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers_b - numbers_a
    grew, bits_a, bits_b = b >= a, a.view(np.uint64), b.view(np.uint64)
    return np.where(grew, bits_b - bits_a, bits_a - bits_b).astype(np.float64) * np.where(
        grew, 1, -1
    )


def changed_bits(a: Array, b: Array) -> int:
    """The number of elements whose bits differ, in two arrays of one dtype and shape."""
    return a.size - int(np.count_nonzero(_same_bits(a, b)))


def _same_bits(a: Array, b: Array) -> Array:
    bits = f"u{a.dtype.itemsize}"
    if a.dtype.itemsize in (1, 2, 4, 8):
        return _flat(a).view(bits) == _flat(b).view(bits)
    rows = (-1, a.dtype.itemsize)
    bytes_a, bytes_b = (_flat(one).view(np.uint8).reshape(rows) for one in (a, b))
    return (bytes_a == bytes_b).all(axis=1)


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)
