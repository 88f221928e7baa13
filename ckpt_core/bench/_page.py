"""Writes report.html in the style of a run's report: its sections as data, which ``page.js`` draws."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ckpt_core.bench._baseline import Comparison
from ckpt_core.bench._environment import machine_of, warnings_about
from ckpt_core.bench._results import CaseResult, SuiteResult
from ckpt_core.bench._rows import (
    COMPARED,
    TIME,
    Row,
    compared,
    not_empty,
    number,
    operations_of,
    rows_of,
)
from ckpt_core.bench._stats import Summary
from ckpt_core.report import html_page

FILE = "report.html"
COLOURS = 10
_MOST_DOTS = 50
_LOG_SPAN = 40
"""From this ratio of the largest to the smallest value on, a linear axis hides the small ones."""

Block = dict[str, Any]
"""A piece of a section: ``title``, ``text``, ``pre``, ``table``, ``details``, ``bars`` or ``lines``."""


def write_page(output: Path, result: SuiteResult, comparison: Comparison | None = None) -> Path:
    """Writes ``<output>/report.html`` and returns its path."""
    path = output / FILE
    path.write_text(page(result, comparison), encoding="utf-8")
    return path


def page(result: SuiteResult, comparison: Comparison | None = None) -> str:
    """The HTML of a result."""
    sections = sections_of(result, comparison)
    names = {f"s{number}": section["name"] for number, section in enumerate(sections)}
    script = (files("ckpt_core.bench") / "page.js").read_text(encoding="utf-8")
    return html_page(result.suite_name, {"sections": sections}, names, [script])


def sections_of(result: SuiteResult, comparison: Comparison | None = None) -> list[dict[str, Any]]:
    """What the page shows: name and blocks of each section."""
    found = [_section(result.suite_name, _header(result))]
    if comparison is not None:
        found.append(_comparison(comparison))
    failed = [
        _details(f"{where}: {run.error}", {"pre": run.details or ""})
        for where, run in result.failures
    ]
    found += [_section("Failed runs", failed, "bad")] if failed else []
    found += _scaling(result)
    colours = _colours(result)
    for group, cases in result.groups.items():
        if measured := [case for case in cases if case.metrics()]:
            found.append(_section(group, _group(measured, colours)))
    skipped = [[case.group, case.label, case.skipped] for case in result.cases if case.skipped]
    if skipped:
        found.append(_section("Skipped", [_table(("group", "case", "why"), skipped)]))
    facts = [
        [name, value if isinstance(value, str) else json.dumps(value)]
        for name, value in result.environment.items()
    ]
    return [*found, _section("Where", [_table(("fact", "value"), facts)])]


def _section(name: str, blocks: Sequence[Block], kind: str = "") -> dict[str, Any]:
    return {"name": name, "blocks": blocks, "kind": kind}


def _text(text: str, kind: str = "soft") -> Block:
    return {"text": text, "kind": kind}


def _table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], right: Iterable[str] = (), **more: Any
) -> Block:
    return {"table": rows, "names": names, "right": list(right), **more}


def _colours(result: SuiteResult) -> dict[str, int]:
    """Label -> colour, the same on the whole page; ckpt has the first colour."""
    labels = dict.fromkeys(_library(case) for case in result.cases)
    ordered = sorted(labels, key=lambda label: label != "ckpt")
    return {label: index % COLOURS for index, label in enumerate(ordered)}


def _library(case: CaseResult) -> str:
    return case.varying.get("library", case.label)


def _header(result: SuiteResult) -> list[Block]:
    facts = result.environment
    repeats = max((run.repeat + 1 for case in result.cases for run in case.runs), default=0)
    drawn = (
        f"up to {repeats} repeats. Bars are medians, whiskers the 95 % interval of the mean (Student), "
        "dots the single runs."
        if repeats > 1
        else "one run of each: nothing is known of the spread."
    )
    versions, sha = facts["versions"], facts.get("git_sha")
    where = f"{machine_of(facts)}, jax {versions.get('jax')}, ckpt {versions['ckpt']}"
    where += f" at {sha[:12]}" if sha else ""
    warnings = warnings_about(facts)
    if result.interrupted:
        warnings.append("interrupted: what is here is complete in itself")
    lines = [_text(where), _text(f"{time.strftime('%Y-%m-%d %H:%M')}, {drawn}")]
    return lines + [_text(text, "note warn") for text in warnings]


_COLUMNS = (
    *("case", "median s", "± 95 %", "min - max", "GB/s"),
    *("beside the first", "peak MB", "durable", "n"),
)
_WORDS = ("case", "beside the first", "durable")


def _group(cases: Sequence[CaseResult], colours: Mapping[str, int]) -> list[Block]:
    found: list[Block] = []
    for operation in operations_of(cases):
        rows = rows_of(cases, operation)
        if not rows:
            continue
        found += [{"title": operation}, _bars(rows, colours)]
        if any(map(_is_lost, rows)):
            found.append(_text("Pale: not durable when the save returns.", "caption"))
        names = not_empty(_COLUMNS, rows)
        cells = [[row.cells[name] for name in names] for row in rows]
        found.append(_table(names, cells, {*names} - {*_WORDS}, stacked=True))
    metrics = [
        [case.label, operation, metric, number(s.median), number(s.min), number(s.max)]
        for case in cases
        for operation, metric, s in case.metrics()
    ]
    columns = ("case", "operation", "metric", "median", "min", "max")
    return [*found, _details(f"all {len(metrics)} metrics", _table(columns, metrics, columns[3:]))]


def _details(summary: str, *blocks: Block, is_open: bool = False) -> Block:
    return {"details": summary, "blocks": blocks, "open": is_open}


def _is_lost(row: Row) -> bool:
    """Whether a power cut right after this save loses it."""
    durable = row.cells["durable"]
    return bool(durable) and not durable.startswith("yes")


def _bars(rows: Sequence[Row], colours: Mapping[str, int]) -> Block:
    """Medians with intervals and single values; logarithmic, as points and not as bars, if they span much."""
    low = min(row.seconds.min for row in rows)
    high = max(max(row.seconds.max, _interval(row.seconds)[1] or 0.0) for row in rows)
    bars = [
        {
            "label": row.case.label,
            "median": row.seconds.median,
            "interval": _interval(row.seconds),
            "values": row.seconds.values[:_MOST_DOTS] if row.seconds.n > 1 else (),
            "spelled": _spelled(row.seconds),
            "colour": colours[_library(row.case)],
            "pale": _is_lost(row),
        }
        for row in rows
    ]
    return {"bars": bars, "unit": "seconds", "log": low > 0 and high / low > _LOG_SPAN}


def _spelled(summary: Summary) -> str:
    spread = "" if summary.ci95 is None else f" ± {number(summary.ci95)}"
    return f"{number(summary.median)}{spread}"


def _interval(summary: Summary) -> tuple[float | None, float | None]:
    """The 95 % interval of the mean; (None, None) if nothing is known of it."""
    if not summary.ci95:
        return None, None
    return max(0.0, summary.mean - summary.ci95), summary.mean + summary.ci95


def _scaling(result: SuiteResult) -> list[dict[str, Any]]:
    """Line charts of time over a swept number, and over checkpoint size, with at least 3 points."""
    found: list[dict[str, Any]] = []
    for group, cases in result.groups.items():
        for axis in dict.fromkeys(name for case in cases for name in case.varying):
            points = [
                (_number(case.varying.get(axis, "")), _label_without(case, axis), case)
                for case in cases
            ]
            found += _lines_over(f"{group}: time over {axis}", axis, points)
    by_generator: dict[str, list[CaseResult]] = {}
    for case in result.cases:
        by_generator.setdefault(case.generator, []).append(case)
    for generator, cases in by_generator.items():
        if len({case.config["checkpoint"]["name"] for case in cases}) > 2:
            points = [(_size_mb(case), case.label, case) for case in cases]
            title = f"{generator.rpartition('.')[2]}: time over size"
            found += _lines_over(title, "MB on disk", points)
    return found


def _lines_over(
    title: str, x_name: str, points: Iterable[tuple[float, str, CaseResult]]
) -> list[dict[str, Any]]:
    blocks: list[Block] = []
    series: dict[str, dict[str, list[tuple[float, Summary]]]] = {}
    for x, label, case in points:
        for operation, metric, summary in case.metrics() if x > 0 else ():
            if metric == TIME:
                series.setdefault(operation, {}).setdefault(label, []).append((x, summary))
    for operation, found in series.items():
        if max(len({x for x, _ in line}) for line in found.values()) > 2:
            lines = [
                {
                    "label": label,
                    "colour": index % COLOURS,
                    "points": [
                        (x, summary.median, *_interval(summary), _spelled(summary))
                        for x, summary in sorted(line, key=lambda point: point[0])
                    ],
                }
                for index, (label, line) in enumerate(found.items())
            ]
            blocks += [{"title": operation}, {"lines": lines, "x": x_name, "unit": "seconds"}]
    return [_section(title, blocks)] if blocks else []


def _number(text: str) -> float:
    """The number that a text is; 0, which no line has, if it is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _label_without(case: CaseResult, axis: str) -> str:
    rest = [v if k == "library" else f"{k}={v}" for k, v in case.varying.items() if k != axis]
    return ", ".join(rest) or case.generator.rpartition(".")[2]


def _size_mb(case: CaseResult) -> float:
    summary = case.by_operation().get("checkpoint", {}).get("5_inventory/size_mb")
    return 0.0 if summary is None else summary.median


def _comparison(comparison: Comparison) -> dict[str, Any]:
    rows = compared(comparison)
    count = len(comparison.worse)
    verdict = f"{count} metrics are worse" if count else "nothing is worse"
    limit = f"by more than {100 * comparison.threshold:g} % and beyond noise."
    table = _table(COMPARED, rows, COMPARED[2:5])
    blocks = [
        _text(f"{verdict} {limit}", "note warn" if count else "note good"),
        _details(f"{len(rows)} metrics that changed", table, is_open=bool(count)),
    ]
    return _section(f"Against the baseline {(comparison.sha or 'unknown')[:12]}", blocks)
