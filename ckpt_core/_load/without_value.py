"""Leaves of a target that hold no value to keep: abstract leaves, and deleted arrays."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckpt_core._errors import Mismatch
from ckpt_core._lazy import jax
from ckpt_core._load.checkpoint import SavedItem
from ckpt_core._load.targets import SavedLeaf
from ckpt_core._tree import FlatTree, format_path
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core._tree.match import Match
from ckpt_core._tree.patterns import Select

WITHOUT_VALUE = ("(abstract)", "a restore that failed)", "as saved")
"""Endings of ``Mismatch.wanted`` for a leaf of which the target holds no value to keep."""


def is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def refuse_abstract_kept(
    found: Match,
    flat: FlatTree,
    wanted: Sequence[LeafSpec | None],
    item: SavedItem,
    everything: bool,
    selected: Select | None,
) -> None:
    """Adds a mismatch for each leaf that must come from the checkpoint but is missing there.

    An abstract leaf and a deleted array hold no value that ``missing="keep"`` could keep. If
    ``only=`` selects some leaves, abstract leaves outside the selection may stay abstract. A leaf
    that an adapter wants as it was saved (``SavedLeaf``) may not: the object has no value for it.

    Args:
        found: result of the match; mismatches are added to it or replaced in it.
        flat: the target.
        wanted: spec of each leaf of the target; None for a ``SavedLeaf``.
        item: the saved item.
        everything: True if the caller passed no ``only=``.
        selected: which leaves are to be loaded; None for all.
    """
    told = {entry.path: at for at, entry in enumerate(found.mismatches) if entry.kind == "missing"}
    without_value = (SavedLeaf, jax.ShapeDtypeStruct) if everything else SavedLeaf
    for path, leaf, spec, source in zip(flat.paths, flat.leaves, wanted, found.source, strict=True):
        if source is not None:
            continue
        chosen = selected is None or (spec is not None and selected(path, spec))
        deleted = chosen and is_deleted(leaf)
        if not deleted and not isinstance(leaf, without_value):
            continue
        text = format_path(path)
        why = "deleted: donated, or by a restore that failed" if deleted else "abstract"
        now = "as saved" if spec is None else f"{spec} ({why})"
        at = told.get(text)
        if at is None:
            found.mismatches.append(Mismatch(text, "missing", None, now, None, item.name))
        else:
            found.mismatches[at] = replace(found.mismatches[at], wanted=now)


def tell_of_abstract_rest(found: Match, flat: FlatTree, item: SavedItem) -> None:
    """Warns if ``only=`` leaves leaves of a live object abstract: it cannot compute with them."""
    rest = [
        format_path(path)
        for path, leaf, source in zip(flat.paths, flat.leaves, found.source, strict=True)
        if source is None and isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if rest:
        shown = ", ".join(rest[:5]) + (f" and {len(rest) - 5} more" if len(rest) > 5 else "")
        warnings.warn(
            f"item {item.name or 'state'!r}: only= leaves {len(rest)} leaves of an abstract object without a value: "
            f"{shown}. Set them before the object is used, or restore all of it",
            UserWarning,
            stacklevel=2,
        )
