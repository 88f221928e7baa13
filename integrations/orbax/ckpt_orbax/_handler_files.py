"""Items of files that handlers of the user write and read; the files are checksummed and verified."""

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

NOTE = ".ckpt-orbax-handler"
"""File in an item of files: the type name of the handler that wrote them."""


def type_name(handler: Any) -> str:
    """The name under which Orbax records that a handler saved an item."""
    return f"{handler.__module__}.{handler.__qualname__}"


def written(kind: type, save: Callable[[Any], None]) -> ckpt.Files:
    """The files that ``save`` writes into the directory that it is given.

    They are written while the save takes its snapshot; what Orbax would do in the background is done
    then, too.

    Args:
        kind: class of the handler.
        save: writes the files.

    Raises:
        NotOffered: a process other than 0 writes files.
    """

    def write(directory: pathlib.Path) -> None:
        save(directory)
        (directory / NOTE).write_text(type_name(kind))

    if jax.process_index() > 0:  # there ckpt does not ask for the files
        _refuse_files(kind, save)
    files = ckpt.Files(write)
    files.orbax_handler = type_name(kind)
    return files


def _refuse_files(kind: type, save: Callable[[Any], None]) -> None:
    """Runs a handler in a process other than 0; raises if it has written anything."""
    with tempfile.TemporaryDirectory(prefix="ckpt-orbax-") as directory:
        save(pathlib.Path(directory))
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


def saved_by(info: CheckpointInfo, name: str, files: ckpt.SavedFiles) -> str | None:
    """Type name of the handler that wrote an item, here or in Orbax; None if unknown."""
    if NOTE in files.names():
        return files.read(NOTE).decode()
    try:
        text = (pathlib.Path(info.path) / "_CHECKPOINT_METADATA").read_text()
        return json.loads(text)["item_handlers"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def with_directory(files: ckpt.SavedFiles, work: Callable[[Any], Any]) -> Any:
    """The result of ``work`` on a directory with the files, which were verified on the way."""
    with tempfile.TemporaryDirectory(prefix="ckpt-orbax-") as directory:
        files.copy_to(directory)
        (pathlib.Path(directory) / NOTE).unlink(missing_ok=True)
        return work(as_path(directory))
