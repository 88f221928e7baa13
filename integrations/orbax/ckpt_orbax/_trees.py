"""Pytrees out of a checkpoint: without a target as Orbax returns them, or as a target asks."""

from __future__ import annotations

from typing import Any

import ckpt_core as ckpt
from ckpt_core import ItemInfo
from ckpt_orbax._errors import TreeMismatchError
from ckpt_orbax._leaves import PLACEHOLDER, Wanted, wanted
from ckpt_orbax._plain import Path, filled, leaves_of, orbax_form, path_text, plain


def load_tree(
    path: str,
    item: ItemInfo,
    target: Any,
    options: ckpt.Options,
    *,
    partial: bool,
    leaving_out: str,
    keeping: str = "",
) -> Any:
    """One item of a checkpoint as a new tree, as its target asks; ``partial`` leaves out what that does not name. If the
    two differ, TreeMismatchError has ``leaving_out`` and ``keeping`` as advice for leaves of one side alone.
    """
    if target is None:
        return orbax_form(ckpt.load(path, item=item.name, options=options))
    saved = {leaf.path: leaf for leaf in item.leaves}
    asked: dict[Path, Wanted] = {}
    misplaced: list[ckpt.Mismatch] = []

    def ask(at: Path, leaf: Any) -> Any:
        text = path_text(at)
        if leaf is not PLACEHOLDER:
            asked[at] = wanted(text, leaf, saved.get(text))
            return asked[at].like
        asked[at] = Wanted(leaf)
        if text not in saved:
            why = "... for a leaf, and no leaf has this path"
            misplaced.append(ckpt.Mismatch(text, "missing", None, why))
        return leaf

    try:
        like = plain(target, ask)
        if misplaced:
            raise ckpt.StructureMismatch(misplaced)
        unexpected = "ignore" if partial else "error"
        loaded = ckpt.load(
            path, like, item=item.name, cast=True, unexpected=unexpected, options=options
        )
    except ckpt.StructureMismatch as error:
        raise TreeMismatchError(
            f"User-provided restore item and on-disk value differ ({item.name or path}): "
            + _differences(error, leaving_out, keeping)
        ) from error
    values = leaves_of(loaded)
    return filled(target, {at: one.finish(values[at]) for at, one in asked.items()})


def _differences(error: ckpt.StructureMismatch, leaving_out: str, keeping: str) -> str:
    """A message with Orbax's own arguments as advice instead of those of ``ckpt_core.load``."""
    kinds = {one.kind for one in error.mismatches}
    lines = [str(one) for one in error.mismatches] or [str(error)]
    if "unexpected" in kinds or not kinds:
        lines.append(f"To leave saved leaves out: {leaving_out}")
    if "missing" in kinds:
        lines.append("What was not saved cannot be restored: leave it out of what is asked for")
        if keeping:
            lines.append(f"To keep the target's values there: {keeping}")
    return "\n".join(lines)
