"""What the leaves of an item become: new containers, or live objects that are set.

Each class is one way to end: ``make`` takes the leaves of the result, in order, and gives the item's value.
Live ones say, too, which objects they set, and how these are set back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ckpt_core import _adapters
from ckpt_core._load.live_objects import held, setting_back
from ckpt_core._tree import FlatTree, Node, Path, flatten, importable_type, unflatten

Undo = Callable[[], object]
"""Sets live objects back to what they held."""


class Outcome(Protocol):
    """What becomes of the leaves of one item."""

    def make(self, leaves: list[Any]) -> Any:
        """The item's value."""
        ...


@runtime_checkable
class LiveOutcome(Outcome, Protocol):
    """One that sets live objects.

    Attributes:
        live: these objects, each with whether a tree may hold it twice.
        early: whether ``make`` is for before the arrays are read, and takes none.
    """

    @property
    def live(self) -> Sequence[tuple[Any, bool]]: ...

    @property
    def early(self) -> bool: ...

    def undo(self) -> Undo | None:
        """What sets the objects back to what they hold now; None where that cannot be. Changes nothing."""
        ...


@dataclass(frozen=True)
class Value:
    """A value that is known before any array is read."""

    value: Any

    def make(self, leaves: list[Any]) -> Any:
        return self.value


@dataclass(frozen=True)
class Containers:
    """The containers of the saved structure, or of a target that holds nothing live."""

    root: Node
    resolve: Callable[[Node], Any] | None = None

    def make(self, leaves: list[Any]) -> Any:
        return unflatten(self.root, leaves, resolve=self.resolve)


@dataclass(frozen=True)
class RenamedDicts:
    """Renamed leaves as nested dicts: their old containers no longer fit."""

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
                    f"rename= gives two leaves the path {path!r}, or one inside another"
                )
            node[last] = leaf
        return root


@dataclass(frozen=True)
class NumpyRandomState:
    """Orbax's numpy random key: what numpy's ``set_state`` takes, a tuple or a dict."""

    saved: Outcome

    def make(self, leaves: list[Any]) -> Any:
        value = self.saved.make(leaves)
        return value if isinstance(value, dict) else tuple(value)


@dataclass(frozen=True)
class LiveTree:
    """A target in which live objects are set.

    Attributes:
        like: the target.
        root, kept: its structure and its leaves; without the tree itself, as a restore forgets the
            leaves that it has set.
        live: see ``LiveOutcome``.
        limit_bytes: of what has to be copied to be set back.
        paths: of the leaves of the result.
        set_parts: of one object that can be set in parts: sets values, by path, and gives those that
            it holds now. None elsewhere.
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
        """The leaves that the objects hold now."""
        return flatten(self.like, expand=_adapters.expander()).leaves


@dataclass(frozen=True)
class LiveObject:
    """A user's own object, which takes whatever was saved.

    Attributes:
        adapter, obj: the object.
        now: its state before.
        root: of the saved state, in the classes that it has now.
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
    """A data pipeline: set before the arrays are read, so that it fills up meanwhile."""

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
    """The objects that it sets, each with whether a tree may hold it twice."""
    return outcome.live if isinstance(outcome, LiveOutcome) else ()
