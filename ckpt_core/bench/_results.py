"""The results of a suite as plain dataclasses: the input of every table, file and chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ckpt_core.bench._tags import is_rate

Values = Mapping[str, Mapping[str, list[float]]]

WARM_UP, TRACED, COUNTED = "warm-up", "traced", "counted"


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


def _summarize(values: Sequence[float]) -> Summary:
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
        ci95=None if stddev is None else _t95(n - 1) * stddev / math.sqrt(n),
        values=tuple(values),
    )


def _t95(degrees: float) -> float:
    """The two-sided 95 % quantile of Student's t."""
    from scipy import stats  # takes a third of a second

    return float(stats.t.ppf(0.975, degrees))


@dataclass(frozen=True)
class Run:
    """One run of one case."""

    case: str
    kind: str  # counted; or warm-up or traced, which the statistics leave out
    repeat: int
    started_unix_secs: float
    # operation -> metric -> values, combined over all processes (see over_hosts)
    values: Values = field(default_factory=dict[str, dict[str, list[float]]])
    hosts: tuple[Values, ...] = ()  # the values of each process
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    error: str | None = None  # the exception in one line
    details: str | None = None  # the traceback
    skipped: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case with all of its runs."""

    name: str
    label: str
    group: str
    generator: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    varying: Mapping[str, str] = field(default_factory=dict[str, str])
    runs: tuple[Run, ...] = ()
    skipped: str | None = None

    @property
    def errors(self) -> list[str]:
        """The errors of its runs."""
        return [run.error for run in self.runs if run.error is not None]

    @property
    def notes(self) -> dict[str, str]:
        """The notes of the last run that has any."""
        for run in reversed(self.runs):
            if run.notes:
                return dict(run.notes)
        return {}

    def by_operation(self) -> dict[str, dict[str, Summary]]:
        """Statistics of every metric over the counted runs: operation -> metric -> summary."""
        counted = (run for run in self.runs if run.kind == COUNTED and run.error is None)
        return {
            operation: {
                metric: _summarize([*chain(*values)]) for metric, values in sorted(metrics.items())
            }
            for operation, metrics in collected(run.values for run in counted).items()
            if metrics
        }

    def metrics(self) -> list[tuple[str, str, Summary]]:
        """The same as operation, metric and summary."""
        return [
            (operation, metric, summary)
            for operation, metrics in self.by_operation().items()
            for metric, summary in metrics.items()
        ]


@dataclass(frozen=True)
class SuiteResult:
    """A whole run of a suite; ``interrupted``: Ctrl-C or a kill ended it, and the result holds the runs that had ended."""

    suite_name: str
    environment: Mapping[str, Any]
    cases: tuple[CaseResult, ...]
    interrupted: bool = False

    @property
    def failed(self) -> list[CaseResult]:
        """The cases with at least one run that raised."""
        return [case for case in self.cases if case.errors]

    @property
    def groups(self) -> dict[str, list[CaseResult]]:
        """Cases by the table they belong to, in order."""
        found: dict[str, list[CaseResult]] = {}
        for case in self.cases:
            found.setdefault(case.group, []).append(case)
        return found


def collected(many: Iterable[Values]) -> dict[str, dict[str, list[list[float]]]]:
    """Operation -> metric -> the lists of values of all that have it, in their order."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for one in many:
        for operation, metrics in one.items():
            into = found.setdefault(operation, {})
            for metric, values in metrics.items():
                into.setdefault(metric, []).append(values)
    return found


def over_hosts(hosts: Sequence[Values]) -> dict[str, dict[str, list[float]]]:
    """Combines processes: slowest time, lowest rate, most memory, sum of TensorStore's counts."""
    return {
        operation: {
            metric: [_reduction(metric)(row) for row in zip(*values, strict=False)]
            for metric, values in metrics.items()
        }
        for operation, metrics in collected(hosts).items()
    }


def _reduction(metric: str) -> Callable[[Sequence[float]], float]:
    if metric.startswith("6_tensorstore/"):
        return sum
    return min if is_rate(metric) else max
