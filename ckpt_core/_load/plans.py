"""The plan of one item: what is read of it, and what becomes of that: new containers, or the state of live objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._frozen import frozen
from ckpt_core._load.targets import Target
from ckpt_core._saved import SavedItem
from ckpt_core._tree import Path
from ckpt_core._tree.match import Match

Undo = Callable[[], object]
"""A function that sets live objects back to the state that they had before the restore."""
Make = Callable[[list[Any]], Any]
"""A function from the leaves of the result, in order, to the value of the item."""


@frozen
class LiveTarget:
    """The live objects in a target. ``ItemPlan.make`` sets them; this says which they are, and how to undo that.

    Attributes:
        objects: pairs of a live object and whether one target may contain it twice.
        undo: notes their present state, and returns the function that sets them back to it; None if that is
            impossible. Changes nothing itself.
        early: True for a data pipeline: it is set before arrays are read, with no leaves, so that it prefetches.
        set_parts: if the target is one object that can be set in parts: takes values by path, sets
            them, and returns the arrays that the object then holds. Else None.
        leaves: the leaves that the objects hold at present, of a target that can be set in parts.
    """

    objects: Sequence[tuple[Any, bool]]
    undo: Callable[[], Undo | None]
    early: bool = False
    set_parts: Callable[[Mapping[Path, Any]], list[Any]] | None = None
    leaves: Callable[[], Sequence[Any]] = list


@dataclass
class ItemPlan:
    """One item, matched and ready to be read. "Result" is the list of leaves that the load fills.

    Attributes:
        item: the saved item, with the spec of every leaf.
        make: builds the item's value from the leaves of the result; where ``live`` is there, sets its objects.
        live: the live objects in the target, if there are any.
        positions: for each leaf of the result, its position in the saved item; None if the leaf is
            not read and the target's value is kept.
        kept: the target's leaves, by position in the result; leaves that are read replace theirs.
        targets: dtype, sharding and regions of each leaf that is read, by position in the result.
        match: what the report needs; None without a target.
        paths: of the target's leaves, which patterns may name; empty without a target.
    """

    item: SavedItem
    make: Make
    live: LiveTarget | None = None
    positions: Sequence[int | None] = ()
    kept: list[Any] = field(default_factory=list[Any])
    targets: dict[int, Target] = field(default_factory=dict[int, Target])
    match: Match | None = None
    paths: Sequence[Path] = ()

    @property
    def name(self) -> str:
        """Name of the item, for messages."""
        return self.item.name or "the target"

    @property
    def live_objects(self) -> Sequence[tuple[Any, bool]]:
        """The live objects that it sets, each with whether one target may contain it twice."""
        return () if self.live is None else self.live.objects


def constant(value: Any) -> Make:
    """Makes a value that is known before any array is read."""
    return lambda _: value


def then(make: Make, convert: Callable[[Any], Any]) -> Make:
    """What ``make`` makes, converted."""
    return lambda leaves: convert(make(leaves))


def renamed_dicts(paths: Sequence[str], leaves: list[Any]) -> dict[str, Any]:
    """Nested dicts by the new paths, for ``rename=`` without ``like``: the saved containers do not fit renamed paths."""
    root: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node: Any = root
        *parents, last = path.split("/")
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"rename= gives two leaves the path {path!r}, or puts one leaf inside another"
            )
        node[last] = leaf
    return root


def as_json(value: Any) -> Any:
    """A tree of plain values, as JSON would give it back."""
    if isinstance(value, dict):
        return {key: as_json(part) for key, part in value.items()}
    return list(map(as_json, value)) if isinstance(value, list | tuple) else value


def as_numpy_state(value: Any) -> Any:
    """Orbax's numpy random key, as the tuple or dict that numpy's ``set_state`` takes."""
    return value if isinstance(value, dict) else tuple(value)
