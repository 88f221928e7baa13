"""Statistics of a small number of repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """The statistics of one metric; ``ci95`` is half the width of the 95 % confidence interval of the mean, None for one value."""

    n: int
    min: float
    mean: float
    median: float
    max: float
    stddev: float | None
    ci95: float | None
    values: tuple[float, ...]


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
    """The two-sided 95 % quantile of Student's t."""
    from scipy import stats  # takes a third of a second

    return float(stats.t.ppf(0.975, degrees))


def differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two means differ by more than chance (Welch's t-test, 95 %); True for single values."""
    if len(one) < 2 or len(other) < 2:
        return True
    if len({*one}) == len({*other}) == 1:  # no variance: the test would divide by zero
        return one[0] != other[0]
    from scipy import stats

    # Not ttest_ind, which warns about values that are almost equal.
    result: Any = stats.ttest_ind_from_stats(
        statistics.fmean(one),
        statistics.stdev(one),
        len(one),
        statistics.fmean(other),
        statistics.stdev(other),
        len(other),
        equal_var=False,
    )
    return bool(result.pvalue < 0.05)
