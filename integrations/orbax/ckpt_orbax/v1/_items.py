"""Checkpointables on their way into a save: each becomes an item of ckpt."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import jax

import ckpt_core as ckpt
from ckpt_orbax._leaves import is_leaf
from ckpt_orbax.v1 import _files
from ckpt_orbax.v1._context import Context
from ckpt_orbax.v1._engine import stored
from ckpt_orbax.v1._registry import (
    EngineForm,
    JsonHandler,
    PyTreeHandler,
    StatefulCheckpointable,
    handler_for_save,
)

_NATIVE = (ckpt.Files, ckpt.Json, ckpt.SavedFiles)


def items_of(checkpointables: dict[str, Any], context: Context) -> dict[str, Any]:
    """What ckpt saves for each checkpointable."""
    registry = context.checkpointables.registry
    return {
        name: value
        if isinstance(value, _NATIVE)
        else _item(name, value, handler_for_save(registry, name, value), context)
        for name, value in checkpointables.items()
    }


def _item(name: str, value: Any, handler: Any, context: Context) -> Any:
    if has_adapter(value) and isinstance(value, StatefulCheckpointable):
        return value  # a data pipeline: the engine knows what it has to keep
    if isinstance(handler, PyTreeHandler):
        if is_empty(value):
            raise ValueError(f"{name}: Found empty item: there is nothing to save")
        return stored(value, context)
    if isinstance(handler, JsonHandler):
        return ckpt.Json(value)
    return _files.written_by(None if isinstance(handler, EngineForm) else handler, value)


def check_state(state: Any) -> None:
    """Raises ValueError if the tree has a leaf that Orbax does not save."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not is_leaf(leaf):
            place = jax.tree_util.keystr(path) or "the state"
            raise ValueError(
                f"{place}: Unsupported leaf type for saving: `{type(leaf)}`. Supported are jax and numpy "
                "arrays, numbers and text; ckpt_core.save takes more"
            )


def is_empty(tree: Any) -> bool:
    """Whether the tree is a container without anything inside."""
    found = jax.tree.leaves(tree, is_leaf=lambda node: node is None)
    return not found


@functools.cache
def _adapted() -> frozenset[str]:
    return frozenset(
        entry.name for entry in importlib.metadata.entry_points(group="ckpt_core.adapters")
    )


def has_adapter(value: Any) -> bool:
    """Whether ckpt knows the framework of the object."""
    return any(kind.__module__.partition(".")[0] in _adapted() for kind in type(value).__mro__)


def is_of_its_framework(handler: Any, value: Any) -> bool:
    """Whether a handler is that of the framework of an object, such as Grain's, and no one's own."""
    home = type(handler).__module__.partition(".")[0]
    return home in _adapted() and any(
        kind.__module__.partition(".")[0] == home for kind in type(value).__mro__
    )
