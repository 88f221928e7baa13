"""Entries of ``rename=`` that match no saved path are refused: most of them are misspelled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._load.adapter_renames import adapter_of_renames
from ckpt_core._load.checkpoint import Checkpoint
from ckpt_core._load.file_names import spellings
from ckpt_core._load.functions import nodes_in
from ckpt_core._load.outcomes import live_of
from ckpt_core._load.planned import ItemPlan
from ckpt_core._tree import format_path
from ckpt_core._tree.match import Idle, MatchRules, Renames


def idle_renames(
    checkpoint: Checkpoint, rules: MatchRules, plans: Sequence[ItemPlan]
) -> list[Idle]:
    """The entries of a ``rename=`` dict that match no path in any item of the checkpoint."""
    if not isinstance(rules.rename, Renames):
        return []
    items = checkpoint.items.values()
    found = (
        format_path(path)
        for item in items
        for path in (*item.paths, *(path for path, _ in nodes_in(item.root)))
    )
    idle = rules.rename.idle(itertools.chain(found, *map(spellings, items)))
    return [entry for entry in idle if not any(_fits_by_adapter(entry, plan) for plan in plans)]


def _fits_by_adapter(entry: Idle, plan: ItemPlan) -> bool:
    """Whether the target, or its adapter, understands an entry that is no prefix of a saved path.

    Adapters such as the one for Keras have names in the middle of paths.
    """
    live = live_of(plan.outcome)
    if any(entry.old in getattr(obj, "reads_renames", ()) for obj, _ in live):
        return True
    adapter = adapter_of_renames(live)
    if adapter is None:
        return False
    return bool(adapter.renamed({entry.old: entry.new}, list(map(format_path, plan.item.paths))))


def refuse_idle(opened: Checkpoint, idle: list[Idle]) -> None:
    """Raises StructureMismatch that lists the entries which match no saved path.

    An entry whose new name was saved is accepted: a program that loads checkpoints from before and
    after a renaming passes the same ``rename=`` for both.
    """
    wrong = [
        Mismatch(entry.old, "rename", None, entry.new, entry.nearest)
        for entry in idle
        if not entry.done
    ]
    if wrong:
        advice = "An entry of rename= must be a saved path, or the beginning of one up to a slash."
        raise StructureMismatch(wrong, where=opened.path, advice=advice)


def advice_on(idle: list[Idle]) -> str:
    """The sentence about such entries in an error that lists other differences."""
    told = ", ".join(
        f"{entry.old!r}" + (f" (nearest name: {entry.nearest})" if entry.nearest else "")
        for entry in idle
    )
    return f"No saved path begins with these entries of rename=: {told}."
