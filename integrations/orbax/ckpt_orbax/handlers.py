"""Handlers of items: those of ckpt's own forms, which are names only, and the base of your own; and their arguments."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ckpt_core.arguments import meant
from ckpt_orbax._errors import AlreadyExistsError, NoEntryError
from ckpt_orbax._handler_files import type_name
from ckpt_orbax._refused import not_offered

Args = TypeVar("Args", bound="CheckpointArgs")


class CheckpointHandler(abc.ABC):
    """Base of a handler of your own: writes an object into a directory, and reads it back.

    What it writes becomes a part of the checkpoint: atomic, checksummed, and verified before
    ``restore`` sees it.
    """

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes an object into ``directory``, which exists."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """The object that was written into ``directory``."""

    def metadata(self, directory: Any) -> Any:
        """A description of what is in ``directory``, or None."""
        return None

    def finalize(self, directory: Any) -> None:  # noqa: B027  (a handler need not have it)
        """Called when all is written."""

    def close(self) -> None:  # noqa: B027
        """Called when the handler is not used any more."""

    @classmethod
    def typestr(cls) -> str:
        """The name under which a checkpoint records who wrote an item."""
        return type_name(cls)


class AsyncCheckpointHandler(CheckpointHandler):
    """Base of a handler that also says what is left to do in the background: futures, for which the save waits, since
    the files are part of one commit.
    """

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes an object into ``directory``; returns futures to wait for, or None."""


_OPTIONS: dict[str, Any] = {
    "use_ocdbt": True,
    "primary_host": 0,
    "aggregate_filename": "checkpoint",
    "checkpoint_name": "checkpoint",
    "filename": "metadata",
}
"""Options of Orbax's handlers that would change the files -> the only value that is taken."""
_WITHOUT_EFFECT = """
    save_concurrent_gb restore_concurrent_gb save_device_host_concurrent_gb memory_limit_options use_zarr3
    use_compression enable_pinned_host_transfer is_prioritized_key_fn array_metadata_validator
    multiprocessing_options pytree_metadata_options
"""


class Form(CheckpointHandler):
    """A handler that stands for a form of item of ckpt's own; it does not write itself. Of the options of Orbax's handlers,
    limits of memory and the like are ckpt's to choose, and what would change the files is refused.
    """

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            kind, known = type(self).__name__, [*_OPTIONS, *_WITHOUT_EFFECT.split()]
            if name not in known:
                raise TypeError(f"{kind} has no argument {name!r}{meant(name, known)}")
            if name in _OPTIONS and value not in (_OPTIONS[name], None):
                raise not_offered(
                    f"{kind}({name}={value!r})",
                    "it would change what is stored",
                    f"leave it at {_OPTIONS[name]!r}; ckpt stores OCDBT and zarr3, which Orbax reads",
                )

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Refused, as ``restore``: it is ckpt that writes and reads."""
        kind = type(self).__name__
        raise not_offered(
            f"a call of save or restore of {kind}",
            "the handler is only a name for a form of ckpt's own",
            f"ocp.Checkpointer(ocp.{kind}()).save(path, ...), or a Composite with an item for it",
        )

    restore = save


class PyTreeCheckpointHandler(Form):
    """Stands for pytrees of arrays, numbers and text."""


class StandardCheckpointHandler(Form):
    """Stands for pytrees of arrays and numbers."""


class JsonCheckpointHandler(Form):
    """Stands for an item of JSON."""


class ArrayCheckpointHandler(Form):
    """Stands for a single array or number."""


class CompositeCheckpointHandler(Form):
    """Stands for a checkpoint of several items: names whose handlers follow from their arguments, handlers by name, or a
    registry of handlers by item and arguments. ``composite_options`` is of no effect.
    """

    def __init__(
        self,
        *item_names: str,
        composite_options: Any = None,
        handler_registry: DefaultCheckpointHandlerRegistry | None = None,
        **items_and_handlers: Any,
    ) -> None:
        super().__init__()
        self.item_names = item_names
        self.handler_registry = handler_registry
        self.items_and_handlers = items_and_handlers


def overrides(handler: Any) -> bool:
    """Whether a handler writes and reads by itself, so that ckpt has to call it."""
    return not isinstance(handler, Form) or (
        type(handler).save is not Form.save or type(handler).restore is not Form.restore
    )


class CheckpointArgs:
    """Base of what ``save(args=)`` and ``restore(args=)`` take.

    A subclass, mostly a dataclass, is registered for a handler with ``register_with_handler``.
    """


class CallArgs(CheckpointArgs):
    """The arguments of a call, for a handler without registered ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    @property
    def item(self) -> Any:
        """The object to save."""
        return self.kwargs.get("item", self.args[0] if self.args else None)


def as_call(args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as those of a call of a handler's method, by position and by name."""
    return (args.args, args.kwargs) if isinstance(args, CallArgs) else ((), {"args": args})


def is_args_class(kind: Any) -> bool:
    """Whether a class is one of arguments: ours, or one of a library that was written for Orbax's, as Grain's."""
    return isinstance(kind, type) and any(
        base.__name__ == "CheckpointArgs" and base.__module__.startswith(_HOMES)
        for base in kind.__mro__
    )


_HOMES = ("ckpt_orbax.", "orbax.checkpoint.")


def is_args(value: Any) -> bool:
    """Whether an object is arguments; see ``is_args_class``."""
    return is_args_class(type(value))


def _orbax_registry() -> Any:
    """Orbax's registrations, if some library has imported it; else None."""
    theirs = sys.modules.get("orbax.checkpoint.checkpoint_args")
    return None if theirs is sys.modules.get("ckpt_orbax.checkpoint_args") else theirs


_FOR_SAVE: dict[type[CheckpointArgs], Any] = {}
_FOR_RESTORE: dict[type[CheckpointArgs], Any] = {}


def register_with_handler(
    handler_cls: Any, for_save: bool = False, for_restore: bool = False
) -> Callable[[type[Args]], type[Args]]:
    """A decorator for a class of arguments: its objects go to a ``handler_cls()``.

    Raises:
        ValueError: it is neither for saves nor for restores.

    Example:
        >>> import ckpt_orbax as ocp, dataclasses
        >>> class Text(ocp.CheckpointHandler):
        ...     def save(self, directory, args):
        ...         (directory / "text").write_text(args.item)
        ...     def restore(self, directory, args):
        ...         return (directory / "text").read_text()
        >>> @ocp.args.register_with_handler(Text, for_save=True)
        ... @dataclasses.dataclass
        ... class TextSave(ocp.args.CheckpointArgs):
        ...     item: str
    """
    if not for_save and not for_restore:
        raise ValueError("for_save and for_restore cannot both be False: say what it is for")

    def register(cls: type[Args]) -> type[Args]:
        if not is_args_class(cls):
            raise TypeError(f"{cls} must be a subclass of ocp.args.CheckpointArgs")
        if for_save:
            _FOR_SAVE[cls] = handler_cls
        if for_restore:
            _FOR_RESTORE[cls] = handler_cls
        return cls

    return register


def get_registered_handler_cls(arg: Any) -> Any:
    """The class of handler for arguments, given an object or its class; ValueError if none is registered."""
    cls = arg if isinstance(arg, type) else type(arg)
    if not is_args_class(cls):
        raise TypeError(f"{cls} must be a subclass of ocp.args.CheckpointArgs")
    handler = _FOR_SAVE.get(cls, _FOR_RESTORE.get(cls))
    if handler is None and not issubclass(cls, CheckpointArgs) and (theirs := _orbax_registry()):
        handler = theirs.get_registered_handler_cls(cls)
    if handler is None:
        raise ValueError(
            f"no handler is registered for {cls.__name__}: use ocp.args.register_with_handler"
        )
    return handler


def get_registered_args_cls(handler: Any) -> tuple[type[CheckpointArgs], type[CheckpointArgs]]:
    """The classes of arguments of a handler, or of its class: for saves, for restores; ValueError without one of them."""
    cls = handler if isinstance(handler, type) else type(handler)
    save, restore = (
        next((args for args, kind in table.items() if kind is cls), None)
        for table in (_FOR_SAVE, _FOR_RESTORE)
    )
    theirs = None if save or restore else _orbax_registry()
    if theirs is not None and theirs.has_registered_args(cls):
        return theirs.get_registered_args_cls(cls)
    if save is None or restore is None:
        what = "saves" if save is None else "restores"
        raise ValueError(
            f"no CheckpointArgs are registered for {what} with {cls.__name__}: use ocp.args.register_with_handler"
        )
    return save, restore


def has_registered_args(handler: Any) -> bool:
    """Whether a handler has arguments for saves and for restores."""
    try:
        get_registered_args_cls(handler)
    except ValueError:
        return False
    return True


def handler_of_type_name(name: str | None) -> Any:
    """The registered class of handler with this type name, or None."""
    known = [*_FOR_SAVE.values(), *_FOR_RESTORE.values()]
    return next((kind for kind in reversed(known) if type_name(kind) == name), None)


Entries = dict[tuple[str | None, type[CheckpointArgs]], Any]


class DefaultCheckpointHandlerRegistry:
    """Handlers by item and class of arguments, to be given to a CheckpointManager; begins with those of another one."""

    def __init__(self, other_registry: Any = None) -> None:
        self._entries: Entries = dict(other_registry.get_all_entries()) if other_registry else {}

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Adds a handler or its class, by default the one that is registered for the arguments, or their class; ``item``
        is None for all items.

        Raises:
            AlreadyExistsError: there is an entry for this item and these arguments.
            ValueError: no handler is known for the arguments.
        """
        key = _, kind = _key(item, args)
        if key in self._entries:
            raise AlreadyExistsError(f"there is an entry for item {item!r} and {kind.__name__}")
        chosen = get_registered_handler_cls(kind) if handler is None else handler
        self._entries[key] = chosen() if isinstance(chosen, type) else chosen

    def get(self, item: str | None, args: Any) -> Any:
        """The handler of an item and arguments; NoEntryError if there is none."""
        key = _, kind = _key(item, args)
        if key not in self._entries:
            raise NoEntryError(f"there is no entry for item {item!r} and {kind.__name__}")
        return self._entries[key]

    def has(self, item: str | None, args: Any) -> bool:
        """Whether there is a handler for an item and arguments."""
        return _key(item, args) in self._entries

    def get_all_entries(self) -> Entries:
        """All handlers by item and class of arguments."""
        return self._entries


def _key(item: str | None, args: Any) -> tuple[str | None, type[CheckpointArgs]]:
    return item, args if isinstance(args, type) else type(args)
