"""The results of a run as Markdown tables for a document, from its JSON lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_core.bench._jsonl import read_result
from ckpt_core.bench._rows import Row, not_empty, operations_of, rows_of

_COLUMNS = ("case", "median s", "min - max", "± 95 %", "GB/s", "to first", "peak MB", "durable")


def markdown(path: Path) -> str:
    """The environment, then a table for each group and operation, with ratios to its first case."""
    result = read_result(path)
    parts = [f"## {result.suite_name}", "", _where(result.environment), ""]
    if result.interrupted:
        parts += ["The run was cut short: these are the runs that had ended.", ""]
    for group, cases in result.groups.items():
        for operation in operations_of(cases):
            if rows := rows_of(cases, operation):
                parts += [f"**{group}: {operation}**", "", _table_of(rows), ""]
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


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], words: Iterable[str] = ()) -> str:
    """A table in Markdown; columns in ``words`` are aligned to the left, the others to the right, if there are any."""
    left = set(words) or set(names)
    rule = ("---" if name in left else "---:" for name in names)
    lines = (f"| {' | '.join(map(str, row))} |" for row in [names, *rows])
    first, *others = lines
    return "\n".join([first, f"|{'|'.join(rule)}|", *others])


def _table_of(rows: Sequence[Row]) -> str:
    names = not_empty(_COLUMNS, rows)
    shown = ["" if name == "case" else name for name in names]
    return table(shown, [[row.cells[name] for name in names] for row in rows], ("", "durable"))
