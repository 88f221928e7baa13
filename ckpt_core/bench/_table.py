"""Prints the results on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ckpt_core.bench._baseline import Comparison
from ckpt_core.bench._environment import warnings_about
from ckpt_core.bench._results import CaseResult, SuiteResult
from ckpt_core.bench._rows import number, operations_of, rows_of


def print_result(result: SuiteResult, console: Console) -> None:
    """Prints the environment, warnings, a table for each group, and skipped and failed cases."""
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
    for name in ("operation", *_COLUMNS):
        justify = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=name != "case")
    for operation in operations_of(cases):
        rows = rows_of(cases, operation)
        for row in rows:
            cells = [Text(row.cells[name]) for name in _COLUMNS]
            first, last = row is rows[0], row is rows[-1]
            table.add_row(operation if first else "", *cells, end_section=last)
    return table


_NUMBERS = ("median s", "± 95 %", "min - max", "GB/s")
_COLUMNS = ("case", *_NUMBERS, "beside the first", "durable")


def _print_skipped(cases: Iterable[CaseResult], console: Console) -> None:
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if case.skipped:
            reasons.setdefault(case.skipped, []).append(case.label)
    for reason, labels in reasons.items():
        which = labels[0] if len(labels) == 1 else f"{len(labels)} cases"
        console.print(f"skipped: {escape(reason)} [dim]({escape(which)})[/dim]")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints what changed since the baseline: metrics that fail first, then the main others by size."""
    console.print()
    sha = (comparison.sha or "unknown")[:12]
    table = Table(title=f"against the baseline {sha}", title_justify="left", pad_edge=False)
    for name in ("case", "metric", "before", "now", "worse by", ""):
        table.add_column(name, justify="right" if name in ("before", "now", "worse by") else "left")
    for delta in comparison.changed:
        if not (delta.worse or delta.metric.endswith(_COMPARED)):
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
