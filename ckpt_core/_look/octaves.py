"""How many values of a leaf lie between neighbouring powers of two: a histogram that can be added up. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

_LOWEST = -1074
"""Exponent of the least float64; the greatest has 1024."""
_BINS = 1024 - _LOWEST + 1


class Octaves:
    """Counts of finite values other than zero, by the power of two below which their magnitude is. Powers of two need no
    known range, are the same for every leaf and step, and show how far the values are above the least that the dtype has.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, _BINS), np.int64)

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Adds values in float64 or complex128; of complex ones, the magnitude."""
        with np.errstate(over="ignore"):  # of a complex number beyond all floats
            sizes = np.abs(values)
        taken = np.isfinite(sizes) & (sizes > 0)
        _, exponents = np.frexp(sizes[taken])
        negative = np.zeros(exponents.size, bool) if values.dtype.kind == "c" else values[taken] < 0
        for row, chosen in enumerate((negative, ~negative)):
            counts = np.bincount(exponents[chosen] - _LOWEST, minlength=_BINS)
            self._counts[row] += counts

    def bars(self) -> tuple[tuple[int, int, int], ...]:
        """(exponent, how many negative, how many positive) from the least to the greatest: ``2**(e-1) <= |x| < 2**e``."""
        found = np.flatnonzero(self._counts.any(axis=0))
        if not found.size:
            return ()
        return tuple(
            (place + _LOWEST, int(self._counts[0, place]), int(self._counts[1, place]))
            for place in range(int(found[0]), int(found[-1]) + 1)
        )
