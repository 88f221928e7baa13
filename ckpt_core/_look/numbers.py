"""Sums over the values of one leaf, or of two of one shape, piece by piece. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def as_numbers(array: Array) -> Array:
    """The values in float64, or complex128; what is no number raises ``TypeError``."""
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return array.reshape(-1).astype(wide)


@dataclass
class Sums:
    """What one leaf's values add up to. Of complex numbers, least and most are of the magnitude.

    Attributes:
        count: elements.
        nan_count, inf_count, zero_count: of them.
        least, most: of the finite ones.
        total, squares: sum of the finite ones, and of the squares of their magnitudes.
    """

    count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    zero_count: int = 0
    least: float = math.inf
    most: float = -math.inf
    total: complex = 0.0
    squares: float = 0.0

    def add(self, array: Array) -> None:
        """Adds a piece."""
        values = as_numbers(array)
        finite = values[np.isfinite(values)]
        self.count += values.size
        self.nan_count += int(np.isnan(values).sum())
        self.inf_count += int(np.isinf(values).sum())
        self.zero_count += values.size - int(np.count_nonzero(values))
        if finite.size:
            sizes = np.abs(finite) if finite.dtype.kind == "c" else finite
            self.least = min(self.least, float(sizes.min()))
            self.most = max(self.most, float(sizes.max()))
            self.total += finite.sum().item()
            self.squares += float(np.vdot(finite, finite).real)

    @property
    def finite_count(self) -> int:
        return self.count - self.nan_count - self.inf_count

    @property
    def mean(self) -> complex:
        """Of the finite ones; NaN if there is none."""
        return self.total / self.finite_count if self.finite_count else math.nan

    @property
    def norm(self) -> float:
        """Euclidean, of the finite ones."""
        return math.sqrt(self.squares)

    @property
    def std(self) -> float:
        """Standard deviation of the finite ones; NaN if there is none."""
        if not self.finite_count:
            return math.nan
        return math.sqrt(max(0.0, self.squares / self.finite_count - abs(self.mean) ** 2))


@dataclass
class PairSums:
    """How far the values of two leaves of one shape are apart.

    Attributes:
        count: elements.
        changed_count: whose bits differ; whose values differ, if the dtypes do.
        largest: the largest difference, of the elements that are finite on both sides.
        squares: sum of the squares of the differences of these.
        squares_a, squares_b, product: sums of their squares, and of their products.
        nan_a, nan_b, inf_a, inf_b: how many are NaN and infinite.
    """

    count: int = 0
    changed_count: int = 0
    largest: float = 0.0
    squares: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    product: float = 0.0
    finite_count: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0

    def add(self, a: Array, b: Array) -> None:
        """Adds a piece of each."""
        self.count += a.size
        numbers_a, numbers_b = as_numbers(a), as_numbers(b)
        same = numbers_a == numbers_b if a.dtype != b.dtype else _same_bits(a, b)
        if a.dtype != b.dtype:
            same |= np.isnan(numbers_a) & np.isnan(numbers_b)
        self.changed_count += a.size - int(np.count_nonzero(same))
        self.nan_a += int(np.isnan(numbers_a).sum())
        self.nan_b += int(np.isnan(numbers_b).sum())
        self.inf_a += int(np.isinf(numbers_a).sum())
        self.inf_b += int(np.isinf(numbers_b).sum())
        finite = np.isfinite(numbers_a) & np.isfinite(numbers_b)
        numbers_a, numbers_b = numbers_a[finite], numbers_b[finite]
        self.finite_count += numbers_a.size
        if numbers_a.size:
            apart = numbers_b - numbers_a
            self.largest = max(self.largest, float(np.abs(apart).max()))
            self.squares += float(np.vdot(apart, apart).real)
            self.squares_a += float(np.vdot(numbers_a, numbers_a).real)
            self.squares_b += float(np.vdot(numbers_b, numbers_b).real)
            self.product += float(np.vdot(numbers_a, numbers_b).real)

    @property
    def rms(self) -> float:
        """Root of the mean square of the differences."""
        return math.sqrt(self.squares / self.finite_count) if self.finite_count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over that of the first leaf; infinite if that is zero and the difference is not."""
        if self.squares_a == 0:
            return math.inf if self.squares else 0.0
        return math.sqrt(self.squares) / math.sqrt(self.squares_a)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both; NaN if one of them is zero."""
        if self.squares_a == 0 or self.squares_b == 0:
            return math.nan
        return self.product / (math.sqrt(self.squares_a) * math.sqrt(self.squares_b))


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
