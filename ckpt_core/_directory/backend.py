"""The interface of both backends, file systems and object stores, and the signs by which both know a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self

from ckpt_core._directory.owner import Claim
from ckpt_core._errors import CheckpointCorrupt, CheckpointExists
from ckpt_core._format.record import FileRecord
from ckpt_core._platform import of_tasks

SIGNS = ("ckpt.json", "_CHECKPOINT_METADATA", "_METADATA", "orbax.checkpoint", "commit_success.txt")
"""File names that mark a directory as a checkpoint; one of them is enough to read it as one."""
_KEYS = {
    "_CHECKPOINT_METADATA": (b'"item_handlers"', b'"init_timestamp_nsecs"', b'"custom_metadata"'),
    "_METADATA": (b'"tree_metadata"',),
}


def has_sign(path: str) -> bool:
    """Whether a directory contains one of ``SIGNS``, and so is a checkpoint."""
    return any(os.path.exists(os.path.join(path, sign)) for sign in SIGNS)


def is_meant(read: Callable[[str], bytes | None]) -> bool:
    """Whether the content of its files shows that a directory is a checkpoint, which may be replaced or deleted:
    anybody may have a file called ``ckpt.json``. One sound file is enough, since the checkpoint may be damaged.
    """
    for name in SIGNS:
        with contextlib.suppress(CheckpointCorrupt):
            data = read(name)
            if data is not None and _fits(name, data):
                return True
    return False


def _fits(name: str, data: bytes) -> bool:
    match name:
        case "ckpt.json":
            return data.startswith(b'{"crc32c":"') and b'"record":{"format_version":' in data[:64]
        case "orbax.checkpoint":  # a map of msgpack, to whoever wrote it
            return bool(data) and (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))
        case "commit_success.txt":
            return data.startswith(b"Checkpoint commit was successful")
        case _:
            return data.lstrip().startswith(b"{") and any(key in data for key in _KEYS[name])


def already_there(path: str) -> CheckpointExists:
    """The error of a save to a place that is taken."""
    return CheckpointExists(
        f"{path} exists already: choose another path, or pass overwrite=True to replace it{of_tasks()}"
    )


def lies_inside(path: str, around: str) -> CheckpointExists:
    """The error of a save into another checkpoint."""
    return CheckpointExists(
        f"{path} lies inside the checkpoint {around}, which would no longer be what was saved: choose another path"
    )


class Attempt(Protocol):
    """One attempt to write one checkpoint; readers see nothing before ``commit``. A ``with`` block aborts it if it raises."""

    path: str
    """Directory or URL to which the small files of this attempt are written."""
    data_prefix: str
    """Beginning of the name of each data file, by which it is known as one of this attempt."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.abort()

    def write(self, name: str, data: bytes, *, until_commit: bool = False) -> FileRecord:
        """Writes a small file; ``name`` is relative to ``path``. With ``until_commit`` another process reads it
        before the commit, and an object store deletes it then.
        """
        ...

    def write_data(self, name: str, parts: Iterable[bytes]) -> None:
        """Writes a file of any size, in any thread; ``name`` is relative to ``path``, in an object store to the checkpoint."""

    def read(self, name: str) -> bytes:
        """The content of a file that this process wrote, or another one with ``until_commit``."""
        ...

    def take(self, name: str) -> bytes:
        """``read`` of a file that is not needed any more."""
        return self.read(name)

    def small_files(self) -> Mapping[str, bytes]:
        """Files that this process has not written yet, because they are to stand in the record."""
        return {}

    def files(self, known_bytes: Mapping[str, int]) -> dict[str, int]:
        """Relative path and size of every file written so far; in a store, ``known_bytes`` has those of other processes."""
        ...

    def make_durable(self, record_name: str, record: bytes) -> None:
        """Writes the record after all other files, also of other processes, and makes all durable."""

    def commit(self) -> None:
        """Makes the durable checkpoint visible to readers, and then deletes the one that it replaces. An error after it
        became visible undoes nothing, and ``is_visible`` recognizes it.
        """

    def abort(self) -> None:
        """Deletes the files of this attempt, unless it is already visible; never raises."""


class Look(NamedTuple):
    """What one listing of a directory found."""

    children: list[str]  # names of subdirectories that may be checkpoints or items
    is_checkpoint: Callable[[str], bool]  # of ``children``: whether a committed checkpoint is there
    hidden: frozenset[str]  # names that begin with a dot


class Backend(Protocol):
    """Operations on checkpoints in one kind of storage; paths are absolute paths or URLs."""

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> Attempt:
        """Starts an attempt, which ``token`` identifies, to write the checkpoint at ``path``; one process calls it. ``durable``
        syncs all files and directories. CheckpointExists if what is at ``path`` must not or cannot be replaced.
        """
        ...

    def join(self, path: str, attempt_path: str, *, durable: bool) -> Attempt:
        """The attempt that another process began, in which this process writes its files."""
        ...

    def read(self, path: str, name: str, limit_bytes: int | None = None) -> bytes | None:
        """The content of a file of a checkpoint, or None if there is none; follows links. CheckpointCorrupt if it is no
        regular file, a dangling link, or larger than ``limit_bytes`` (by default ``most_bytes`` of its name).
        """
        ...

    def put(self, path: str, name: str, data: bytes) -> None:
        """Atomically writes or replaces a small file next to the checkpoints."""

    def remove(self, path: str, name: str) -> None:
        """Deletes a small file next to the checkpoints, if it is there."""

    def claim(self, path: str, name: str, data: bytes) -> Claim:
        """Writes a file and keeps it locked until the claim is closed or the process ends; a store has no locks."""
        ...

    def release(self, path: str, name: str, beginning: bytes) -> None:
        """Deletes a file that ``claim`` wrote, if it still begins so. A store, which could not give back another's, keeps it."""

    def reading(self, path: str, head: bytes) -> AbstractContextManager[None]:
        """Keeps the checkpoint at ``path`` from being deleted while the block runs. Raises FileNotFoundError if it
        was deleted or replaced since the caller read ``head``, the beginning of its record.
        """
        ...

    def files(self, path: str, known_bytes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Relative path and size of every file of a checkpoint; -1 for anything but a regular file. Follows links,
        but enters each directory once. An object store, which has to read a file for its size, takes ``known_bytes``.
        """
        ...

    def size(self, path: str, name: str) -> int | None:
        """Size of one file, as in ``files``; None if there is none."""
        ...

    def children(self, path: str) -> list[str]:
        """The ``children`` of a ``look``."""
        return self.look(path).children

    def look(self, path: str) -> Look:
        """What a directory holds, by one listing; nothing if there is no ``path``."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is anything at ``path``."""
        ...

    def is_checkpoint(self, path: str) -> bool:
        """Whether a committed checkpoint, of ckpt or of Orbax, lies at ``path``."""
        ...

    def replaced(self, path: str) -> str | None:
        """Path of the old checkpoint, if a replacement of ``path`` was interrupted; else None."""
        return None

    def delete(self, path: str, trash: str | None = None) -> None:
        """Deletes a checkpoint: first hides it from readers, then deletes its data. With ``trash`` it is moved into
        the directory of that name next to it, which is made if missing. Raises BlockingIOError if a reader holds it.
        """

    def clean(self, path: str, *, only_look: bool = False) -> list[str]:
        """Deletes what dead writers left in the directory ``path``, unless it is to ``only_look``; returns the names."""
        ...
