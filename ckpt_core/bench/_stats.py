"""Statistics of a few repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t by degrees of freedom; 1.96 beyond.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Of the values of one metric.

    Attributes:
        ci95: half the width of the 95 % confidence interval of the mean; None for one value.
    """

    n: int
    min: float
    mean: float
    median: float
    max: float
    stddev: float | None
    ci95: float | None
    values: tuple[float, ...]

    def as_json(self) -> dict[str, object]:
        """For files."""
        return {
            "n": self.n,
            "min": self.min,
            "mean": self.mean,
            "median": self.median,
            "max": self.max,
            "stddev": self.stddev,
            "ci95": self.ci95,
            "values": list(self.values),
        }


def summarize(values: Sequence[float]) -> Summary:
    """The statistics of at least one value."""
    n = len(values)
    stddev = statistics.stdev(values) if n > 1 else None
    return Summary(
        n=n,
        min=min(values),
        mean=statistics.fmean(values),
        median=statistics.median(values),
        max=max(values),
        stddev=stddev,
        ci95=None if stddev is None else t95(n - 1) * stddev / math.sqrt(n),
        values=tuple(values),
    )


def t95(degrees: float) -> float:
    """The two-sided 95 % quantile of Student's t; rounds degrees of freedom down, to be safe."""
    whole = max(1, int(degrees))
    return _T[whole - 1] if whole <= len(_T) else 1.96 + 2.5 / whole


def differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the means differ beyond their noise (Welch, 95 %); True for single values."""
    if len(one) < 2 or len(other) < 2:
        return True
    a = statistics.variance(one) / len(one)
    b = statistics.variance(other) / len(other)
    gap = abs(statistics.fmean(one) - statistics.fmean(other))
    if a + b == 0:
        return gap > 0
    degrees = (a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1))
    return gap > t95(degrees) * math.sqrt(a + b)
