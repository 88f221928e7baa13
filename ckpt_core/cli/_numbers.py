"""``ckpt diff`` and ``ckpt stats``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table

from ckpt_core._look.difference import Difference, LeafDifference, compare
from ckpt_core._look.statistics import LeafStatistics, leaf_statistics
from ckpt_core._words import in_order
from ckpt_core.cli._steps import is_run, steps_in
from ckpt_core.cli._text import (
    WIDE_COLUMNS,
    console,
    counted,
    escape,
    one_line,
    print_json,
    size,
)

Row = tuple[str, str, list[str]]
"""Name of a leaf, what it is, and numbers about it."""
DIFFERENT = 1
NOT_FINITE = 1


def diff(a: str, b: str, *, only: list[str], limit: int, as_json: bool) -> int:
    """Prints what differs; returns 1 if anything does."""
    found = compare(newest(a), newest(b), only=only or None)
    if as_json:
        changed = [asdict(leaf) for leaf in found.changed]
        compared = len(found.leaves)
        content = {**asdict(found), "leaves": changed, "compared": compared, "same": found.same}
        print_json(content)
        return 0 if found.same else DIFFERENT
    out = console()
    out.print(f"[bold]A[/bold] {escape(found.a)}\n[bold]B[/bold] {escape(found.b)}")
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        lines = [f"only in {side}: {one_line(name)}" for name in names]
        _print_first(lines, limit, f"more that only {side} has", out)
    lines = [f"{_place(node.item, node.path)}: {node.a} -> {node.b}" for node in found.structure]
    _print_first(lines, limit, "containers more", out)
    for name, same in found.others.items():
        how = {True: "the same", False: "differs", None: "is there on both sides; not compared"}
        out.print(f"item {one_line(name)}: {how[same]}", markup=False)
    if not found.metadata:
        out.print("metadata differ")
    for part in _changed(found.changed[:limit], out.width):
        out.print(part, soft_wrap=isinstance(part, str))
    if len(found.changed) > limit:
        out.print(f"and {len(found.changed) - limit} leaves more: --limit shows more")
    out.print(_summary(found))
    return 0 if found.same else DIFFERENT


def _print_first(lines: Sequence[str], limit: int, what: str, out: Console) -> None:
    for line in lines[:limit]:
        out.print(line, markup=False, soft_wrap=True)
    if len(lines) > limit:
        out.print(f"and {len(lines) - limit} {what}: --limit shows more")


def newest(path: str) -> str:
    """The path of a checkpoint: of a directory of steps, that of the newest one."""
    if not is_run(path):
        return path
    steps = steps_in(path)
    return steps.path(steps.all()[-1])


def _summary(found: Difference) -> str:
    same = len(found.leaves) - len(found.changed)
    text = f"{counted(same, 'leaf is', 'leaves are')} the same bit for bit, {len(found.changed)} differ"
    alone = (("A", found.only_a), ("B", found.only_b))
    text += "".join(f", {len(names)} only in {side}" for side, names in alone if names)
    if found.structure:
        text += f"; {counted(len(found.structure), 'container differs', 'containers differ')}"
    return text


def _changed(leaves: list[LeafDifference], width: int) -> Iterator[RenderableType]:
    rows: list[Row] = []
    for leaf in leaves:
        what = escape(leaf.a if leaf.a == leaf.b else f"{leaf.a} -> {leaf.b}")
        if leaf.kind in ("shape", "text"):
            rows.append((escape(_place(leaf.item, leaf.path)), what, [""] * 6))
            continue
        numbers = [
            f"{leaf.changed:,} of {leaf.count:,}",
            *(
                "" if math.isnan(value) else f"{value:.3g}"
                for value in (leaf.largest, leaf.rms, leaf.relative)
            ),
            "" if math.isnan(leaf.cosine) else f"{leaf.cosine:.6f}",
            _not_finite(leaf),
        ]
        rows.append(
            (escape(_place(leaf.item, leaf.path)), "" if leaf.a == leaf.b else what, numbers)
        )
    columns = ("changed", "largest", "rms", "relative", "cosine", "NaN, Inf")
    return _rows("A -> B", columns, rows, width)


def _rows(
    what: str, columns: Sequence[str], rows: Sequence[Row], width: int
) -> Iterator[RenderableType]:
    """The rows as one table; on a narrow console some lines for each, with the names of its numbers."""
    if width < WIDE_COLUMNS:
        for name, kind, numbers in rows:
            pairs = zip(columns, numbers, strict=True)
            words = [kind, *(f"{column} {number}" for column, number in pairs if number)]
            yield name
            yield Padding(Columns(filter(None, words), padding=(0, 2)), (0, 0, 0, 4), expand=False)
    elif rows:
        table = Table(box=None, pad_edge=False)
        for name in ("leaf", what):
            table.add_column(name, overflow="fold")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for name, kind, numbers in rows:
            table.add_row(name, kind, *numbers)
        yield table


def _place(item: str, path: str) -> str:
    return "/".join(part for part in (item, path) if part not in ("", "(root)"))


def _not_finite(leaf: LeafDifference) -> str:
    before, after = (leaf.nan_a, leaf.inf_a), (leaf.nan_b, leaf.inf_b)
    if not any(before + after):
        return ""
    return f"{before[0]}, {before[1]} -> {after[0]}, {after[1]}"


def stats(path: str, *, only: list[str], as_json: bool) -> int:
    """Prints numbers about every leaf; returns 1 if one holds NaN or infinity."""
    chosen = newest(path)
    found = sorted(
        leaf_statistics(chosen, only=only or None),
        key=lambda leaf: (leaf.item, in_order(leaf.path)),
    )
    wrong = any(leaf.nan_count or leaf.inf_count for leaf in found)
    if as_json:
        print_json([_jsonable(leaf) for leaf in found])
        return NOT_FINITE if wrong else 0
    rows: list[Row] = []
    for leaf in found:
        numbers = [""] * 8
        if leaf.count:
            shown = (leaf.min, leaf.max, leaf.mean, leaf.std, leaf.norm)
            zeros = f"{leaf.zero_count / leaf.count:.0%}" if leaf.zero_count else ""
            bad = (leaf.nan_count, leaf.inf_count)
            numbers = [
                *(f"{value:.4g}" for value in shown),
                zeros,
                *(f"[red]{count:,}[/red]" if count else "" for count in bad),
            ]
        what = escape(f"{leaf.dtype}{list(leaf.shape)}")
        rows.append((escape(_place(leaf.item, leaf.path)), what, [size(leaf.size_bytes), *numbers]))
    out = console()
    if chosen != path:
        out.print(f"{one_line(chosen)}, the newest step", markup=False, soft_wrap=True)
    columns = ("size", "min", "max", "mean", "std", "norm", "zero", "NaN", "Inf")
    for part in _rows("what", columns, rows, out.width):
        out.print(part, soft_wrap=isinstance(part, str))
    return NOT_FINITE if wrong else 0


def _jsonable(leaf: LeafStatistics) -> dict[str, object]:
    mean = leaf.mean
    shown = [mean.real, mean.imag] if isinstance(mean, complex) else mean
    return {**asdict(leaf), "mean": shown}
