"""Handlers, and the registries that say which one takes a checkpointable."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from ckpt_orbax._errors import AlreadyExistsError, NoEntryError
from ckpt_orbax._handler_files import type_name
from ckpt_orbax._leaves import is_abstract_leaf, is_leaf

_Object = TypeVar("_Object")
_Target = TypeVar("_Target")


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that writes its state into a directory and reads it back. Both methods do first what must block, and
    return an awaitable that does the rest.
    """

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


class EngineForm:
    """A handler that stands for a form of item of ckpt's own; it is only asked what it takes."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether this form takes the object."""
        raise NotImplementedError

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether this form takes the target; None if what was saved decides."""


class PyTreeHandler(EngineForm):
    """Stands for ckpt's own pytrees of arrays."""

    def is_handleable(self, checkpointable: Any) -> bool:
        return all(map(is_leaf, jax.tree.leaves(checkpointable)))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return all(map(is_abstract_leaf, jax.tree.leaves(abstract_checkpointable)))


class JsonHandler(EngineForm):
    """Stands for an item of JSON."""

    def is_handleable(self, checkpointable: Any) -> bool:
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError, RecursionError):
            return False
        return True


class StatefulCheckpointableHandler(EngineForm):
    """Stands for objects that save and load themselves."""

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, StatefulCheckpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return isinstance(abstract_checkpointable, StatefulCheckpointable)


Entry = tuple[Any, str | None]


class CheckpointableHandlerRegistry:
    """Handlers in the order of their registration; the last one that fits is taken."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries = list(entries)

    def add(
        self, handler_type: Any, checkpointable_name: str | None = None
    ) -> CheckpointableHandlerRegistry:
        """Adds a handler for one name, or for all objects that it can handle; AlreadyExistsError if the name, or the
        handler without a name, has an entry.
        """
        if not isinstance(handler_type, type):
            raise ValueError(f"a handler is registered as a class, got {handler_type!r}")
        if checkpointable_name is not None and self.has(checkpointable_name):
            raise AlreadyExistsError(f"{checkpointable_name!r} has a handler in this registry")
        if checkpointable_name is None and any(kind is handler_type for kind, _ in self._entries):
            raise AlreadyExistsError(f"{handler_type.__name__} is in this registry")
        self._entries.append((handler_type, checkpointable_name))
        return self

    def get(self, checkpointable_name: str) -> Any:
        """The handler of this name; NoEntryError if there is none."""
        for handler, name in self._entries:
            if name == checkpointable_name:
                return handler
        raise NoEntryError(f"no handler is registered for the name {checkpointable_name!r}")

    def has(self, checkpointable_name: str) -> bool:
        """Whether a handler is registered for this name."""
        return any(name == checkpointable_name for _, name in self._entries)

    def get_all_entries(self) -> Sequence[Entry]:
        """All (handler, name), in the order of registration."""
        return list(self._entries)


_FORMS = {
    kind.__name__: kind for kind in (JsonHandler, StatefulCheckpointableHandler, PyTreeHandler)
}
"""By the last part of Orbax's own type names."""
_GLOBAL = CheckpointableHandlerRegistry([(kind, None) for kind in _FORMS.values()])


def global_registry() -> CheckpointableHandlerRegistry:
    """The registry that all Contexts begin with."""
    return _GLOBAL


def local_registry(
    other_registry: Any = None, *, include_global_registry: bool = True
) -> CheckpointableHandlerRegistry:
    """A new registry with the entries of the global one and of ``other_registry``."""
    entries = list(_GLOBAL.get_all_entries()) if include_global_registry else []
    if other_registry is not None:
        entries += [entry for entry in other_registry.get_all_entries() if entry not in entries]
    return CheckpointableHandlerRegistry(entries)


def register_handler(cls: Any, *, checkpointable_name: str | None = None) -> Any:
    """Adds a handler to the global registry, and returns it."""
    _GLOBAL.add(cls, checkpointable_name)
    return cls


def handler_for_save(registry: Any, name: str, value: Any) -> Any:
    """An instance of the handler that saves ``value``: the one of that name, unless the object saves itself; else the
    last one that takes the object. NoEntryError if there is none.
    """
    if value is None:
        raise ValueError(f"{name}: a checkpointable must not be None for saving")
    entries = registry.get_all_entries()
    by_name = next((kind for kind, other in entries if other == name), None)
    if by_name is not None and not isinstance(value, StatefulCheckpointable):
        return by_name()
    for kind, other in reversed(entries):
        if other is None and (handler := kind()).is_handleable(value):
            return handler
    if by_name is not None:
        return by_name()
    known = ", ".join(kind.__name__ for kind, _ in entries)
    raise NoEntryError(
        f'Could not identify a valid handler for the checkpointable: "{name}", a '
        f"{type(value).__name__}. The registry has {known}: add one with ocp.handlers.register_handler, "
        "or give the object the methods of ocp.StatefulCheckpointable"
    )


def handler_for_load(registry: Any, name: str, abstract: Any, saved_by: str | None) -> Any:
    """An instance of the handler that loads an item into ``abstract``: the one of that name, then the one that saved it,
    if they take the target; then the last one that does. If none does, it is the one of that name, or None.
    """
    entries = list(reversed(registry.get_all_entries()))
    by_name = next((kind() for kind, other in entries if other == name), None)
    by_type = next((kind() for kind, _ in entries if saved_by == type_name(kind)), None)
    if by_type is None and saved_by and saved_by.startswith(("orbax.", "ckpt_orbax.")):
        kind = _FORMS.get(saved_by.rpartition(".")[2])
        by_type = None if kind is None else kind()
    for handler in (by_name, by_type):
        if handler is not None and (abstract is None or handler.is_abstract_handleable(abstract)):
            return handler
    if abstract is not None:
        for kind, other in entries:
            if other is None and (handler := kind()).is_abstract_handleable(abstract):
                return handler
    return by_name
