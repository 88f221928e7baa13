"""``ckpt diff`` and ``ckpt stats``; they import what reads arrays when they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ckpt_core._words import counted, in_order, size
from ckpt_core.cli._shared import Json, Newest, Only, console, escape, print_json, say

if TYPE_CHECKING:
    from ckpt_core._look.difference import Difference, LeafDifference

Row = tuple[str, str, list[str]]
"""Name of a leaf, what it is, and numbers about it."""
_WIDE_COLUMNS = 120
"""A table with long names and many numbers needs so many columns; a narrower console gets two lines for each row."""


def diff(
    a: Newest,
    b: Newest,
    only: Only = None,
    limit: Annotated[int, typer.Option(min=0, help="Lines of each kind.")] = 30,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints leaf by leaf: how far values moved. The exit code is 1 if anything differs."""
    from ckpt_core._look.difference import compare

    found = compare(_newest(a), _newest(b), only=only or None)
    if as_json:
        changed = [asdict(leaf) for leaf in found.changed]
        compared = len(found.leaves)
        content = {**asdict(found), "leaves": changed, "compared": compared, "same": found.same}
        print_json(content)
    else:
        _print_difference(found, limit)
    return 0 if found.same else 1


def _print_difference(found: Difference, limit: int) -> None:
    out = console()
    out.print(f"[bold]A[/bold] {escape(found.a)}\n[bold]B[/bold] {escape(found.b)}")
    same = counted(len(found.leaves) - len(found.changed), "leaf is", "leaves are")
    summary = f"{same} the same bit for bit, {len(found.changed)} differ"
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        lines = [f"only in {side}: {name}" for name in names]
        _print_first(lines, limit, f"more that only {side} has")
        summary += f", {len(names)} only in {side}" if names else ""
    lines = [f"{_place(node)}: {node.a} -> {node.b}" for node in found.structure]
    _print_first(lines, limit, "containers more")
    if lines:
        summary += f"; {counted(len(lines), 'container differs', 'containers differ')}"
    how = {True: "the same", False: "differs", None: "is there on both sides; not compared"}
    for name, is_same in found.others.items():
        say(f"item {name}: {how[is_same]}")
    if not found.metadata:
        say("metadata differ")
    columns = ("changed", "largest", "rms", "relative", "cosine", "NaN, Inf")
    _print_rows("A -> B", columns, list(map(_row, found.changed[:limit])), out)
    if len(found.changed) > limit:
        say(f"and {len(found.changed) - limit} leaves more: --limit shows more")
    out.print(summary)


def _print_first(lines: Sequence[str], limit: int, what: str) -> None:
    for line in lines[:limit]:
        say(line)
    if len(lines) > limit:
        say(f"and {len(lines) - limit} {what}: --limit shows more")


def _newest(path: str) -> str:
    """The path of a checkpoint: of a directory of steps, that of the newest one."""
    from ckpt_core.cli._steps import is_run, steps_in

    if not is_run(path):
        return path
    steps = steps_in(path)
    return steps.path(steps.all()[-1])


def _row(leaf: LeafDifference) -> Row:
    name = escape(_place(leaf))
    what = escape(leaf.a if leaf.a == leaf.b else f"{leaf.a} -> {leaf.b}")
    if leaf.kind in ("shape", "text"):
        return name, what, [""] * 6
    values = (leaf.largest, leaf.rms, leaf.relative)
    before, after = (leaf.nan_a, leaf.inf_a), (leaf.nan_b, leaf.inf_b)
    numbers = [
        f"{leaf.changed:,} of {leaf.count:,}",
        *("" if math.isnan(value) else f"{value:.3g}" for value in values),
        "" if math.isnan(leaf.cosine) else f"{leaf.cosine:.6f}",
        f"{before[0]}, {before[1]} -> {after[0]}, {after[1]}" if any(before + after) else "",
    ]
    return name, "" if leaf.a == leaf.b else what, numbers


def _print_rows(what: str, columns: Sequence[str], rows: Sequence[Row], out: Console) -> None:
    """The rows as a table; on a narrow console some lines for each, which name its numbers."""
    if out.width < _WIDE_COLUMNS:
        for name, kind, numbers in rows:
            pairs = zip(columns, numbers, strict=True)
            words = [kind, *(f"{column} {number}" for column, number in pairs if number)]
            out.print(name, soft_wrap=True)
            found = Columns(filter(None, words), padding=(0, 2))
            out.print(Padding(found, (0, 0, 0, 4), expand=False))
    elif rows:
        table = Table(box=None, pad_edge=False)
        for name in ("leaf", what):
            table.add_column(name, overflow="fold")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for name, kind, numbers in rows:
            table.add_row(name, kind, *numbers)
        out.print(table)


def _place(one: Any) -> str:
    return "/".join(part for part in (one.item, one.path) if part not in ("", "(root)"))


def stats(path: Newest, only: Only = None, as_json: Json = False) -> int:
    """Print range, mean, norm, NaN and Inf of every leaf. The exit code is 1 if there are any of the last two."""
    from ckpt_core._look.leaves import leaf_statistics

    chosen = _newest(path)
    leaves = leaf_statistics(chosen, only=only or None)
    found = sorted(leaves, key=lambda leaf: (leaf.item, in_order(leaf.path)))
    wrong = any(leaf.nan_count or leaf.inf_count for leaf in found)
    if as_json:
        print_json([asdict(leaf) | {"mean": _plain(leaf.mean)} for leaf in found])
        return 1 if wrong else 0
    rows: list[Row] = []
    for leaf in found:
        numbers = [""] * 8
        if leaf.count:
            shown = (leaf.min, leaf.max, leaf.mean, leaf.std, leaf.norm)
            bad = (leaf.nan_count, leaf.inf_count)
            numbers = [
                *(f"{value:.4g}" for value in shown),
                f"{leaf.zero_count / leaf.count:.0%}" if leaf.zero_count else "",
                *(f"[red]{count:,}[/red]" if count else "" for count in bad),
            ]
        what = escape(f"{leaf.dtype}{list(leaf.shape)}")
        rows.append((escape(_place(leaf)), what, [size(leaf.size_bytes), *numbers]))
    out = console()
    if chosen != path:
        say(f"{chosen}, the newest step")
    columns = ("size", "min", "max", "mean", "std", "norm", "zero", "NaN", "Inf")
    _print_rows("what", columns, rows, out)
    return 1 if wrong else 0


def _plain(value: complex) -> object:
    return [value.real, value.imag] if isinstance(value, complex) else value
