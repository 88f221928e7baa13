"""Objects of frameworks and of the user: found by type, taken apart to pytrees, set again.

Adapters are found by the entry-point group ``ckpt_core.adapters``; an entry is named after the
root package of the objects that it takes. The type of an object alone picks the adapter, so the
core imports no framework: an object exists only if its framework is imported already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ckpt_core._errors import UnsupportedLeaf

GROUP = "ckpt_core.adapters"


class Adapter(Protocol):
    """Two verbs that turn a framework's objects into pytrees and back.

    Optional: ``per_process = True`` for state that each process has of its own (a data pipeline),
    with two more methods, ``to_text(state) -> str`` and ``from_text(obj, text) -> state``, for the
    file ``process_{i}-of-{n}.json`` that other tools read; ``check_state(obj, state)``, which raises
    StructureMismatch where a state does not fit, before anything is changed; ``get_position(obj)``,
    a cheap state for ``set_state`` to go back to where a restore fails; and ``select(obj, only)``, the function of (path, leaf) that ``only=`` stands for where it is a class,
    or whatever ``is_filter(only)`` takes for a filter of the framework's. With ``shares = True``,
    ``get_state(obj, seen)`` gets a dict that is empty at the beginning of each tree, for what
    several objects in one container share, by id: what is in it was stored already, and is left
    out.
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

    lenient = True

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


def is_per_process(adapter: Any) -> bool:
    """Whether each process has a state of its own."""
    return bool(getattr(adapter, "per_process", False))


def is_lenient(adapter: Any) -> bool:
    """Whether the object takes whatever structure was saved."""
    return bool(getattr(adapter, "lenient", False))


def is_filter(adapter: Any, only: Any) -> bool:
    """Whether ``only=`` is a filter of the adapter's framework, rather than one of ours."""
    return hasattr(adapter, "is_filter") and bool(adapter.is_filter(only))


def expander() -> Callable[[Any], tuple[Any, Callable[[Any], Any]] | None]:
    """For ``_tree.flatten``, a new one for each tree: live objects as their states.

    The function gives the state of an adapted object, and how to set a new one.
    """
    seen: dict[int, Any] = {}

    def expand(obj: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        adapter = adapter_for(obj)
        if adapter is None:
            return None
        if is_per_process(adapter):
            name = type(obj).__name__
            raise UnsupportedLeaf(
                f"a {name} lies inside a container: its state belongs to each process alone, so pass it as an item "
                "of its own, such as data=iterator",
                type_name=name,
            )

        def finish(state: Any) -> Any:
            adapter.set_state(obj, state)
            return obj

        shares: Any = adapter if getattr(adapter, "shares", False) else None
        state = adapter.get_state(obj) if shares is None else shares.get_state(obj, seen)
        return state, finish

    return expand
