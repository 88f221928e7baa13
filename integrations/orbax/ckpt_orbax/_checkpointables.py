"""Handlers, and the registries that say which one takes a checkpointable."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from ckpt_orbax._errors import AlreadyExistsError, NoEntryError
from ckpt_orbax._handler_files import type_name
from ckpt_orbax._leaves import is_abstract_leaf, is_leaf

_Object = TypeVar("_Object")
_Target = TypeVar("_Target")


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that writes its state into a directory and reads it back: first what must block, then an awaitable's part."""

    async def save(self, directory: Any) -> Awaitable[None]:
        """Writes into ``await directory.await_creation()``."""
        ...

    async def load(self, directory: Any) -> Awaitable[None]:
        """Reads from ``directory`` and sets itself."""
        ...


class CheckpointableHandler(Protocol[_Object, _Target]):
    """Saves objects of one type into a directory and loads them, as Orbax's class of this name does.
    ``CheckpointableHandler[Config, AbstractConfig]`` takes objects of the first type and targets of the second.
    """

    async def save(self, directory: Any, checkpointable: _Object) -> Awaitable[None]: ...

    async def load(
        self, directory: Any, abstract_checkpointable: _Target | None = None
    ) -> Awaitable[_Object]: ...

    async def metadata(self, directory: Any) -> _Target: ...

    def is_handleable(self, checkpointable: Any) -> bool: ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None: ...


class PyTreeHandler:
    """Stands for ckpt's own pytrees of arrays."""

    def is_handleable(self, checkpointable: Any) -> bool:
        return all(map(is_leaf, jax.tree.leaves(checkpointable)))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return all(map(is_abstract_leaf, jax.tree.leaves(abstract_checkpointable)))


class JsonHandler:
    """Stands for an item of JSON."""

    def is_handleable(self, checkpointable: Any) -> bool:
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError, RecursionError):
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> None:
        """What was saved decides."""


class StatefulCheckpointableHandler:
    """Has objects save and load themselves."""

    async def save(self, directory: Any, checkpointable: Any) -> Any:
        return await checkpointable.save(directory)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        background = await abstract_checkpointable.load(directory)

        async def loaded() -> Any:
            if background is not None:
                await background
            return abstract_checkpointable

        return loaded()

    async def metadata(self, directory: Any) -> Any:
        return None

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, StatefulCheckpointable)

    is_abstract_handleable = is_handleable


FORMS = (PyTreeHandler, JsonHandler)
"""They stand for forms of items of ckpt's own, and are only asked what they take."""


class CheckpointableHandlerRegistry:
    """Classes of handlers as registered, each for one name or, for None, any object; the last one that fits is taken."""

    def __init__(self, entries: Iterable[tuple[Any, str | None]] = ()) -> None:
        self._entries: dict[Any, Any] = {}
        for handler_type, name in entries:
            self._entries.setdefault(handler_type if name is None else name, handler_type)

    def add(
        self, handler_type: Any, checkpointable_name: str | None = None
    ) -> CheckpointableHandlerRegistry:
        """Adds a handler for one name, or for all objects that it can handle; AlreadyExistsError if there is an entry."""
        if not isinstance(handler_type, type):
            raise ValueError(f"a handler is registered as a class, got {handler_type!r}")
        key = handler_type if checkpointable_name is None else checkpointable_name
        if key in self._entries:
            shown = checkpointable_name or handler_type.__name__
            raise AlreadyExistsError(f"{shown!r} has an entry in this registry")
        self._entries[key] = handler_type
        return self

    def get_all_entries(self) -> Sequence[tuple[Any, str | None]]:
        """All (handler, name), in the order of registration."""
        entries = self._entries.items()
        return [(handler, None if key is handler else key) for key, handler in entries]


_OWN = (JsonHandler, StatefulCheckpointableHandler, PyTreeHandler)
_GLOBAL = CheckpointableHandlerRegistry((kind, None) for kind in _OWN)


def local_registry(other_registry: Any = None) -> CheckpointableHandlerRegistry:
    """A new registry with the entries of the global one, with which all Contexts begin, and of ``other_registry``."""
    others = [] if other_registry is None else other_registry.get_all_entries()
    return CheckpointableHandlerRegistry([*_GLOBAL.get_all_entries(), *others])


def register_handler(cls: Any, *, checkpointable_name: str | None = None) -> Any:
    """Adds a handler to the global registry, and returns it."""
    _GLOBAL.add(cls, checkpointable_name)
    return cls


def _of_registry(registry: Any, name: str) -> tuple[Any, list[Any]]:
    """A new handler for one name, or None; and those for any object, the last one first."""
    entries = list(reversed(registry.get_all_entries()))
    by_name = next((kind() for kind, other in entries if other == name), None)
    return by_name, [kind() for kind, other in entries if other is None]


def handler_for_save(registry: Any, name: str, value: Any) -> Any:
    """The handler that saves ``value``: that of the name, unless the object saves itself; else the last one that takes it."""
    if value is None:
        raise ValueError(f"{name}: a checkpointable must not be None for saving")
    by_name, of_any = _of_registry(registry, name)
    taking = (handler for handler in of_any if handler.is_handleable(value))
    if by_name is not None and not isinstance(value, StatefulCheckpointable):
        return by_name
    found = next(taking, by_name)
    if found is not None:
        return found
    known = ", ".join(kind.__name__ for kind, _ in registry.get_all_entries())
    raise NoEntryError(
        f'Could not identify a valid handler for the checkpointable: "{name}", a '
        f"{type(value).__name__}. The registry has {known}: add one with ocp.handlers.register_handler, "
        "or give the object the methods of ocp.StatefulCheckpointable"
    )


def handler_for_load(registry: Any, name: str, abstract: Any, saved_by: str | None) -> Any:
    """The handler that loads an item into ``abstract``: the one of that name, then the one that saved it, then the last one
    that takes the target. If none does, it is the one of that name, or None.
    """
    by_name, of_any = _of_registry(registry, name)
    wrote = [kind for kind, _ in registry.get_all_entries() if type_name(kind) == saved_by]
    if not wrote and (saved_by or "").startswith(("orbax.", "ckpt_orbax.")):
        wrote = [kind for kind in _OWN if (saved_by or "").endswith(f".{kind.__name__}")]
    first = [one for one in (by_name, *(kind() for kind in wrote[-1:])) if one is not None]
    if abstract is None:
        return first[0] if first else None
    taking = (one for one in [*first, *of_any] if one.is_abstract_handleable(abstract))
    return next(taking, by_name)
