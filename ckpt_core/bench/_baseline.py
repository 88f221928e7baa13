"""Compares a result with an earlier one, its baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_core.bench._measure import RATE, TIME, is_rate
from ckpt_core.bench._results import SuiteResult
from ckpt_core.bench._schema import ConfigError


@dataclass(frozen=True)
class Delta:
    """One metric of one case; ``change`` is that of the median as a fraction of the baseline, above 0 is worse."""

    case: str
    metric: str
    before: float
    now: float
    change: float
    beyond_noise: bool
    worse: bool


@dataclass(frozen=True)
class Comparison:
    """What changed: metrics that are worse first, then by the size of the change. ``missing``: cases that the baseline lacks."""

    revision: str | None
    changed: tuple[Delta, ...]
    missing: tuple[str, ...]

    @property
    def worse(self) -> tuple[Delta, ...]:
        """The metrics that make the comparison fail."""
        return tuple(delta for delta in self.changed if delta.worse)


def compare(now: SuiteResult, baseline: SuiteResult, threshold: float) -> Comparison:
    """Compares times, rates and the sizes of checkpoints; ``worse`` are those that changed by more than noise and ``threshold`` (0.1 is ten percent)."""
    for fact in ("backend", "device_kind", "devices", "processes"):
        then, here = baseline.environment.get(fact), now.environment.get(fact)
        if then != here:
            raise ConfigError("the baseline", f"was measured with {fact} {then}, this is {here}")
    known = {case.name: case.by_operation() for case in baseline.cases}
    changed: list[Delta] = []
    missing: list[str] = []
    for case in now.cases:
        operations = case.by_operation()
        if operations and case.name not in known:
            missing.append(case.title)
        for operation, metrics in operations.items():
            before = known.get(case.name, {}).get(operation, {})
            for metric in filter(before.__contains__, metrics):
                old, new = before[metric], metrics[metric]
                change = _change(metric, old.median, new.median)
                # Memory and counters vary without a reason.
                if change and (metric in (TIME, RATE) or operation == "checkpoint"):
                    beyond = _differ(old.values, new.values)
                    key = case.title, f"{operation}_{metric}"
                    worse = beyond and change > threshold
                    changed.append(Delta(*key, old.median, new.median, change, beyond, worse))
    changed.sort(key=lambda delta: (not delta.worse, -abs(delta.change)))
    return Comparison(baseline.environment.get("git_sha"), tuple(changed), tuple(missing))


def _change(metric: str, before: float, now: float) -> float:
    """How much worse the metric got, as a fraction: longer, larger, or a lower rate."""
    if before == now:
        return 0.0
    if is_rate(metric):
        before, now = now, before
    return float("inf") if before == 0 else (now - before) / abs(before)


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two means differ by more than chance (Welch's t-test, 95 %); True for single values."""
    if len(one) < 2 or len(other) < 2:
        return True
    if len({*one}) == len({*other}) == 1:  # no variance: the test would divide by zero
        return one[0] != other[0]
    from scipy import stats

    # Not ttest_ind, which warns about values that are almost equal.
    moments = [f(x) for x in (one, other) for f in (statistics.fmean, statistics.stdev, len)]
    result: Any = stats.ttest_ind_from_stats(*moments, equal_var=False)
    return bool(result.pvalue < 0.05)
