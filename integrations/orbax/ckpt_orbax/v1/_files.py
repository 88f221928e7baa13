"""Checkpointables that are not pytrees: JSON, objects that write files, data pipelines."""

from __future__ import annotations

import asyncio
import contextvars
import json
import pathlib
import tempfile
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import jax

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax._paths import as_path
from ckpt_orbax._refused import not_offered
from ckpt_orbax.v1._context import Context
from ckpt_orbax.v1._registry import (
    EngineForm,
    NoEntryError,
    StatefulCheckpointable,
    StatefulCheckpointableHandler,
    handler_for_load,
    type_name,
)

_NOTE = ".ckpt-orbax-handler"
"""File in an item of files: the type name of the handler that wrote them."""
_STATEFUL = (
    "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler."
    "StatefulCheckpointableHandler"
)
"""The type name under which Orbax records what saved itself."""


class Directory:
    """An existing directory, as a handler's ``save`` gets it.

    Attributes:
        path: the directory.
    """

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
    """The files that a handler, or the object itself if that is None, writes.

    They are written while the save takes its snapshot; what Orbax would do in the background is done
    then, too.
    """
    kind = StatefulCheckpointableHandler if handler is None else type(handler)

    async def save(directory: Any) -> None:
        target = Directory(as_path(directory))
        saving = value.save(target) if handler is None else handler.save(target, value)
        background = await saving
        if background is not None:
            await background

    def write(directory: pathlib.Path) -> None:
        run(lambda: save(directory))
        (directory / _NOTE).write_text(type_name(kind))

    if jax.process_index() > 0:  # there ckpt does not ask for the files
        _refuse_files(kind, save)
    files = ckpt.Files(write)
    files.orbax_handler = _STATEFUL if handler is None else type_name(kind)
    return files


def _refuse_files(kind: type, save: Callable[[Any], Awaitable[None]]) -> None:
    """Runs a handler in a process other than 0; raises if it has written anything."""
    with tempfile.TemporaryDirectory(prefix="ckpt-orbax-") as directory:
        run(lambda: save(directory))
        if any(pathlib.Path(directory).iterdir()):
            raise not_offered(
                f"a handler that writes in every process ({kind.__name__})",
                "the files of process 0 are the checkpoint's",
                "gather the states in process 0, or save them as a pytree of arrays",
            )


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    """The result of a coroutine; also where an event loop runs already."""

    async def awaited() -> Any:
        return await work()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    ended: list[Any] = []
    failed: list[BaseException] = []

    def in_thread() -> None:
        try:
            ended.append(asyncio.run(awaited()))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(in_thread,))
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return ended[0]


def needed(name: str, target: Any) -> Any:
    """``target``, an object to set.

    Raises:
        ValueError: there is none.
    """
    if target is None:
        raise ValueError(
            f"{name}: To restore a `StatefulCheckpointable`, you must pass an instance of the object. "
            f"Pass {{{name!r}: the_object}}"
        )
    return target


def load_item(
    info: CheckpointInfo, name: str, target: Any, context: Context, options: ckpt.Options
) -> Any:
    """A checkpointable that is no pytree.

    Raises:
        NoEntryError: no handler is registered for its files.
        ValueError: it sets itself, and no object was given.
    """
    loaded = ckpt.load(info.path, item=name, options=options)
    if info.items[name].form != "files":
        return loaded
    if target is None and info.format_version is not None and _NOTE not in loaded.names():
        return loaded  # saved as ckpt.Files, by nobody's handler
    handler = _handler(info, name, target, context, loaded)

    async def load(directory: Any) -> Any:
        if isinstance(handler, EngineForm):
            background = await needed(name, target).load(directory)
            if background is not None:
                await background
            return target
        return await (await handler.load(directory, target))

    return _with_directory(loaded, load)


def _handler(
    info: CheckpointInfo, name: str, target: Any, context: Context, files: ckpt.SavedFiles
) -> Any:
    """The handler that loads an item of files; an ``EngineForm`` if the target does it itself."""
    if isinstance(target, StatefulCheckpointable):
        return StatefulCheckpointableHandler()
    saved_by = _saved_by(info, name, files)
    handler = handler_for_load(context.checkpointables.registry, name, target, saved_by)
    if isinstance(handler, StatefulCheckpointableHandler) or (
        handler is not None and not isinstance(handler, EngineForm)
    ):
        return handler
    raise NoEntryError(
        f"{name}: no handler is registered that loads these {len(files)} files"
        f"{f' of {saved_by}' if saved_by else ''}{'' if target is None else f' into a {type(target).__name__}'}: "
        "register one with ocp.handlers.register_handler; ckpt_core.load gives the files themselves"
    )


def _saved_by(info: CheckpointInfo, name: str, files: ckpt.SavedFiles) -> str | None:
    """Type name of the handler that wrote an item, here or in Orbax; None if unknown."""
    if _NOTE in files.names():
        return files.read(_NOTE).decode()
    try:
        text = (pathlib.Path(info.path) / "_CHECKPOINT_METADATA").read_text()
        return json.loads(text)["item_handlers"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _with_directory(files: ckpt.SavedFiles, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Runs ``work`` on a directory with the files, which were verified on the way."""
    with tempfile.TemporaryDirectory(prefix="ckpt-orbax-") as directory:
        files.copy_to(directory)
        (pathlib.Path(directory) / _NOTE).unlink(missing_ok=True)
        return run(lambda: work(as_path(directory)))


def describe_item(info: CheckpointInfo, name: str, context: Context) -> Any:
    """What the handler of an item says of it; None without one."""
    if info.items[name].form != "files":
        return None
    files = ckpt.load(info.path, item=name)
    registry = context.checkpointables.registry
    handler = handler_for_load(registry, name, None, _saved_by(info, name, files))
    if handler is None or isinstance(handler, EngineForm):
        return None
    return _with_directory(files, handler.metadata)
