"""Locks of files between readers, writers and whoever deletes (flock(2)).

The system drops them when the process ends, however it ends, so none can be left over. Where a file
system has no locks, asking for one changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Generator

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""EBADF: NFS, where an exclusive lock takes a file that is open for writing, and it may not be."""
_READER_TRIES = 100
_READER_PAUSE_SECS = 0.02


def lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was had at once; True too where the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _open_to_lock(path: str) -> int:
    """Open for an exclusive lock: for writing where that is allowed, as NFS wants it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def is_locked(path: str) -> bool:
    """Whether somebody holds a lock on the file; False where there is none."""
    try:
        descriptor = _open_to_lock(path)
    except OSError:
        return False
    try:
        return not lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading(path: str, head: bytes) -> Generator[None]:
    """Holds a file for reading while the block runs.

    Raises:
        FileNotFoundError: it was deleted, or no longer begins with ``head``.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:  # what may not be read is told by whoever reads it
        yield
        return
    try:
        # whoever deletes holds the file for the moment of a rename
        for _ in range(_READER_TRIES):
            if lock(descriptor, fcntl.LOCK_SH):
                break
            time.sleep(_READER_PAUSE_SECS)
        mine, there = os.fstat(descriptor), os.stat(path)
        same_file = (mine.st_ino, mine.st_dev) == (there.st_ino, there.st_dev)
        if not same_file or os.pread(descriptor, len(head), 0) != head:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def deleting(path: str) -> Generator[None]:
    """Keeps readers of a file away while the block runs; a missing file has none.

    Raises:
        BlockingIOError: it is being read.
    """
    try:
        descriptor = _open_to_lock(path)
    except OSError:
        yield
        return
    try:
        if not lock(descriptor, fcntl.LOCK_EX):
            raise BlockingIOError(errno.EAGAIN, "it is being read", path)
        yield
    finally:
        os.close(descriptor)


class Claim:
    """A locked file that says who writes to a directory; let go by ``close``, or with the process.

    Attributes:
        contested: whether another living writer of this machine had it.
    """

    def __init__(self, descriptor: int | None, contested: bool) -> None:
        self._descriptor = descriptor
        self.contested = contested

    def close(self) -> None:
        """Lets it go; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        # the interpreter takes modules apart before the last objects; the system lets go then
        if callable(getattr(os, "close", None)):
            self.close()
