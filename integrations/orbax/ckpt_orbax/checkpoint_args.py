"""Which handler takes which arguments: ``CheckpointArgs`` and their registration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ckpt_orbax._handler_files import type_name

Args = TypeVar("Args", bound="CheckpointArgs")


class CheckpointArgs:
    """Base of what ``save(args=)`` and ``restore(args=)`` take.

    A subclass, mostly a dataclass, is registered for a handler with ``register_with_handler``.
    """


class Called(CheckpointArgs):
    """Arguments for a handler without registered arguments: those of the call itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    @property
    def item(self) -> Any:
        """The object to save."""
        return self.kwargs.get("item", self.args[0] if self.args else None)


def as_call(args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as those of a call of a handler's method, by position and by name."""
    return (args.args, args.kwargs) if isinstance(args, Called) else ((), {"args": args})


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


def _elsewhere() -> Any:
    """Orbax's registrations, if some library has imported it; else None."""
    return sys.modules.get("orbax.checkpoint.checkpoint_args")


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
        raise ValueError(
            "for_save and for_restore cannot both be False: one says what the class is for"
        )

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
    """The class of handler for arguments, given an object or its class.

    Raises:
        TypeError: it is no subclass of CheckpointArgs.
        ValueError: none is registered.
    """
    cls = arg if isinstance(arg, type) else type(arg)
    if not is_args_class(cls):
        raise TypeError(f"{cls} must be a subclass of ocp.args.CheckpointArgs")
    handler = _FOR_SAVE.get(cls, _FOR_RESTORE.get(cls))
    if handler is None and not issubclass(cls, CheckpointArgs) and (theirs := _elsewhere()):
        handler = theirs.get_registered_handler_cls(cls)
    if handler is None:
        raise ValueError(
            f"no handler is registered for {cls.__name__}: use ocp.args.register_with_handler"
        )
    return handler


def get_registered_args_cls(handler: Any) -> tuple[type[CheckpointArgs], type[CheckpointArgs]]:
    """The classes of arguments of a handler, or of its class: for saves, for restores.

    Raises:
        ValueError: one of them is not registered.
    """
    cls = handler if isinstance(handler, type) else type(handler)
    found = [
        next((args for args, kind in table.items() if kind is cls), None)
        for table in (_FOR_SAVE, _FOR_RESTORE)
    ]
    theirs = _elsewhere()
    if found == [None, None] and theirs is not None and theirs.has_registered_args(cls):
        return theirs.get_registered_args_cls(cls)
    if found[0] is None or found[1] is None:
        what = "saves" if found[0] is None else "restores"
        raise ValueError(
            f"no CheckpointArgs are registered for {what} with {cls.__name__}: use "
            "ocp.args.register_with_handler"
        )
    return found[0], found[1]


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
