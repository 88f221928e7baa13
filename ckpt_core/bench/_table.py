"""Prints the results on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ckpt_core.bench._baseline import Comparison
from ckpt_core.bench._environment import machine_of, warnings_about
from ckpt_core.bench._results import CaseResult, SuiteResult
from ckpt_core.bench._rows import COMPARED, compared, operations_of, rows_of

_NUMBERS = ("median s", "± 95 %", "min - max", "GB/s")
_COLUMNS = ("case", *_NUMBERS, "beside the first", "durable")
_MAIN = ("time_s", "gb_per_s", "_mb", "files_count", "us_per_leaf")
"""The ends of metrics that a comparison shows even if they are not worse."""


def print_result(result: SuiteResult, console: Console) -> None:
    """Prints the environment, warnings, a table for each group, and skipped and failed cases."""
    facts = result.environment
    jax = f"jax {facts['versions'].get('jax')}"
    console.print(f"[bold]{escape(result.suite_name)}[/bold]: {jax} on {machine_of(facts)}")
    for warning in warnings_about(facts):
        console.print(f"[yellow]warning:[/yellow] {warning}")
    for group, cases in result.groups.items():
        measured = [case for case in cases if case.metrics()]
        if measured:
            console.print()
            console.print(_table_of(group, measured))
    reasons: dict[str, list[str]] = {}
    for case in result.cases:
        if case.skipped:
            reasons.setdefault(case.skipped, []).append(case.label)
    for reason, labels in reasons.items():
        which = labels[0] if len(labels) == 1 else f"{len(labels)} cases"
        console.print(f"skipped: {escape(reason)} [dim]({escape(which)})[/dim]")
    for where, run in result.failures:
        console.print(f"[red]failed:[/red] {escape(where)}: {escape(run.error or '')}")
    if result.interrupted:
        console.print("[yellow]interrupted:[/yellow] what is above is complete in itself")


def _table_of(group: str, cases: list[CaseResult]) -> Table:
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


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints what changed since the baseline: metrics that fail first, then the main others by size."""
    console.print()
    sha = (comparison.sha or "unknown")[:12]
    table = Table(title=f"against the baseline {sha}", title_justify="left", pad_edge=False)
    for name in COMPARED:
        table.add_column(name, justify="right" if name in COMPARED[2:5] else "left")
    for label, metric, *numbers, verdict in compared(comparison):
        if verdict == "worse":
            table.add_row(escape(label), metric, *numbers, "[red]WORSE[/red]")
        elif metric.endswith(_MAIN):
            table.add_row(escape(label), metric, *numbers, verdict)
    console.print(table)
    for label in comparison.missing:
        console.print(f"not in the baseline: {escape(label)}")
    if comparison.worse:
        console.print(
            f"[red]{len(comparison.worse)} metrics are worse[/red] by more than "
            f"{100 * comparison.threshold:g} % and beyond their noise"
        )
