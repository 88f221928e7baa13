"""The plan of one item: what is read of it, and what becomes of that: new containers, or the state of live objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._load.targets import Target
from ckpt_core._saved import SavedItem
from ckpt_core._tree import Path
from ckpt_core._tree.match import Match

Make = Callable[[list[Any]], Any]
"""A function from the leaves of the result, in order, to the value of the item."""


@dataclass(frozen=True)
class LiveTarget:
    """The live objects in a target, which ``ItemPlan.make`` sets."""

    objects: Sequence[tuple[Any, bool]]  # each with whether one target may contain it twice
    early: bool = False  # a data pipeline: set first and without leaves, so that it prefetches
    # Of one object that can be set in parts: sets values by path, and returns the arrays that it then holds.
    set_parts: Callable[[Mapping[Path, Any]], list[Any]] | None = None
    leaves: Callable[[], Sequence[Any]] = list  # that the objects hold now, if set in parts


@dataclass
class ItemPlan:
    """One item, matched and ready to be read. "Result" is the list of leaves that the load fills; ``positions``, ``kept`` and
    ``targets`` go by its positions.
    """

    item: SavedItem  # with the spec of every leaf
    make: Make  # builds the item's value from the result, and sets the objects of ``live``
    live: LiveTarget | None = None
    positions: Sequence[int | None] = ()  # in the item; None: not read, the target's is kept
    kept: list[Any] = field(default_factory=list[Any])  # of the target, also those that are read
    targets: dict[int, Target] = field(default_factory=dict[int, Target])  # of leaves that are read
    match: Match | None = None  # for the report; None without a target
    paths: Sequence[Path] = ()  # of the target's leaves, for patterns; empty without a target

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
