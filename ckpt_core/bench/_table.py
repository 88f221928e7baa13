"""The results on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ckpt_core.bench._baseline import Comparison
from ckpt_core.bench._environment import warnings_about
from ckpt_core.bench._results import CaseResult, SuiteResult
from ckpt_core.bench._stats import Summary

TIME, RATE = "0_basics/time_s", "4_throughput/gb_per_s"
# operations after which a save is acknowledged; the blocking part of one acknowledges nothing
ACKNOWLEDGED = ("save", "save_background")


def print_result(result: SuiteResult, console: Console) -> None:
    """Everything a person wants to know right after a run."""
    facts = result.environment
    console.print(
        f"[bold]{escape(result.suite_name)}[/bold]: jax {facts['versions'].get('jax')} on "
        f"{facts['devices']} x {facts['device_kind']}, {facts['processes']} process(es), "
        f"{facts['cpus']} CPUs, {facts['file_system']}"
    )
    for warning in warnings_about(dict(facts)):
        console.print(f"[yellow]warning:[/yellow] {warning}")
    for group, cases in result.groups.items():
        measured = [case for case in cases if case.by_operation()]
        if measured:
            console.print()
            console.print(table_of(group, measured))
    _print_skipped(result.cases, console)
    for case in result.failed:
        for run in case.runs:
            if run.error is not None:
                console.print(
                    f"[red]failed:[/red] {escape(case.group)}: {escape(case.label)}, {run.kind} run "
                    f"{run.repeat}: {escape(run.error)}"
                )
    if result.interrupted:
        console.print("[yellow]interrupted:[/yellow] what is above is complete in itself")


def table_of(group: str, cases: list[CaseResult]) -> Table:
    """One line for each operation and case; ratios are to the first case that has the operation."""
    table = Table(title=group, title_justify="left", title_style="bold", pad_edge=False)
    for name, right in (
        ("operation", False),
        ("case", False),
        ("median s", True),
        ("± 95 %", True),
        ("min - max", True),
        ("GB/s", True),
        ("beside the first", False),
        ("durable", False),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "case")
    for operation in _operations(cases):
        first: float | None = None
        rows = [(case, case.by_operation().get(operation, {})) for case in cases]
        rows = [(case, metrics) for case, metrics in rows if TIME in metrics]
        for position, (case, metrics) in enumerate(rows):
            seconds = metrics[TIME]
            first = seconds.median if first is None else first
            table.add_row(
                operation if position == 0 else "",
                Text(case.label),
                number(seconds.median),
                "" if seconds.ci95 is None else number(seconds.ci95),
                spread(seconds),
                number(metrics[RATE].median) if RATE in metrics else "",
                beside(seconds.median, first, rows[0][0]) if position else "",
                case.notes.get("durable", "") if operation in ACKNOWLEDGED else "",
                end_section=position == len(rows) - 1,
            )
    return table


def _operations(cases: Iterable[CaseResult]) -> list[str]:
    found: dict[str, None] = {}
    for case in cases:
        found |= dict.fromkeys(case.by_operation())
    return list(found)


def _print_skipped(cases: Iterable[CaseResult], console: Console) -> None:
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if case.skipped:
            reasons.setdefault(case.skipped, []).append(case.label)
    for reason, labels in reasons.items():
        which = labels[0] if len(labels) == 1 else f"{len(labels)} cases"
        console.print(f"skipped: {escape(reason)} [dim]({escape(which)})[/dim]")


def number(value: float) -> str:
    """Three digits that matter, never in exponents: 0.000123, 0.0123, 1.23, 123."""
    if value == 0:
        return "0"
    for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3), (0.01, 4), (0.001, 5)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.6f}"


def spread(seconds: Summary) -> str:
    """From the least to the greatest; nothing of a single run."""
    return "" if seconds.n < 2 else f"{number(seconds.min)} - {number(seconds.max)}"


_SHORT = 24


def beside(seconds: float, first: float, case: CaseResult) -> str:
    """How a time compares with that of the first case, in words: ``19 times slower than ckpt``."""
    if not first or not seconds:
        return ""
    name = case.varying.get("library", case.label)
    name = name if len(name) <= _SHORT else "the first"
    ratio = max(seconds / first, first / seconds)
    if ratio < 1.05:
        return f"as fast as {name}"
    times = f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}"
    return f"{times} times {'slower' if seconds > first else 'faster'} than {name}"


def print_comparison(comparison: Comparison, console: Console) -> None:
    """What changed since the baseline: all gated metrics that got worse, then the rest by size."""
    console.print()
    sha = (comparison.sha or "unknown")[:12]
    table = Table(title=f"against the baseline {sha}", title_justify="left", pad_edge=False)
    for name in ("case", "metric", "before", "now", "worse by", ""):
        table.add_column(name, justify="right" if name in ("before", "now", "worse by") else "left")
    shown = sorted(comparison.deltas, key=lambda delta: (not delta.worse, -abs(delta.change)))
    for delta in shown:
        if delta.change == 0 or not (delta.worse or delta.metric.endswith(_COMPARED)):
            continue
        verdict = "[red]WORSE[/red]" if delta.worse else "" if delta.beyond_noise else "noise"
        table.add_row(
            escape(delta.label),
            delta.metric,
            number(delta.before),
            number(delta.now),
            f"{100 * delta.change:+.1f} %",
            verdict,
        )
    console.print(table)
    for label in comparison.missing:
        console.print(f"not in the baseline: {escape(label)}")
    if comparison.worse:
        console.print(
            f"[red]{len(comparison.worse)} metrics are worse[/red] by more than "
            f"{100 * comparison.threshold:g} % and beyond their noise"
        )


_COMPARED = ("time_s", "gb_per_s", "_mb", "files_count", "us_per_leaf")
