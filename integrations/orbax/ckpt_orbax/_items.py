"""Items of the first API: who saves and restores each, and arguments as items and targets of ckpt."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax import handlers
from ckpt_orbax._handler_files import (
    is_of_its_framework,
    run,
    saved_by,
    with_directory,
    written,
)
from ckpt_orbax._leaves import converted, is_empty, is_leaf, leaves_of, path_text, plain
from ckpt_orbax._paths import as_path, kind_at
from ckpt_orbax._refused import not_offered
from ckpt_orbax._targets import restored_tree
from ckpt_orbax.args import ArrayRestore, Composite, JsonRestore, PyTreeRestore
from ckpt_orbax.handlers import CallArgs, CheckpointArgs, as_call
from ckpt_orbax.metadata import is_metrics

ARRAY = "checkpoint"
"""Name of the array in the tree of an item that is a single array."""


class ItemHandlers(handlers.DefaultCheckpointHandlerRegistry):
    """Handlers by item; a new item gets the one that is registered for its arguments."""

    def __init__(
        self,
        names: Iterable[str] = (),
        by_name: Mapping[str, Any] | None = None,
        registry: Any = None,
    ) -> None:
        super().__init__(registry)
        given = {name: handler for name, handler in (by_name or {}).items() if handler is not None}
        self._open = {*names, *(by_name or ())} - given.keys()
        self._fixed = bool(self._open or given)
        for name, handler in given.items():
            self._register(name, handler)

    def _register(self, name: str, handler: Any) -> None:
        for kind in args_classes(handler):
            if not self.has(name, kind):
                self.add(name, kind, handler)

    def of_args(self, name: str, args: Any) -> Any:
        """The handler of an item, given its arguments."""
        found = self.known(name)
        if args is None:
            if found is not None:
                return found
            raise ValueError(
                f"Provided `None` for `CheckpointArgs`, and the `CheckpointHandler` for item "
                f'"{name}" was not configured. Give arguments, such as ocp.args.StandardRestore()'
            )
        for item in (name, None):
            if self.has(item, args):
                return self.get(item, args)
        if found is None and (not self._fixed or name in self._open):
            found = handlers.get_registered_handler_cls(args)()
            self._open.discard(name)
            self._register(name, found)
            return found
        names = {str(item) for item, _ in self.get_all_entries()} | self._open
        raise ValueError(
            f'Item "{name}" and args of type {type(args).__name__} does not match with any registered '
            f"handler! Items: {', '.join(sorted(names)) or 'none'}"
        )

    def known(self, name: str) -> Any:
        """The handler of an item, or None."""
        entries = self.get_all_entries()
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
        for handler in {id(one): one for one in self.get_all_entries().values()}.values():
            getattr(handler, "close", lambda: None)()


def args_of_call(handler: Any, for_save: bool, *arguments: Any, **named: Any) -> Any:
    """The ``CheckpointArgs`` among the arguments of a call, or made of them."""
    for value in (*arguments, *named.values()):
        if handlers.is_args(value):
            return value
    return args_classes(handler)[0 if for_save else 1](*arguments, **named)


def args_classes(handler: Any) -> tuple[type[CheckpointArgs], type[CheckpointArgs]]:
    """The classes of arguments for saves and for restores; those of its form for a handler that only inherits from one."""
    kinds = [type(handler)] if handlers.overrides(handler) else type(handler).__mro__
    for kind in kinds:
        if handlers.has_registered_args(kind):
            return handlers.get_registered_args_cls(kind)
    return CallArgs, CallArgs


def items_to_save(wanted: Mapping[str, Any], items: ItemHandlers) -> dict[str, Any]:
    """What ckpt saves for several items, by name, given their arguments."""
    return {name: item_to_save(name, one, items.of_args(name, one)) for name, one in wanted.items()}


def item_to_save(name: str, args: Any, handler: Any) -> Any:
    """What ckpt saves for one item."""
    value = getattr(args, "item", None)
    if isinstance(value, (ckpt.Files, ckpt.Json, ckpt.SavedFiles)):
        return value
    if handlers.overrides(handler):
        if is_of_its_framework(handler, value):
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
        why = "StandardSave does not support single arrays or scalars: use ArraySave"
        raise ValueError(f"{name}: {why}")
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
        for future in run(handler.async_save, directory, *given, **named) or ():
            future.result()
    else:
        handler.save(directory, *given, **named)


def restored_items(
    info: CheckpointInfo, args: Any, items: ItemHandlers, options: ckpt.Options
) -> Composite:
    """Several items of a checkpoint: those of ``args``, or all."""
    if not args:
        named = [name for name, item in info.items.items() if not is_metrics(item)]
        asked = {name: (None, items.known(name)) for name in named}
    elif missing := [name for name in args if name not in info.items]:
        raise KeyError(
            f'Item "{missing[0]}" was not found in the checkpoint. Available items: '
            f"{', '.join(info.items) or 'none'}"
        )
    else:
        asked = {name: (one, items.of_args(name, one)) for name, one in args.items()}
    restored = {name: restored_item(info, name, *how, options) for name, how in asked.items()}
    return Composite(**restored)


def restored_item(
    info: CheckpointInfo, name: str, args: Any, handler: Any, options: ckpt.Options
) -> Any:
    """One item of a checkpoint, as ``args`` ask for it; by whoever saved it if ``handler`` is None."""
    form = info.items[name].form
    if form == "process":
        return _of_processes(info, name, args, handler, options)
    if form == "files" and handler is None and args is None:
        kind = handlers.handler_of_type_name(saved_by(info, name, ckpt.load(info.path, item=name)))
        handler = None if kind is None else kind()
    if handler is not None and handlers.overrides(handler):
        return _by_handler(info, name, args, handler, options)
    if form == "files":
        raise ValueError(
            f"{info.path}: item {name!r} was saved by a handler that is not known here: register it with "
            "ocp.args.register_with_handler; ckpt_core.load gives the files themselves"
        )
    if form != "tree" or isinstance(args, JsonRestore):
        return ckpt.load(info.path, item=name, options=options)
    single = isinstance(args, ArrayRestore) or isinstance(handler, handlers.ArrayCheckpointHandler)
    if not single:
        return restored_tree(info.path, info.items[name], args, options)
    wanted = getattr(args, "restore_args", None)
    of_tree = PyTreeRestore(restore_args=None if wanted is None else {ARRAY: wanted})
    loaded = restored_tree(info.path, info.items[name], of_tree, options)
    return loaded[ARRAY] if isinstance(loaded, dict) and ARRAY in loaded else loaded


def _of_processes(
    info: CheckpointInfo, name: str, args: Any, handler: Any, options: ckpt.Options
) -> Any:
    """The object of ``args``, which has its state of this process again."""
    target = getattr(args, "item", None)
    own = handler is not None and handlers.overrides(handler)
    if own and info.format_version is None and not is_of_its_framework(handler, target):
        return restored_by(handler, as_path(info.path) / name, args)  # of Orbax: it wrote these
    if target is None:
        where = f"{info.path}: item {name!r}"
        raise ValueError(f"{where} is the state of each process: give the object as item=")
    ckpt.restore(info.path, items={name: target}, options=options)
    return target


def _by_handler(
    info: CheckpointInfo, name: str, args: Any, handler: Any, options: ckpt.Options
) -> Any:
    form, kind = info.items[name].form, type(handler).__name__
    if form != "files":
        raise ValueError(
            f"{info.path}: item {name!r} is a {form} of ckpt's own, and {kind} reads files"
        )
    if args is None and handlers.has_registered_args(handler):
        args = handlers.get_registered_args_cls(handler)[1]()
    files = ckpt.load(info.path, item=name, options=options)
    return with_directory(files, lambda directory: restored_by(handler, directory, args))


def restored_by(handler: Any, directory: Any, args: Any) -> Any:
    """What a handler of the user reads in a directory."""
    if args is None:
        return handler.restore(directory)
    given, named = as_call(args)
    return handler.restore(directory, *given, **named)


def flat_value(path: str, handler: Any, args: Any, why: ckpt.CheckpointNotFound) -> Any:
    """What a handler reads in a directory that Orbax wrote for it alone; else raises ``why``, the engine's error."""
    if kind_at(path) != "directory":
        raise FileNotFoundError(f"Checkpoint at {path} not found.")
    if isinstance(handler, handlers.JsonCheckpointHandler):
        written = os.path.join(path, "metadata")
        if kind_at(written) != "file":
            raise why
        with open(written, "rb") as file:
            return json.load(file)
    if not handlers.overrides(handler):  # ckpt itself reads such items
        raise why
    return restored_by(handler, as_path(path), args)
