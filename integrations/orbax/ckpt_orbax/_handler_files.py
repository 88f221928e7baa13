"""Items of files that handlers of the user write and read; the files are checksummed and verified."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax._paths import as_path
from ckpt_orbax._refused import not_offered
from ckpt_orbax.future import in_thread

NOTE = ".ckpt-orbax-handler"
"""File in an item of files: the type name of the handler that wrote them."""
MAX_BYTES = 256 * 2**20
"""What processes other than 0 may write together: it goes over the network and through memory."""


def type_name(handler: Any) -> str:
    """The name under which Orbax records that a handler saved an item."""
    return f"{handler.__module__}.{handler.__qualname__}"


def written(
    kind: type, save: Callable[[Any], None], finish: Callable[[Any], None] | None = None
) -> ckpt.Files:
    """The files that ``save`` writes, in all processes together, while the save takes its snapshot. Process 0 puts those of
    several together and calls ``finish``. Whatever is wrong with them is the same error in all processes.
    """
    together = None if jax.process_count() == 1 else _of_all_processes(kind, save)

    def write(directory: pathlib.Path) -> None:
        if together is None:
            save(directory)
        else:
            shutil.copytree(together, directory, dirs_exist_ok=True)
        if finish is not None:
            finish(directory)
        (directory / NOTE).write_text(type_name(kind))

    files = ckpt.Files(write)
    files.orbax_handler = type_name(kind)
    if together is not None:
        weakref.finalize(write, shutil.rmtree, together, ignore_errors=True)  # held by the files
    return files


def _of_all_processes(kind: type, save: Callable[[Any], None]) -> str:
    """A directory of this machine; in process 0 with what ``save`` writes in all processes."""
    mine = tempfile.mkdtemp(prefix="ckpt-orbax-")
    error = None
    try:
        save(pathlib.Path(mine))
    except Exception as caught:
        error = caught
    sent = {} if jax.process_index() == 0 or error is not None else _files_in(mine)
    size = sum(map(len, sent.values()))
    ended = _from_all({"error": None if error is None else repr(error), "bytes": size})
    try:
        if error is not None:
            raise error
        for process, one in enumerate(ended):
            if one["error"] is not None:
                what = f"{kind.__name__} has not written its files"
                raise ckpt.CheckpointError(f"process {process}: {what}: {one['error']}")
        size = sum(one["bytes"] for one in ended)
        if size > MAX_BYTES:
            raise not_offered(
                f"a handler that writes {size:,} bytes in processes other than 0 ({kind.__name__})",
                f"process 0 writes the files of all, up to {MAX_BYTES:,} bytes",
                "save what is large as a pytree of arrays",
            )
        if size > 0:
            _put_together(kind, mine, sent)
    except BaseException:
        shutil.rmtree(mine, ignore_errors=True)
        raise
    return mine


def _put_together(kind: type, mine: str, sent: dict[str, str]) -> None:
    """Adds the files of the other processes to those of process 0; raises in all if two differ under one name."""
    texts = _files_in(mine)
    own = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    everybody = _from_all({"sent": sent, "own": own})
    seen: dict[str, str] = {}
    for process, one in enumerate(everybody):
        for name, digest in one["own"].items():
            if seen.setdefault(name, digest) != digest:
                raise not_offered(
                    f"a handler that writes other bytes as {name!r} in process {process} ({kind.__name__})",
                    "the files of all processes are in one directory",
                    "have it name the file by jax.process_index(), or write it in process 0 alone",
                )
    if jax.process_index() == 0:
        for one in everybody:
            for name, text in one["sent"].items():
                path = pathlib.Path(mine, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(text))


def _files_in(directory: str) -> dict[str, str]:
    root = pathlib.Path(directory)
    return {
        path.relative_to(root).as_posix(): base64.b64encode(path.read_bytes()).decode()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def _from_all(value: Any) -> list[Any]:
    """A JSON value of each process, in all processes."""
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.array([text.size], np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: text.size] = text
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def run(work: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:
    """The result of an asynchronous function; also where an event loop runs already."""

    async def awaited() -> Any:
        return await work(*arguments, **named)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    return in_thread(lambda: asyncio.run(awaited()), "ckpt-handler").result()


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


@functools.cache
def frameworks_of(kind: type) -> set[str]:
    """The frameworks of a class and its bases for which ckpt has an adapter."""
    adapted = importlib.metadata.entry_points(group="ckpt_core.adapters").names
    return {base.__module__.partition(".")[0] for base in kind.__mro__} & adapted


def is_of_its_framework(handler: Any, value: Any) -> bool:
    """Whether a handler is that of the framework of an object, such as Grain's, and no one's own."""
    return type(handler).__module__.partition(".")[0] in frameworks_of(type(value))
