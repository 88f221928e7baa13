"""Targets that say what they want by description, and what they do not want by ``...``."""

from __future__ import annotations

from dataclasses import replace

from ckpt_core._errors import Mismatch
from ckpt_core._load.checkpoint import SavedItem
from ckpt_core._load.targets import SavedLeaf
from ckpt_core._results import LeafInfo
from ckpt_core._tree import FlatTree, Path, format_path
from ckpt_core._tree.abstract import Placeholders, as_abstract
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core._tree.match import MatchRules, renamed_path
from ckpt_core._tree.patterns import Select


def as_asked(flat: FlatTree) -> tuple[FlatTree, Placeholders]:
    """The target with a ``jax.ShapeDtypeStruct`` for any description of an array; and its placeholders.

    Of the leaves that ``inspect`` gives, those that are no jax arrays are wanted as they were saved.
    """
    leaves = [
        SavedLeaf(LeafSpec(leaf.kind, leaf.dtype, leaf.shape))
        if isinstance(leaf, LeafInfo) and leaf.kind != "jax"
        else as_abstract(leaf)
        for leaf in flat.leaves
    ]
    return replace(flat, leaves=leaves), Placeholders(flat.paths, leaves)


def without(places: Placeholders, rules: MatchRules, selected: Select | None) -> Select | None:
    """The selection, without what the placeholders leave out; None if everything is selected."""
    if not places.paths:
        return selected

    def selects(path: Path, spec: LeafSpec) -> bool:
        if places.cover(path) or places.cover(renamed_path(path, rules.rename)):
            return False
        return selected is None or selected(path, spec)

    return selects


def placeholders_for_nothing(
    places: Placeholders, item: SavedItem, rules: MatchRules
) -> list[Mismatch]:
    """A mismatch for each placeholder below which nothing was saved, unless that is allowed."""
    if not places.paths or rules.missing == "keep":
        return []
    saved: set[tuple[str, ...]] = set()
    for path in item.paths:
        text = tuple(map(str, renamed_path(path, rules.rename)))
        saved.update(text[:length] for length in range(len(text) + 1))
    return [
        Mismatch(
            format_path(path), "missing", None, "anything, to be left out", None, item.name or None
        )
        for path in places.paths
        if tuple(map(str, path)) not in saved
    ]
