"""Pytrees out of a checkpoint: without a target as Orbax returns them, or as a target asks."""

from __future__ import annotations

from typing import Any

import ckpt_core as ckpt
from ckpt_core import ItemInfo, LeafInfo
from ckpt_orbax._leaves import PLACEHOLDER, Wanted, wanted
from ckpt_orbax._plain import Path, filled, leaves_of, orbax_form, path_text, plain


def load_tree(
    path: str,
    item: ItemInfo,
    target: Any,
    *,
    partial: bool,
    options: ckpt.Options,
) -> Any:
    """One item of a checkpoint as a new tree, as its target asks; ``partial`` leaves out what that does not name."""
    if target is None:
        return orbax_form(ckpt.load(path, item=item.name, options=options))
    asked = _Asked({leaf.path: leaf for leaf in item.leaves})
    like = plain(target, asked.ask)
    asked.refuse_misplaced()
    loaded = ckpt.load(
        path,
        like,
        item=item.name,
        cast=True,
        unexpected="ignore" if partial else "error",
        options=options,
    )
    return filled(target, asked.finished(loaded))


def differences(error: ckpt.StructureMismatch, leaving_out: str, keeping: str = "") -> str:
    """A message about a mismatch, with Orbax's own arguments as advice instead of those of ``ckpt_core.load``."""
    kinds = {one.kind for one in error.mismatches}
    lines = [str(one) for one in error.mismatches] or [str(error)]
    if "unexpected" in kinds or not kinds:
        lines.append(f"To leave saved leaves out: {leaving_out}")
    if "missing" in kinds:
        lines.append("What was not saved cannot be restored: leave it out of what is asked for")
        if keeping:
            lines.append(f"To keep the target's values there: {keeping}")
    return "\n".join(lines)


class _Asked:
    """What the leaves of one target ask for."""

    def __init__(self, saved: dict[str, LeafInfo]) -> None:
        self._saved = saved
        self._wanted: dict[Path, Wanted] = {}
        self.left_out: dict[str, Path] = {}

    def ask(self, path: Path, leaf: Any) -> Any:
        """What ckpt takes as the target of one leaf."""
        text = path_text(path)
        saved = self._saved.get(text)
        if leaf is PLACEHOLDER:
            self.left_out[text] = path
            return leaf
        self._wanted[path] = wanted(text, leaf, saved)
        return self._wanted[path].like

    def refuse_misplaced(self) -> None:
        """Raises StructureMismatch if ``...`` stands where no leaf was saved."""
        wrong = [
            ckpt.Mismatch(text, "missing", None, "... for a leaf, and no leaf has this path")
            for text in self.left_out
            if text not in self._saved
        ]
        if wrong:
            raise ckpt.StructureMismatch(wrong)

    def finished(self, loaded: Any) -> dict[Path, Any]:
        """The values of the target's leaves, by path."""
        values = leaves_of(loaded)
        finished = {path: one.finish(values[path]) for path, one in self._wanted.items()}
        return {**finished, **dict.fromkeys(self.left_out.values(), PLACEHOLDER)}
