"""Sums of squares that neither overflow nor vanish, whatever the size of the numbers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_STEP = 600
"""Numbers beyond 1e100, or of which none reaches 1e-100, are squared after they were divided by two to this."""


@dataclass
class Scaled:
    """A sum, of value ``total * 2**power``."""

    total: float = 0.0
    power: int = 0

    def add(self, total: float, power: int) -> None:
        """Adds ``total * 2**power``."""
        if total == 0:
            return
        if self.total == 0:
            self.total, self.power = total, power
            return
        most = max(self.power, power)
        self.total = math.ldexp(self.total, self.power - most) + math.ldexp(total, power - most)
        self.power = most

    def root(self, count: int = 1) -> float:
        """The square root of a ``count``-th of it."""
        return times(math.sqrt(self.total / count), self.power // 2)


def times(value: float, exponent: int) -> float:
    """``value * 2**exponent``; infinite if it is beyond all floats."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


def exponent_for(values: np.ndarray[Any, Any]) -> int:
    """The power of two to divide values by before they are squared: 0 for all usual ones."""
    most = float(np.abs(values.view(np.float64)).max()) if values.size else 0.0
    if 1e-100 < most < 1e100 or most == 0:
        return 0
    return _STEP if most > 1 else -_STEP


def divided(values: np.ndarray[Any, Any], exponent: int) -> np.ndarray[Any, Any]:
    """Values divided by a power of two."""
    return values * 2.0**-exponent if exponent else values
