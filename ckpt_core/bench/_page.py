"""Writes report.html: one file without scripts, fonts or links, which opens offline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from ckpt_core.bench import _charts
from ckpt_core.bench._baseline import Comparison
from ckpt_core.bench._environment import warnings_about
from ckpt_core.bench._page_style import STYLE
from ckpt_core.bench._results import CaseResult, SuiteResult
from ckpt_core.bench._rows import TIME, Row, not_empty, number, operations_of, rows_of
from ckpt_core.bench._stats import Summary

FILE = "report.html"


def write_page(output: Path, result: SuiteResult, comparison: Comparison | None = None) -> Path:
    """Writes ``<output>/report.html`` and returns its path."""
    path = output / FILE
    path.write_text(page(result, comparison), encoding="utf-8")
    return path


def page(result: SuiteResult, comparison: Comparison | None = None) -> str:
    """The HTML of a result."""
    body = [_header(result)]
    if comparison is not None:
        body.append(_comparison(comparison))
    body += _failures(result)
    body += _scaling(result)
    colours = _colours(result)
    for group, cases in result.groups.items():
        measured = [case for case in cases if case.by_operation()]
        if measured:
            body.append(_group(group, measured, colours))
    body.append(_skipped(result.cases))
    body.append(_environment(result))
    title = escape(result.suite_name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        f"{''.join(body)}</main></body></html>\n"
    )


def _colours(result: SuiteResult) -> dict[str, int]:
    """Label -> colour, the same on the whole page; ckpt has the first colour."""
    labels = dict.fromkeys(case.varying.get("library", case.label) for case in result.cases)
    ordered = sorted(labels, key=lambda label: label != "ckpt")
    return {label: index for index, label in enumerate(ordered)}


def _header(result: SuiteResult) -> str:
    facts = result.environment
    repeats = max((run.repeat + 1 for case in result.cases for run in case.runs), default=0)
    drawn = (
        "up to {repeats} repeats. Bars are medians, whiskers the 95 % interval of the mean (Student), "
        "dots the single runs."
        if repeats > 1
        else "one run of each: nothing is known of the spread."
    ).format(repeats=repeats)
    line = (
        f"{facts['devices']} x {facts['device_kind']}, {facts['processes']} process(es), "
        f"{facts['cpus']} CPUs, {facts['file_system']}, jax {facts['versions'].get('jax')}, "
        f"ckpt {facts['versions']['ckpt']}"
        + (f" at {facts['git_sha'][:12]}" if facts.get("git_sha") else "")
    )
    warnings = list(warnings_about(dict(facts)))
    if result.interrupted:
        warnings.append("interrupted: what is here is complete in itself")
    notes = "".join(f'<p class="warning">{escape(text)}</p>' for text in warnings)
    return (
        f"<header><h1>{escape(result.suite_name)}</h1><p>{escape(line)}</p>"
        f"<p>{time.strftime('%Y-%m-%d %H:%M')}, {drawn}</p>{notes}</header>"
    )


def _group(group: str, cases: Sequence[CaseResult], colours: Mapping[str, int]) -> str:
    parts = [f"<section><h2>{escape(group)}</h2>"]
    for operation in operations_of(cases):
        rows = rows_of(cases, operation)
        if not rows:
            continue
        bars = [
            _charts.Bar(
                row.case.label,
                row.seconds,
                colours[row.case.varying.get("library", row.case.label)],
                pale=_is_lost(row),
            )
            for row in rows
        ]
        chart = _charts.bars(bars, "seconds")
        parts.append(f"<h3>{escape(operation)}</h3><figure>{chart}</figure>")
        if any(map(_is_lost, rows)):
            parts.append('<p class="note">Pale: not durable when the save returns.</p>')
        names = not_empty(_COLUMNS, rows)
        numeric = [place for place, name in enumerate(names) if name not in _WORDS]
        cells = [[row.cells[name] for name in names] for row in rows]
        parts.append(_html_table(names, cells, numeric, stacked=True))
    parts.append(_all_metrics(cases))
    return "".join([*parts, "</section>"])


_COLUMNS = (
    "case",
    "median s",
    "± 95 %",
    "min - max",
    "GB/s",
    "beside the first",
    "peak MB",
    "durable",
    "n",
)
_WORDS = ("case", "beside the first", "durable")


def _is_lost(row: Row) -> bool:
    """Whether a power cut right after this save loses it."""
    durable = row.cells["durable"]
    return bool(durable) and not durable.startswith("yes")


def _html_table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Iterable[int] = (),
    stacked: bool = False,
) -> str:
    """A table; on a narrow screen a ``stacked`` one becomes a list of names and values."""
    right = set(numeric)

    def cell(tag: str, index: int, text: str) -> str:
        told = f' data-name="{escape(names[index])}"' if stacked and tag == "td" else ""
        return f"<{tag}{' class=n' if index in right else ''}{told}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(names))
    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    kind = ' class="stack"' if stacked else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _all_metrics(cases: Iterable[CaseResult]) -> str:
    rows = [
        [case.label, operation, metric, number(s.median), number(s.min), number(s.max)]
        for case in cases
        for operation, metrics in case.by_operation().items()
        for metric, s in metrics.items()
    ]
    table = _html_table(
        ("case", "operation", "metric", "median", "min", "max"), rows, numeric=range(3, 6)
    )
    return f"<details><summary>all {len(rows)} metrics</summary>{table}</details>"


def _scaling(result: SuiteResult) -> list[str]:
    """Line charts of time over a swept number, and over checkpoint size, with at least 3 points."""
    found: list[str] = []
    for group, cases in result.groups.items():
        for axis in dict.fromkeys(name for case in cases for name in case.varying):
            found += _lines_over(
                f"{group}: time over {axis}",
                axis,
                [
                    (_number(case.varying.get(axis)), _label_without(case, axis), case)
                    for case in cases
                ],
            )
    by_generator: dict[str, list[CaseResult]] = {}
    for case in result.cases:
        by_generator.setdefault(case.generator, []).append(case)
    for generator, cases in by_generator.items():
        if len({case.config["checkpoint"]["name"] for case in cases}) > 2:
            found += _lines_over(
                f"{generator.rpartition('.')[2]}: time over size",
                "MB on disk",
                [(_size_mb(case), case.label, case) for case in cases],
            )
    return found


def _lines_over(
    title: str, x_name: str, points: Iterable[tuple[float | None, str, CaseResult]]
) -> list[str]:
    charts: list[str] = []
    series: dict[str, dict[str, list[tuple[float, Summary]]]] = {}
    for x, label, case in points:
        if x is None or x <= 0:
            continue
        for operation, metrics in case.by_operation().items():
            if TIME in metrics:
                into = series.setdefault(operation, {}).setdefault(label, [])
                into.append((x, metrics[TIME]))
    for operation, found in series.items():
        if max(len({x for x, _ in line}) for line in found.values()) > 2:
            chart = _charts.lines(found, x_name, "seconds")
            charts.append(f"<h3>{escape(operation)}</h3><figure>{chart}</figure>")
    return [f"<section><h2>{escape(title)}</h2>{''.join(charts)}</section>"] if charts else []


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _label_without(case: CaseResult, axis: str) -> str:
    rest = [v if k == "library" else f"{k}={v}" for k, v in case.varying.items() if k != axis]
    return ", ".join(rest) or case.generator.rpartition(".")[2]


def _size_mb(case: CaseResult) -> float | None:
    summary = case.by_operation().get("checkpoint", {}).get("5_inventory/size_mb")
    return None if summary is None else summary.median


def _comparison(comparison: Comparison) -> str:
    rows = [
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
    table = _html_table(
        ("case", "metric", "before", "now", "worse by", ""), rows, numeric=range(2, 5)
    )
    count = len(comparison.worse)
    verdict = f"{count} metrics are worse" if count else "nothing is worse"
    state = "warning" if count else "good"
    return (
        f"<section><h2>Against the baseline {escape((comparison.sha or 'unknown')[:12])}</h2>"
        f'<p class="{state}">{verdict} by more than {100 * comparison.threshold:g} % and beyond '
        f"noise.</p><details {'open' if count else ''}><summary>{len(rows)} metrics that changed"
        f"</summary>{table}</details></section>"
    )


def _failures(result: SuiteResult) -> list[str]:
    rows = [
        f"<details><summary>{escape(case.group)}: {escape(case.label)}, {escape(run.kind)} run "
        f"{run.repeat}: {escape(run.error)}</summary><pre>{escape(run.details or '')}</pre></details>"
        for case in result.cases
        for run in case.runs
        if run.error is not None
    ]
    if not rows:
        return []
    return [f'<section><h2 class="bad">Failed runs</h2>{"".join(rows)}</section>']


def _skipped(cases: Iterable[CaseResult]) -> str:
    rows = [[case.group, case.label, case.skipped] for case in cases if case.skipped]
    if not rows:
        return ""
    return f"<section><h2>Skipped</h2>{_html_table(('group', 'case', 'why'), rows)}</section>"


def _environment(result: SuiteResult) -> str:
    rows = [
        [name, value if isinstance(value, str) else json.dumps(value)]
        for name, value in result.environment.items()
    ]
    return f"<section><h2>Where</h2>{_html_table(('fact', 'value'), rows)}</section>"
