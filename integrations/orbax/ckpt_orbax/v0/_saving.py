"""Arguments of a save as items of ckpt."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_orbax._handler_files import written
from ckpt_orbax._leaves import converted, is_leaf
from ckpt_orbax._paths import as_path
from ckpt_orbax._plain import leaves_of, path_text, plain
from ckpt_orbax._refused import not_offered
from ckpt_orbax.v0 import handlers
from ckpt_orbax.v0._item_handlers import ItemHandlers
from ckpt_orbax.v0._registration import as_call
from ckpt_orbax.v0._restoring import ARRAY
from ckpt_orbax.v1._items import has_adapter, is_empty, is_of_its_framework


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
        return written(
            type(handler),
            lambda directory: _save_files(handler, as_path(directory), args),
            lambda directory: getattr(handler, "finalize", _nothing)(as_path(directory)),
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


def _nothing(directory: Any) -> None:
    """What a handler without ``finalize`` does when all processes have written."""
