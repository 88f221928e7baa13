"""Entries of ``rename=`` that fit nothing: told, as most of them are misspelled."""

from __future__ import annotations

from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._load.functions import nodes_in
from ckpt_core._load.opened import Opened
from ckpt_core._match import Idle, MatchRules, Renames
from ckpt_core._tree import format_path


def idle_renames(opened: Opened, rules: MatchRules) -> list[Idle]:
    """The entries that fit nothing in any item."""
    if not isinstance(rules.rename, Renames):
        return []
    return rules.rename.idle(
        format_path(path)
        for item in opened.items.values()
        for path in (*item.paths, *(path for path, _ in nodes_in(item.root)))
    )


def refuse_idle(opened: Opened, idle: list[Idle]) -> None:
    """Refuses entries that do nothing.

    Not where the checkpoint was saved under the new names: a program that reads both kinds names both.

    Raises:
        StructureMismatch: one for each entry.
    """
    wrong = [
        Mismatch(entry.old, "rename", None, entry.new, entry.nearest)
        for entry in idle
        if not entry.done
    ]
    if wrong:
        advice = "rename= maps whole entries at the beginning of saved paths to wanted ones."
        raise StructureMismatch(wrong, where=opened.path, advice=advice)


def advice_on(idle: list[Idle]) -> str:
    """What is said of such entries where other things differ, too."""
    told = ", ".join(
        f"{entry.old!r}" + (f" (nearest name: {entry.nearest})" if entry.nearest else "")
        for entry in idle
    )
    return f"Of rename=, nothing that was saved begins with {told}."
