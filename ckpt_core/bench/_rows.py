"""The rows of the result tables as text, the same for the terminal and Markdown.

Each output chooses its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_core.bench._baseline import Comparison
from ckpt_core.bench._results import CaseResult
from ckpt_core.bench._stats import Summary

TIME, RATE, PEAK = "0_basics/time_s", "4_throughput/gb_per_s", "0_basics/host_rss_peak_mb"
ACKNOWLEDGED = ("save", "save_background")
"""Operations after which a save is acknowledged. `save_blocking` acknowledges nothing."""


@dataclass(frozen=True)
class Row:
    """One case in the table of one operation: its times, and a text for each column."""

    case: CaseResult
    seconds: Summary
    cells: Mapping[str, str]


def operations_of(cases: Iterable[CaseResult]) -> list[str]:
    """The operations that any of the cases measured, in order of their first appearance."""
    return list(dict.fromkeys(name for case in cases for name in case.by_operation()))


def rows_of(cases: Iterable[CaseResult], operation: str) -> list[Row]:
    """A row for each case that measured the operation; ratios are to the first of them."""
    rows: list[Row] = []
    for case in cases:
        metrics = case.by_operation().get(operation, {})
        if TIME not in metrics:
            continue
        seconds = metrics[TIME]
        first = rows[0].seconds.median if rows else seconds.median
        cells = {
            "case": case.label,
            "median s": number(seconds.median),
            "± 95 %": "" if seconds.ci95 is None else number(seconds.ci95),
            "min - max": "" if seconds.n < 2 else f"{number(seconds.min)} - {number(seconds.max)}",
            "GB/s": number(metrics[RATE].median) if RATE in metrics else "",
            "beside the first": beside(seconds.median, first, rows[0].case) if rows else "",
            "to first": ratio(seconds.median / first) if first else "",
            "peak MB": number(metrics[PEAK].median) if PEAK in metrics else "",
            "durable": case.notes.get("durable", "") if operation in ACKNOWLEDGED else "",
            "n": str(seconds.n),
        }
        rows.append(Row(case, seconds, cells))
    return rows


def not_empty(columns: Iterable[str], rows: Sequence[Row]) -> list[str]:
    """The columns in which at least one row has a text."""
    return [column for column in columns if any(row.cells[column] for row in rows)]


COMPARED = ("case", "metric", "before", "now", "worse by", "")


def compared(comparison: Comparison) -> list[list[str]]:
    """The metrics that changed since the baseline, in the columns ``COMPARED``."""
    return [
        [
            delta.label,
            delta.metric,
            number(delta.before),
            number(delta.now),
            f"{100 * delta.change:+.1f} %",
            "worse" if delta.worse else "" if delta.beyond_noise else "noise",
        ]
        for delta in comparison.changed
    ]


def number(value: float) -> str:
    """Three significant digits, never in exponents: 0.000123, 0.0123, 1.23, 123."""
    if value == 0:
        return "0"
    for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3), (0.01, 4), (0.001, 5)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.6f}"


def ratio(value: float) -> str:
    """At least two significant digits: 19.46x, 0.92x, 0.0042x."""
    return f"{value:.2f}x" if value >= 0.095 else f"{value:.2g}x"


_LONGEST_NAME = 24


def beside(seconds: float, first: float, case: CaseResult) -> str:
    """How a time compares with that of the first case, in words: ``19 times slower than ckpt``."""
    if not first or not seconds:
        return ""
    name = case.varying.get("library", case.label)
    name = name if len(name) <= _LONGEST_NAME else "the first"
    factor = max(seconds / first, first / seconds)
    if factor < 1.05:
        return f"as fast as {name}"
    times = f"{factor:.1f}" if factor < 9.95 else f"{factor:,.0f}"
    return f"{times} times {'slower' if seconds > first else 'faster'} than {name}"
