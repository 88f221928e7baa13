"""The plan of one item, and what its leaves become: new containers, or the state of live objects.

There is one class for each way in which an item ends. ``make`` takes the leaves of the result, in
order, and returns the item's value. Outcomes that set live objects also say which objects these
are, and how to set them back if the restore fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ckpt_core import _adapters
from ckpt_core._load.live_objects import held, setting_back
from ckpt_core._load.targets import Target
from ckpt_core._saved import SavedItem
from ckpt_core._tree import FlatTree, Node, Path, flatten, importable_type, unflatten
from ckpt_core._tree.match import Match

Undo = Callable[[], object]
"""A function that sets live objects back to the state that they had before the restore."""


class Outcome(Protocol):
    """How the leaves of one item become its value."""

    def make(self, leaves: list[Any]) -> Any:
        """The item's value, from the leaves of the result."""
        ...


@runtime_checkable
class LiveOutcome(Outcome, Protocol):
    """An outcome that sets live objects.

    Attributes:
        live: pairs of a live object and whether one target may contain it twice.
        early: True if ``make`` is called before arrays are read, with no leaves.
    """

    @property
    def live(self) -> Sequence[tuple[Any, bool]]: ...

    @property
    def early(self) -> bool: ...

    def undo(self) -> Undo | None:
        """A function that sets the objects back to their present state; None if that is impossible.

        Calling ``undo`` itself changes nothing: it only notes the present state.
        """
        ...


@dataclass(frozen=True)
class Value:
    """A value that is known before any array is read."""

    value: Any

    def make(self, leaves: list[Any]) -> Any:
        return self.value


@dataclass(frozen=True)
class Containers:
    """New containers, as in the saved structure or in a target without live objects."""

    root: Node
    resolve: Callable[[Node], Any] | None = None

    def make(self, leaves: list[Any]) -> Any:
        return unflatten(self.root, leaves, resolve=self.resolve)


@dataclass(frozen=True)
class RenamedDicts:
    """Nested dicts by the new paths, for ``rename=`` without ``like``.

    The saved containers do not fit renamed paths.
    """

    paths: Sequence[str]

    def make(self, leaves: list[Any]) -> Any:
        root: dict[str, Any] = {}
        for path, leaf in zip(self.paths, leaves, strict=True):
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


@dataclass(frozen=True)
class Converted:
    """The value of another outcome, converted by a function."""

    saved: Outcome
    convert: Callable[[Any], Any]

    def make(self, leaves: list[Any]) -> Any:
        return self.convert(self.saved.make(leaves))


def as_json(value: Any) -> Any:
    """A tree of plain values, as JSON would give it back."""
    if isinstance(value, dict):
        return {key: as_json(part) for key, part in value.items()}
    return list(map(as_json, value)) if isinstance(value, list | tuple) else value


def as_numpy_state(value: Any) -> Any:
    """Orbax's numpy random key, as the tuple or dict that numpy's ``set_state`` takes."""
    return value if isinstance(value, dict) else tuple(value)


@dataclass(frozen=True)
class LiveTree:
    """A target that contains live objects, or is one; ``make`` sets them.

    Attributes:
        like: the target.
        root: structure of the target.
        kept: its leaves; the same list as ``ItemPlan.kept``, so that a restore can drop the leaves
            that it has replaced, and their memory is freed.
        live: see ``LiveOutcome``.
        limit_bytes: if more bytes than this must be copied to undo the restore, it is not undone.
        paths: paths of the leaves of the result.
        set_parts: if the target is one object that can be set in parts: takes values by path, sets
            them, and returns the arrays that the object then holds. Else None.
    """

    like: Any
    root: Node
    kept: list[Any]
    live: Sequence[tuple[Any, bool]]
    limit_bytes: int
    paths: Sequence[Path] = ()
    set_parts: Callable[[Mapping[Path, Any]], list[Any]] | None = None
    early: bool = field(default=False, init=False)

    def make(self, leaves: list[Any]) -> Any:
        return unflatten(self.root, leaves)

    def undo(self) -> Undo | None:
        if all(_adapters.is_held_by_reference(obj) for obj, _ in self.live):
            return functools.partial(unflatten, self.root, list(self.kept))
        return held(self.like, self.limit_bytes)

    def held_now(self) -> Sequence[Any]:
        """The leaves that the target's objects hold at present."""
        return flatten(self.like, expand=_adapters.expander()).leaves


@dataclass(frozen=True)
class LiveObject:
    """A user's object with ``set_state``, which accepts any saved structure.

    Attributes:
        adapter: adapter of the object.
        obj: the object.
        now: its state before the restore.
        root: structure of the saved state, with the container classes of the present state where
            both structures are equal.
        limit_bytes: as for ``LiveTree``.
    """

    adapter: Any
    obj: Any
    now: FlatTree
    root: Node
    limit_bytes: int
    early: bool = field(default=False, init=False)

    @property
    def live(self) -> Sequence[tuple[Any, bool]]:
        return ((self.obj, False),)

    def make(self, leaves: list[Any]) -> Any:
        self.adapter.set_state(self.obj, unflatten(self.root, leaves, resolve=importable_type))
        return self.obj

    def undo(self) -> Undo | None:
        return setting_back(self._set_before, self.now.leaves, self.limit_bytes)

    def _set_before(self, leaves: list[Any]) -> None:
        self.adapter.set_state(self.obj, unflatten(self.now.root, leaves))


@dataclass(frozen=True)
class Pipeline:
    """A data pipeline: set before arrays are read, so that it prefetches meanwhile."""

    adapter: Any
    obj: Any
    state: Any
    early: bool = field(default=True, init=False)

    @property
    def live(self) -> Sequence[tuple[Any, bool]]:
        return ((self.obj, False),)

    def make(self, leaves: list[Any]) -> Any:
        self.adapter.set_state(self.obj, self.state)
        return self.obj

    def undo(self) -> Undo | None:
        has_position = isinstance(self.adapter, _adapters.verbs.HasPosition)
        take = self.adapter.get_position if has_position else self.adapter.get_state
        before = take(self.obj)
        return functools.partial(self.adapter.set_state, self.obj, before)


def live_of(outcome: Outcome) -> Sequence[tuple[Any, bool]]:
    """The live objects that an outcome sets, each with whether one target may contain it twice."""
    return outcome.live if isinstance(outcome, LiveOutcome) else ()


@dataclass
class ItemPlan:
    """One item, matched and ready to be read. "Result" is the list of leaves that the load fills.

    Attributes:
        item: the saved item, with the spec of every leaf.
        outcome: builds the item's value from the leaves of the result.
        positions: for each leaf of the result, its position in the saved item; None if the leaf is
            not read and the target's value is kept.
        kept: the target's leaves, by position in the result; leaves that are read replace theirs.
        targets: dtype, sharding and regions of each leaf that is read, by position in the result.
        match: what the report needs; None without a target.
        paths: of the target's leaves, which patterns may name; empty without a target.
    """

    item: SavedItem
    outcome: Outcome
    positions: Sequence[int | None] = ()
    kept: list[Any] = field(default_factory=list[Any])
    targets: dict[int, Target] = field(default_factory=dict[int, Target])
    match: Match | None = None
    paths: Sequence[Path] = ()

    @property
    def name(self) -> str:
        """Name of the item, for messages."""
        return self.item.name or "the target"

    def forget(self, results: Sequence[int]) -> None:
        """Drops references to old leaves that new ones have replaced, so that memory is freed."""
        for result in results:
            self.kept[result] = None
