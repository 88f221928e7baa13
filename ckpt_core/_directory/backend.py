"""What both backends, file systems and object stores, can do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from ckpt_core._directory.locks import Claim


class Attempt(Protocol):
    """One try at writing one checkpoint; invisible until ``commit``."""

    @property
    def path(self) -> str:
        """Where the files of this try are written."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file."""
        ...

    def read(self, name: str) -> bytes:
        """A file that was written in this try (by any process)."""
        ...

    def files(self, below: str = "", told: Mapping[str, int] | None = None) -> dict[str, int]:
        """Relative path and size of every file written so far.

        Args:
            below: only in this folder.
            told: sizes that the writers of some files told; taken from here where the storage
                gives a size only together with the data.
        """
        ...

    def make_durable(self, record_name: str, record: bytes) -> None:
        """Writes the record, last of all, and makes everything durable; nothing is visible yet."""
        ...

    def commit(self) -> None:
        """Makes the checkpoint visible, after ``make_durable``.

        From the moment when it is, nothing is deleted but what it replaced, and that when all of it is
        durable. An error that comes later says ``VISIBLE``; ``is_visible`` knows it.
        """
        ...

    def abort(self) -> None:
        """Removes whatever was written, unless it is visible already; never raises."""
        ...


class Backend(Protocol):
    """Checkpoints in directories of one kind of storage. Paths are absolute, or URLs."""

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> Attempt:
        """Starts a try at writing the checkpoint at ``path``.

        Raises:
            CheckpointExists: something is there, and it may not or cannot be replaced.
        """
        ...

    def join(self, path: str, attempt_path: str, *, durable: bool) -> Attempt:
        """The try that another process began, for the files of this process."""
        ...

    def read(self, path: str, name: str, limit_bytes: int | None = None) -> bytes | None:
        """A file of a checkpoint, or None where there is none; links are followed.

        Args:
            limit_bytes: that it can have; by its name (``most_bytes``) where it is not given.

        Raises:
            CheckpointCorrupt: it is longer, no regular file, or a link that leads nowhere.
        """
        ...

    def put(self, path: str, name: str, data: bytes) -> None:
        """Writes a small file beside the checkpoints in one step, replacing an older one."""
        ...

    def claim(self, path: str, name: str, data: bytes) -> Claim:
        """Puts a file and holds it until the claim is closed or the process ends."""
        ...

    def reading(self, path: str, head: bytes) -> AbstractContextManager[None]:
        """Keeps the checkpoint at ``path`` from being deleted while the block runs.

        Args:
            head: how its record begins.

        Raises:
            FileNotFoundError: it was deleted, or replaced by another one, just now.
        """
        ...

    def files(self, path: str) -> dict[str, int]:
        """Relative path and size of every file of a checkpoint; -1 for what is no regular file.

        Links are followed, into each directory once.
        """
        ...

    def size(self, path: str, name: str) -> int | None:
        """Size of one file, as in ``files``; None where there is none."""
        ...

    def children(self, path: str) -> list[str]:
        """Names of what may be checkpoints or items below ``path``; none where it is missing."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is anything."""
        ...

    def is_checkpoint(self, path: str) -> bool:
        """Whether a committed checkpoint, of ckpt or of Orbax, lies at ``path``."""
        ...

    def replaced(self, path: str) -> str | None:
        """Where the old checkpoint stands, if a replacement of ``path`` was cut short."""
        ...

    def delete(self, path: str, trash: str | None = None) -> None:
        """Removes a checkpoint: first from sight, then its data.

        Args:
            trash: move it there instead: a directory beside the checkpoint, made if missing.

        Raises:
            BlockingIOError: it is being read.
        """
        ...

    def clean(self, path: str) -> list[str]:
        """Removes below ``path`` what dead writers left behind; gives the names."""
        ...
