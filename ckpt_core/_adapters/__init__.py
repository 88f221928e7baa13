"""Objects of frameworks and of the user: found by type, taken apart to pytrees, set again.

Adapters are found by the entry-point group ``ckpt_core.adapters``; an entry is named after the
root package of the objects that it takes. The type of an object alone picks the adapter, so the
core imports no framework: an object exists only if its framework is imported already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ckpt_core._adapters import verbs as verbs
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._tree import Below, Path

GROUP = "ckpt_core.adapters"


class Adapter(Protocol):
    """Two verbs that turn a framework's objects into pytrees and back.

    What else an adapter may do is in ``ckpt_core._adapters.verbs``, a Protocol for each verb. Flags that it may
    have, as attributes:

    * ``per_process = True``: each process has a state of its own (a data pipeline). With it go
      ``to_text(state) -> str`` and ``from_text(obj, text) -> state``, for the file
      ``process_{i}-of-{n}.json`` that other tools read.
    * ``shares = True``: ``get_state(obj, seen)`` gets a dict that is empty at the beginning of each
      tree, for what several objects in one container share, by id: what is in it was stored
      already, and is left out.
    * ``written_anew = True``, of the adapter or of a user's own object: its state is made for each
      save and needs no restoring (the description of a model), so that a run which goes on may save
      it without having restored it.
    * ``reads_renames``, of a user's own object: the keys of ``rename=`` that it takes care of itself.
    * ``arrays_are_writable = True``: jax arrays may share host memory that the user can write to,
      so that an asynchronous save copies them.
    * ``accepts_any_structure = True``: the object takes whatever structure was saved.
    """

    def accepts(self, cls: type, /) -> bool:
        """Whether objects of this class are the adapter's."""
        ...

    def get_state(self, obj: Any, /) -> Any:
        """The state as a pytree of arrays and plain values, as of now."""
        ...

    def set_state(self, obj: Any, state: Any, /) -> None:
        """Sets a state of the structure that ``get_state`` gives, in place."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A user's own object that takes part in checkpoints, without registration.

    Example:
        >>> class Counter:
        ...     count = 0
        ...     def get_state(self): return {"count": self.count}
        ...     def set_state(self, state): self.count = state["count"]
    """

    def get_state(self) -> Any:
        """The state as a pytree of arrays and plain values."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Takes a state that ``get_state`` gave before."""
        ...


class _StatefulAdapter:
    """Objects with get_state and set_state; they judge for themselves what they take."""

    accepts_any_structure = True

    def accepts(self, cls: type, /) -> bool:
        return True

    def get_state(self, obj: Stateful, /) -> Any:
        return obj.get_state()

    def set_state(self, obj: Stateful, state: Any, /) -> None:
        obj.set_state(state)


_STATEFUL = _StatefulAdapter()
_LEAVES = (np.random.Generator, np.random.RandomState)
"""Leaves that happen to have the methods of a Stateful object."""


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


@functools.lru_cache(maxsize=4096)
def _for_class(cls: type) -> Any:
    if issubclass(cls, _LEAVES):
        return None
    for base in cls.__mro__:
        entry = _installed().get(base.__module__.partition(".")[0])
        if entry is not None:
            adapter = entry.load()
            if adapter.accepts(cls):
                return adapter
    has_verbs = callable(getattr(cls, "get_state", None)) and callable(
        getattr(cls, "set_state", None)
    )
    return _STATEFUL if has_verbs else None


def adapter_for(obj: Any) -> Adapter | None:
    """The adapter that takes an object, or None for pytrees and leaves."""
    return None if isinstance(obj, type) else _for_class(type(obj))


def notice(objects: Iterable[Any]) -> None:
    """Tells adapters of objects that training begins with, before it has changed them."""
    for obj in objects:
        adapter = adapter_for(obj)
        if isinstance(adapter, verbs.Notices):
            adapter.notice(obj)


def is_per_process(adapter: Any) -> bool:
    """Whether each process has a state of its own."""
    return bool(getattr(adapter, "per_process", False))


def accepts_any_structure(adapter: Any) -> bool:
    """Whether the object takes whatever structure was saved."""
    return bool(getattr(adapter, "accepts_any_structure", False))


def is_written_anew(obj: Any) -> bool:
    """Whether an item is made for each save, so that no restore has to take it over."""
    adapter = adapter_for(obj)
    owner = obj if adapter is _STATEFUL else adapter
    return bool(getattr(owner, "written_anew", False))


def has_writable_arrays(adapter: Any) -> bool:
    """Whether jax arrays in the object's state may change under a save that does not copy them."""
    return bool(getattr(adapter, "arrays_are_writable", False))


def setter_of_parts(obj: Any) -> Callable[[Mapping[Path, Any]], list[Any]] | None:
    """Sets leaves of a live object by their paths; None where it can be set as a whole only."""
    adapter = adapter_for(obj)
    if not isinstance(adapter, verbs.SetsLeaves):
        return None
    return functools.partial(adapter.set_leaves, obj)


def is_filter(adapter: Any, only: Any) -> bool:
    """Whether ``only=`` is a filter of the adapter's framework, rather than one of ours."""
    return isinstance(adapter, verbs.Filters) and bool(adapter.is_filter(only))


def is_held_by_reference(obj: Any) -> bool:
    """Whether leaves of ``get_state`` stay as they are when the object is set, so that none is copied
    to set them back: they are replaced, not written to."""
    adapter = adapter_for(obj)
    return isinstance(adapter, verbs.SetsLeaves) and not isinstance(adapter, verbs.Wants)


def copies_of(objects: Sequence[Any]) -> list[Any]:
    """A copy of each of an adapter's objects, None for what cannot be copied."""
    adapter = adapter_for(objects[0])
    if not isinstance(adapter, verbs.Copies):
        return [None] * len(objects)
    return list(adapter.copy(objects))


def expander(
    target: Any = None,
    saved: Callable[[], Any] | None = None,
    *,
    stand_in: Callable[[Any], Any] | None = None,
    live: list[tuple[Any, bool]] | None = None,
    stored: bool = False,
) -> Callable[[Any], tuple[Any, Callable[[Any], Any]] | None]:
    """For ``_tree.flatten``, a new one for each tree: live objects as their states.

    The function gives the state of an adapted object, and how to set a new one.

    Args:
        target: of an item; it may ask for what it wants of what was saved.
        saved: describes what was saved.
        stand_in: gives the copy of a live object that is taken in its place.
        live: gets the objects that are met, each with whether a tree may hold it twice: it may where
            objects share what they hold, or are one array each, as tied weights are.
        stored: mark what Orbax's trees hold one key deeper (``get_stored``), for the names of arrays.
    """
    seen: dict[int, Any] = {}

    def expand(obj: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        adapter: Any = adapter_for(obj)
        if adapter is None:
            return None
        if is_per_process(adapter):
            name = type(obj).__name__
            raise UnsupportedLeaf(
                f"a {name} lies inside a container: its state belongs to each process alone, so pass it as an item "
                "of its own, such as data=iterator",
                type_name=name,
            )

        used = obj if stand_in is None else stand_in(obj)

        def finish(state: Any) -> Any:
            adapter.set_state(used, state)
            return used

        shares = bool(getattr(adapter, "shares", False))
        if saved is not None and obj is target and isinstance(adapter, verbs.Wants):
            state = adapter.wanted(used, saved())
        elif stored and isinstance(adapter, verbs.StoresBelow):
            state = adapter.get_stored(used, Below, seen)
        else:
            state = adapter.get_state(used, seen) if shares else adapter.get_state(used)
        if live is not None:
            live.append((obj, shares or not isinstance(state, (Mapping, list, tuple))))
        return state, finish

    return expand


def as_states() -> Callable[[Any], tuple[Any, Callable[[Any], Any]] | None]:
    """As ``expander``, for a tree in which live objects become their states, and stay that."""
    expand = expander()

    def state_of(obj: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        found = expand(obj)
        return None if found is None else (found[0], lambda state: state)

    return state_of
