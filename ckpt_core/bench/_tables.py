"""The results of a run as tables: on a terminal, and as Markdown for a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ckpt_core.bench._baseline import Comparison
from ckpt_core.bench._jsonl import read_result
from ckpt_core.bench._machine import machine_of, warnings_about
from ckpt_core.bench._results import CaseResult, SuiteResult

TIME, RATE, PEAK = "0_basics/time_s", "4_throughput/gb_per_s", "0_basics/host_rss_peak_mb"
_ACKNOWLEDGED = ("save", "save_background")
"""Operations after which a save is acknowledged. `save_blocking` acknowledges nothing."""
_NUMBERS = ("median s", "± 95 %", "min - max", "GB/s")
_ON_A_TERMINAL = ("case", *_NUMBERS, "beside the first", "durable")
_IN_A_DOCUMENT = ("case", "median s", "min - max", "± 95 %", "GB/s", "to first", "peak MB", "durable")  # fmt: skip
_COMPARED = ("case", "metric", "before", "now", "worse by", "")
_SHOWN = ("time_s", "gb_per_s", "_mb", "files_count", "us_per_leaf")
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
    for case in result.failed:
        for run in case.runs:
            if run.error is not None:
                where = f"{case.group}: {case.label}, {run.kind} run {run.repeat}"
                console.print(f"[red]failed:[/red] {escape(where)}: {escape(run.error)}")
    if result.interrupted:
        console.print("[yellow]interrupted:[/yellow] what is above is complete in itself")


def _table_of(group: str, cases: list[CaseResult]) -> Table:
    """One line for each operation and case; ratios are to the first case that has the operation."""
    table = Table(title=group, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("operation", *_ON_A_TERMINAL):
        justify = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=name != "case")
    for operation in _operations_of(cases):
        rows = _rows_of(cases, operation)
        for row in rows:
            cells = [Text(row[name]) for name in _ON_A_TERMINAL]
            first, last = row is rows[0], row is rows[-1]
            table.add_row(operation if first else "", *cells, end_section=last)
    return table


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints what changed since the baseline: metrics that fail first, then the main others by size."""
    console.print()
    sha = (comparison.sha or "unknown")[:12]
    table = Table(title=f"against the baseline {sha}", title_justify="left", pad_edge=False)
    for name in _COMPARED:
        table.add_column(name, justify="right" if name in _COMPARED[2:5] else "left")
    for delta in comparison.changed:
        verdict = "" if delta.beyond_noise else "noise"
        if delta.worse or delta.metric.endswith(_SHOWN):
            table.add_row(
                escape(delta.label),
                delta.metric,
                number(delta.before),
                number(delta.now),
                f"{100 * delta.change:+.1f} %",
                "[red]WORSE[/red]" if delta.worse else verdict,
            )
    console.print(table)
    for label in comparison.missing:
        console.print(f"not in the baseline: {escape(label)}")
    if comparison.worse:
        console.print(
            f"[red]{len(comparison.worse)} metrics are worse[/red] by more than "
            f"{100 * comparison.threshold:g} % and beyond their noise"
        )


def markdown(path: Path) -> str:
    """Of the JSON lines of a run: the environment, then a table for each group and operation."""
    result = read_result(path)
    parts = [f"## {result.suite_name}", "", _where(result.environment), ""]
    if result.interrupted:
        parts += ["The run was cut short: these are the runs that had ended.", ""]
    for group, cases in result.groups.items():
        for operation in _operations_of(cases):
            rows = _rows_of(cases, operation)
            names = [name for name in _IN_A_DOCUMENT if any(row[name] for row in rows)]
            if rows:
                shown = ["" if name == "case" else name for name in names]
                cells = [[row[name] for name in names] for row in rows]
                text = markdown_table(shown, cells, ("", "durable"))
                parts += [f"**{group}: {operation}**", "", text, ""]
    parts += [f"- failed: {case.group}, {case.label}: {case.errors[0]}" for case in result.failed]
    return "\n".join(parts).rstrip() + "\n"


def _where(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['cpus']} CPUs ({environment['machine']}), load before the run "
        f"{environment['load_average']:.1f}, {environment['devices']} x "
        f"{environment['device_kind']}, {environment['processes']} process(es), "
        f"{environment['file_system']}, Linux {environment['kernel']}, Python "
        f"{environment['python']}; {versions}; revision {(environment['git_sha'] or 'unknown')[:12]}."
    )


def markdown_table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], words: Iterable[str] = ()
) -> str:
    """A table in Markdown; columns in ``words`` are aligned to the left, the others to the right, if there are any."""
    left = set(words) or set(names)
    rule = ("---" if name in left else "---:" for name in names)
    lines = (f"| {' | '.join(map(str, row))} |" for row in [names, *rows])
    first, *others = lines
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])


def _operations_of(cases: Iterable[CaseResult]) -> list[str]:
    """The operations that any of the cases measured, in order of their first appearance."""
    return list(dict.fromkeys(name for case in cases for name in case.by_operation()))


def _rows_of(cases: Iterable[CaseResult], operation: str) -> list[dict[str, str]]:
    """The cells of each case that measured the operation, by column; ratios are to the first of them."""
    each = ((case, case.by_operation().get(operation, {})) for case in cases)
    measured = [(case, metrics) for case, metrics in each if TIME in metrics]
    rows: list[dict[str, str]] = []
    for case, metrics in measured:
        seconds, (first_case, first) = metrics[TIME], measured[0]
        first_secs = first[TIME].median
        row = {
            "case": case.label,
            "median s": number(seconds.median),
            "± 95 %": "" if seconds.ci95 is None else number(seconds.ci95),
            "min - max": "" if seconds.n < 2 else f"{number(seconds.min)} - {number(seconds.max)}",
            "GB/s": number(metrics[RATE].median) if RATE in metrics else "",
            "beside the first": _beside(seconds.median, first_secs, first_case) if rows else "",
            "to first": _ratio(seconds.median / first_secs) if first_secs else "",
            "peak MB": number(metrics[PEAK].median) if PEAK in metrics else "",
            "durable": case.notes.get("durable", "") if operation in _ACKNOWLEDGED else "",
        }
        rows.append(row)
    return rows


def number(value: float) -> str:
    """Three significant digits, never in exponents: 0.000123, 0.0123, 1.23, 123."""
    if value == 0:
        return "0"
    for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3), (0.01, 4), (0.001, 5)):
        if abs(value) >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.6f}"


def _ratio(value: float) -> str:
    """At least two significant digits: 19.46x, 0.92x, 0.0042x."""
    return f"{value:.2f}x" if value >= 0.095 else f"{value:.2g}x"


_LONGEST_NAME = 24


def _beside(seconds: float, first: float, case: CaseResult) -> str:
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
