"""Items of the first API: who saves and restores each, and arguments of a save as items of ckpt."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_orbax import checkpoint_args, handlers
from ckpt_orbax._handler_files import has_adapter, is_of_its_framework, written
from ckpt_orbax._leaves import converted, is_leaf
from ckpt_orbax._paths import as_path
from ckpt_orbax._plain import is_empty, leaves_of, path_text, plain
from ckpt_orbax._refused import not_offered
from ckpt_orbax.checkpoint_args import Called, CheckpointArgs, as_call

ARRAY = "checkpoint"
"""Name of the array in the tree of an item that is a single array."""


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
            handler = checkpoint_args.get_registered_handler_cls(args)()
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
        if checkpoint_args.is_args(value):
            return value
    return args_classes(handler)[0 if for_save else 1](*arguments, **named)


def args_classes(handler: Any) -> tuple[type[CheckpointArgs], type[CheckpointArgs]]:
    """The classes of arguments of a handler, for saves and for restores. A handler that inherits from one of ckpt's forms
    without writing itself takes those of that form.
    """
    kinds = [type(handler)] if handlers.overrides(handler) else type(handler).__mro__
    for kind in kinds:
        if checkpoint_args.has_registered_args(kind):
            return checkpoint_args.get_registered_args_cls(kind)
    return Called, Called


def items_to_save(wanted: Mapping[str, Any], items: ItemHandlers) -> dict[str, Any]:
    """What ckpt saves for several items, by name, given their arguments."""
    return {
        name: item_to_save(name, args, items.of_args(name, args)) for name, args in wanted.items()
    }


def item_to_save(name: str, args: Any, handler: Any) -> Any:
    """What ckpt saves for one item."""
    value = getattr(args, "item", None)
    if isinstance(value, (ckpt.Files, ckpt.Json, ckpt.SavedFiles)):
        return value
    if handlers.overrides(handler):
        if has_adapter(value) and is_of_its_framework(handler, value):
            return value  # a data pipeline: the engine writes what this handler would, and more
        finalize = getattr(handler, "finalize", lambda _: None)
        return written(
            type(handler),
            lambda directory: _save_files(handler, as_path(directory), args),
            lambda directory: finalize(as_path(directory)),
        )
    if isinstance(handler, handlers.JsonCheckpointHandler):
        return ckpt.Json(value)
    if isinstance(handler, handlers.ArrayCheckpointHandler):
        if not isinstance(value, (jax.Array, np.ndarray, np.number, int, float)):
            raise TypeError(f"{name}: Unsupported type: {type(value)}: ArraySave takes an array")
        return plain(_cast({ARRAY: value}, {ARRAY: args.save_args}))
    if getattr(args, "custom_metadata", None) is not None:
        raise not_offered(
            f"{type(args).__name__}(custom_metadata=)",
            "the items of a step have no metadata of their own",
            "save(custom_metadata={...}), or one more item, JsonSave",
        )
    _check(name, value, isinstance(handler, handlers.StandardCheckpointHandler))
    return plain(_cast(value, args.save_args))


def _check(name: str, tree: Any, standard: bool) -> None:
    if tree is None:
        raise ValueError(f"{name}: Must provide item to save.")
    if standard and isinstance(tree, (jax.Array, np.number, int, float)):
        raise ValueError(
            f"{name}: StandardSave does not support single arrays or scalars: use ArraySave"
        )
    if is_empty(tree):
        raise ValueError(f"{name}: Found empty item: there is nothing to save")
    for path, leaf in leaves_of(tree).items():
        if not is_leaf(leaf):
            raise ValueError(
                f"{name}: Unsupported type: {type(leaf)} for key: {path_text(path)}. Supported are jax and "
                "numpy arrays, numbers and text; ckpt_core.save takes more"
            )


def _cast(tree: Any, save_args: Any) -> Any:
    """The tree with its leaves in the dtypes of their ``SaveArgs``."""
    dtypes = {path: args.dtype for path, args in leaves_of(save_args).items() if args is not None}
    if not any(dtype is not None for dtype in dtypes.values()):
        return tree
    return plain(tree, lambda path, leaf: converted(leaf, dtypes.get(path)))


def _save_files(handler: Any, directory: Any, args: Any) -> None:
    """Lets a handler of the user write into a directory, and waits for what it leaves to do."""
    given, named = as_call(args)
    if inspect.iscoroutinefunction(getattr(handler, "async_save", None)):
        futures = asyncio.run(handler.async_save(directory, *given, **named))
        for future in futures or ():
            future.result()
    else:
        handler.save(directory, *given, **named)
