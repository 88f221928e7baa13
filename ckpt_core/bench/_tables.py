"""The results of a run, also beside an earlier one, as Markdown; and as event files of TensorBoard."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt_core._words import pairs
from ckpt_core.bench._config import ConfigError
from ckpt_core.bench._measure import PEAK, RATE, TIME, is_rate
from ckpt_core.bench._results import CaseResult, SuiteResult, Summary, collected
from ckpt_core.events import EventFile

_ACKNOWLEDGED = ("save", "save_background")
"""Operations after which a save is acknowledged. `save_blocking` acknowledges nothing."""


def document(result: SuiteResult) -> str:
    """The environment, a table for each group and operation, and what was skipped or failed."""
    parts = [f"## {result.suite_name}", _where(result.environment)]
    if result.interrupted:
        parts.append("The run was interrupted: these are the runs that had ended.")
    groups: dict[str, list[CaseResult]] = {}
    for case in result.cases:
        groups.setdefault(case.group, []).append(case)
    for group, cases in groups.items():
        for operation in dict.fromkeys(name for case in cases for name in case.by_operation()):
            if rows := [*_rows(cases, operation)]:
                names = [name for name in rows[0] if any(row[name] for row in rows)]
                cells = [[row[name] for name in names] for row in rows]
                table = markdown_table(names, cells, ("", "durable"))
                parts += [f"**{group}: {operation}**", table]
    reasons: dict[str, list[str]] = {}
    for case in result.cases:
        if case.skipped:
            reasons.setdefault(case.skipped, []).append(case.label)
    notes = [
        f"- skipped: {labels[0] if len(labels) == 1 else f'{len(labels)} cases'}: {reason}"
        for reason, labels in reasons.items()
    ]
    notes += [f"- failed: {case.group}, {case.label}: {case.errors[0]}" for case in result.failed]
    return "\n\n".join([*parts, "\n".join(notes)]).rstrip() + "\n"


def _where(environment: Mapping[str, Any]) -> str:
    text = (
        "{cpus} CPUs ({machine}), load before the run {load_average:.1f}, {devices} x {device_kind}, {processes} process(es), "
        "{file_system}, Linux {kernel}, Python {python}; {versions}; revision {revision:.12}."
    )
    versions, revision = pairs(environment["versions"]), environment["git_sha"] or "unknown"
    return text.format_map({**environment, "versions": versions, "revision": revision})


def _rows(cases: Iterable[CaseResult], operation: str) -> Iterator[dict[str, str]]:
    """The cells of each case that measured the operation, by column; ratios are to the first of them."""
    first_secs = None
    for case in cases:
        metrics = case.by_operation().get(operation, {})
        if TIME not in metrics:
            continue
        seconds = metrics[TIME]
        first_secs = seconds.median if first_secs is None else first_secs
        yield {
            "": case.label,
            "median s": number(seconds.median),
            "min - max": "" if seconds.n < 2 else f"{number(seconds.min)} - {number(seconds.max)}",
            "± 95 %": "" if seconds.ci95 is None else number(seconds.ci95),
            "GB/s": number(metrics[RATE].median) if RATE in metrics else "",
            "to first": f"{number(seconds.median / first_secs)}x" if first_secs else "",
            "peak MB": number(metrics[PEAK].median) if PEAK in metrics else "",
            "durable": case.notes.get("durable", "") if operation in _ACKNOWLEDGED else "",
        }


def compare(now: SuiteResult, baseline: SuiteResult, threshold: float) -> tuple[str, int]:
    """A table of what changed in times, rates and sizes, what is worse by more than noise and ``threshold`` (0.1 is ten percent)
    first; and how many that are.
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


def markdown_table(
    names: Sequence[str], rows: Sequence[Sequence[Any]], words: Iterable[str] = ()
) -> str:
    """A table in Markdown; columns in ``words``, or all if there are none, are aligned to the left."""
    columns = [[str(cell) for cell in column] for column in zip(names, *rows, strict=True)]
    padded: list[list[str]] = []
    for name, cells in zip(names, columns, strict=True):
        is_left, width = not words or name in words, max(3, *map(len, cells))
        rule = f"-{'-' * width}{'-' if is_left else ':'}"
        texts = [f" {cell:{'<' if is_left else '>'}{width}} " for cell in cells]
        padded.append([texts[0], rule, *texts[1:]])
    return "\n".join(f"|{'|'.join(line)}|" for line in zip(*padded, strict=True))


def number(value: float) -> str:
    """Three significant digits, never in exponents: 0.000123, 0.0123, 1.23, 123."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(max(digits, 0), 6)}f}"


def write_tensorboard(output: Path, result: SuiteResult) -> Path:
    """Writes ``<output>/tensorboard`` and returns its path; each case has a run for each process."""
    root = output / "tensorboard"
    with closing(EventFile(root / "__suite__")) as file:
        _text(file, "suite", document(result))
    for case in result.cases:
        if case.counted:
            _write_hosts(root, case)
            _write_summary(root / case.name / "__summary__", case)
    return root


def _text(file: EventFile, tag: str, *parts: str) -> None:
    from tensorboard.plugins.text import summary_v2

    file.summary(summary_v2.text_pb(tag, "\n\n".join(parts)))


def _write_hosts(root: Path, case: CaseResult) -> None:
    """Writes every value of every process; the step is the number of the value in its series."""
    for host in range(max(len(run.hosts) for run in case.counted)):
        with closing(EventFile(root / case.name / f"host_{host}")) as file:
            for operation, metrics in collected(run.hosts[host] for run in case.counted).items():
                for metric, values in metrics.items():
                    for step, value in enumerate(chain(*values)):
                        file.scalar(f"{operation}_{metric}", value, step)


def _write_summary(directory: Path, case: CaseResult) -> None:
    from tensorboard.plugins.hparams import summary_v2

    options: Mapping[str, Any] = case.config["options"]
    checkpoint = case.config["checkpoint"]["name"] or "checkpoint"
    chosen = {k: v for k, v in options.items() if v is not None} | {"checkpoint": checkpoint}
    plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in chosen.items()}
    with closing(EventFile(directory)) as file:
        file.summary(summary_v2.hparams_pb(plain, trial_id=case.name))
        for operation, metrics in case.by_operation().items():
            rows: list[tuple[str, ...]] = []
            for metric, s in metrics.items():
                for name in ("min", "mean", "median", "max", "stddev"):
                    if (value := getattr(s, name)) is not None:
                        file.scalar(f"{operation}_{metric}_{name}", value, 0)
                spread = "" if s.ci95 is None else number(s.ci95)
                rows.append(
                    (metric, number(s.median), spread, number(s.min), number(s.max), str(s.n))
                )
            names = ("metric", "median", "± 95 %", "min", "max", "n")
            title = f"**{operation}** of {case.title}"
            _text(file, f"at_a_glance/{operation}", title, markdown_table(names, rows))
        facts = [*options.items(), *case.notes.items()]
        table = markdown_table(("option", "value"), facts)
        _text(file, "configuration", f"`{case.generator}`", table)
