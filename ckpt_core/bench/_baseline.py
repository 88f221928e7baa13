"""Compares a result with an earlier one, its baseline."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_core.bench._measure import RATE, TIME, is_rate
from ckpt_core.bench._results import SuiteResult, Summary
from ckpt_core.bench._schema import ConfigError
from ckpt_core.bench._tables import markdown_table, number


def compare(now: SuiteResult, baseline: SuiteResult, threshold: float) -> tuple[str, int]:
    """A document of what changed in times, rates and sizes of checkpoints, and how many of these are worse by more than noise
    and ``threshold`` (0.1 is ten percent): those come first, then the others by the size of the change.
    """
    for fact in ("backend", "device_kind", "devices", "processes"):
        then, here = baseline.environment.get(fact), now.environment.get(fact)
        if then != here:
            raise ConfigError("the baseline", f"was measured with {fact} {then}, this is {here}")
    known = {case.name: case.by_operation() for case in baseline.cases}
    rows: list[tuple[bool, float, tuple[str, ...]]] = []
    missing: list[str] = []
    for case in now.cases:
        operations = case.by_operation()
        if operations and case.name not in known:
            missing.append(f"not in the baseline: {case.title}")
        for name, old, new in _pairs(known.get(case.name, {}), operations):
            if change := _change(name, old.median, new.median):
                beyond_noise = _differ(old.values, new.values)
                is_worse = beyond_noise and change > threshold
                verdict = "WORSE" if is_worse else "" if beyond_noise else "noise"
                medians = number(old.median), number(new.median)
                cells = (case.title, name, *medians, f"{100 * change:+.1f} %", verdict)
                rows.append((is_worse, abs(change), cells))
    rows.sort(key=lambda row: row[:2], reverse=True)
    names = ("case", "metric", "before", "now", "worse by", "")
    table = markdown_table(names, [cells for *_, cells in rows], ("case", "metric", ""))
    revision = baseline.environment.get("git_sha") or "unknown"
    parts = [f"**Against the baseline {revision[:12]}**", table, *missing]
    worse = sum(is_worse for is_worse, *_ in rows)
    if worse:
        parts.append(f"{worse} metrics are worse by more than the threshold and their noise.")
    return "\n\n".join(parts) + "\n", worse


def _pairs(
    before: dict[str, dict[str, Summary]], now: dict[str, dict[str, Summary]]
) -> Iterator[tuple[str, Summary, Summary]]:
    """What both measured; memory and counters vary without a reason."""
    for operation, metrics in now.items():
        for metric, new in metrics.items():
            old = before.get(operation, {}).get(metric)
            if old is not None and (metric in (TIME, RATE) or operation == "checkpoint"):
                yield f"{operation}_{metric}", old, new


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
