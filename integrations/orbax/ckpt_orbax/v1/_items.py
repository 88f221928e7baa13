"""Checkpointables as items of ckpt, and those that are no pytrees: JSON, objects that write files, data pipelines."""

from __future__ import annotations

from typing import Any

import jax

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax import _checkpointables as handlers
from ckpt_orbax._errors import NoEntryError
from ckpt_orbax._handler_files import NOTE, frameworks_of, run, saved_by, with_directory, written
from ckpt_orbax._leaves import is_empty, is_leaf
from ckpt_orbax._paths import as_path
from ckpt_orbax.metadata import tree_of
from ckpt_orbax.v1._context import Context, stored

_STATEFUL = (
    "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler."
    "StatefulCheckpointableHandler"
)
"""The type name under which Orbax records what saved itself."""


def items_of(checkpointables: dict[str, Any], context: Context) -> dict[str, Any]:
    """What ckpt saves for each checkpointable."""
    return {name: _item(name, value, context) for name, value in checkpointables.items()}


def _item(name: str, value: Any, context: Context) -> Any:
    if isinstance(value, (ckpt.Files, ckpt.Json, ckpt.SavedFiles)):
        return value
    handler = handlers.handler_for_save(context.checkpointables.registry, name, value)
    if frameworks_of(type(value)) and isinstance(value, handlers.StatefulCheckpointable):
        return value  # a data pipeline: the engine knows what it has to keep
    if isinstance(handler, handlers.PyTreeHandler):
        if is_empty(value):
            raise ValueError(f"{name}: Found empty item: there is nothing to save")
        return stored(value, context)
    if isinstance(handler, handlers.JsonHandler):
        return ckpt.Json(value)
    return written_by(handler, value)


def check_state(state: Any) -> None:
    """Raises ValueError if the tree has a leaf that Orbax does not save."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not is_leaf(leaf):
            place = jax.tree_util.keystr(path) or "the state"
            raise ValueError(
                f"{place}: Unsupported leaf type for saving: `{type(leaf)}`. Supported are jax and numpy "
                "arrays, numbers and text; ckpt_core.save takes more"
            )


class Directory:
    """An existing directory, as a handler's ``save`` gets it."""

    def __init__(self, path: Any) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def __truediv__(self, other: Any) -> Directory:
        return Directory(self.path / other)

    async def await_creation(self) -> Any:
        """The directory, which exists."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path


def written_by(handler: Any, value: Any) -> ckpt.Files:
    """The files that a handler writes."""

    async def save(directory: Any) -> None:
        background = await handler.save(Directory(as_path(directory)), value)
        if background is not None:
            await background

    files = written(type(handler), lambda directory: run(lambda: save(directory)))
    if isinstance(handler, handlers.StatefulCheckpointableHandler):
        files.orbax_handler = _STATEFUL
    return files


def needed(name: str, target: Any) -> Any:
    """``target``, an object to set; raises ValueError if there is none."""
    if target is None:
        raise ValueError(
            f"{name}: To restore a `StatefulCheckpointable`, you must pass an instance of the object. "
            f"Pass {{{name!r}: the_object}}"
        )
    return target


def load_item(
    info: CheckpointInfo, name: str, target: Any, context: Context, options: ckpt.Options
) -> Any:
    """A checkpointable that is no pytree."""
    loaded = ckpt.load(info.path, item=name, options=options)
    if info.items[name].form != "files":
        return loaded
    if target is None and info.format_version is not None and NOTE not in loaded.names():
        return loaded  # saved as ckpt.Files, not by a handler
    wrote = saved_by(info, name, loaded)
    handler = _handler(name, target, context, wrote)
    if handler is None:
        of = f" of {wrote}" if wrote else ""
        into = "" if target is None else f" into a {type(target).__name__}"
        raise NoEntryError(
            f"{name}: no handler is registered that loads these {len(loaded)} files{of}{into}: register one with "
            "ocp.handlers.register_handler; ckpt_core.load gives the files themselves"
        )
    if isinstance(handler, handlers.StatefulCheckpointableHandler):
        needed(name, target)

    async def load(directory: Any) -> Any:
        return await (await handler.load(directory, target))

    return with_directory(loaded, lambda directory: run(lambda: load(directory)))


def _handler(name: str, target: Any, context: Context, wrote: str | None) -> Any:
    """The handler that loads an item of files into a target, given who wrote it; None without one."""
    if isinstance(target, handlers.StatefulCheckpointable):
        return handlers.StatefulCheckpointableHandler()
    handler = handlers.handler_for_load(context.checkpointables.registry, name, target, wrote)
    return None if isinstance(handler, handlers.FORMS) else handler


def describe_item(info: CheckpointInfo, name: str, context: Context) -> Any:
    """The tree of an item with a description at each leaf, or what its handler says of it; None without one."""
    if info.items[name].form == "tree":
        return tree_of(info.items[name])
    if info.items[name].form != "files":
        return None
    files = ckpt.load(info.path, item=name)
    handler = _handler(name, None, context, saved_by(info, name, files))
    if handler is None:
        return None
    return with_directory(files, lambda directory: run(lambda: handler.metadata(directory)))
