"""Who saves and restores each item of a manager: what was registered, else what is registered for the arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_orbax.v0 import _registration, handlers
from ckpt_orbax.v0._registration import Called, CheckpointArgs


class ItemHandlers:
    """Handlers by item; a new item gets the one that is registered for its arguments."""

    def __init__(
        self,
        names: Iterable[str] = (),
        by_name: Mapping[str, Any] | None = None,
        registry: Any = None,
    ) -> None:
        by_name = by_name or {}
        self._open = {*names, *by_name} - {name for name, one in by_name.items() if one is not None}
        self._fixed = bool(self._open or by_name)
        self._registry = handlers.DefaultCheckpointHandlerRegistry(registry)
        for name, handler in by_name.items():
            if handler is not None:
                self._register(name, handler)

    def _register(self, name: str, handler: Any) -> None:
        for kind in args_classes(handler):
            if not self._registry.has(name, kind):
                self._registry.add(name, kind, handler)

    def of_args(self, name: str, args: Any) -> Any:
        """The handler of an item, given its arguments."""
        if args is None:
            return self.of_name(name)
        for item in (name, None):
            if self._registry.has(item, args):
                return self._registry.get(item, args)
        known = {item for item, _ in self._registry.get_all_entries()}
        if name not in known and (not self._fixed or name in self._open):
            handler = _registration.get_registered_handler_cls(args)()
            self._open.discard(name)
            self._register(name, handler)
            return handler
        raise ValueError(
            f'Item "{name}" and args of type {type(args).__name__} does not match with any registered '
            f"handler! Items: {', '.join(sorted({*map(str, known), *self._open})) or 'none'}"
        )

    def of_name(self, name: str) -> Any:
        """The handler of an item, which has to be known."""
        handler = self.known(name)
        if handler is None:
            raise ValueError(
                f"Provided `None` for `CheckpointArgs`, and the `CheckpointHandler` for item "
                f'"{name}" was not configured. Give arguments, such as ocp.args.StandardRestore()'
            )
        return handler

    def known(self, name: str) -> Any:
        """The handler of an item, or None."""
        entries = self._registry.get_all_entries()
        return next((handler for (item, _), handler in entries.items() if item == name), None)

    def args_for(self, name: str, for_save: bool, *arguments: Any, **named: Any) -> Any:
        """The arguments of a call of Orbax's earlier form, which gives objects instead."""
        handler = self.known(name)
        if handler is None:
            raise ValueError(
                f"Unknown key {name!r}: no handler is known for this item: pass args=ocp.args.StandardSave(tree) or "
                "StandardRestore(), or make the manager with item_handlers="
            )
        return args_of_call(handler, for_save, *arguments, **named)

    def close(self) -> None:
        """Closes the handlers."""
        for handler in {id(one): one for one in self._registry.get_all_entries().values()}.values():
            getattr(handler, "close", lambda: None)()


def args_of_call(handler: Any, for_save: bool, *arguments: Any, **named: Any) -> Any:
    """The ``CheckpointArgs`` among the arguments of a call, or made of them."""
    for value in (*arguments, *named.values()):
        if _registration.is_args(value):
            return value
    return args_classes(handler)[0 if for_save else 1](*arguments, **named)


def args_classes(handler: Any) -> tuple[type[CheckpointArgs], type[CheckpointArgs]]:
    """The classes of arguments of a handler, for saves and for restores. A handler that inherits from one of ckpt's forms
    without writing itself takes those of that form.
    """
    kinds = [type(handler)] if handlers.overrides(handler) else type(handler).__mro__
    for kind in kinds:
        if _registration.has_registered_args(kind):
            return _registration.get_registered_args_cls(kind)
    return Called, Called
