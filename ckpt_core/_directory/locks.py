"""Locks of files between readers, writers and whoever deletes (flock(2)).

The system drops them when the process ends, however it ends, so none can be left over. Where a file
system has no locks, asking for one changes nothing.

A lock belongs to the open file, which a forked child would share: a worker that lives on would hold
it for as long. So a child closes what was open when it was forked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Generator

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""EBADF: NFS, where an exclusive lock takes a file that is open for writing, and it may not be."""
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""To open a pipe waits for whoever is at its other end, for ever."""
_READER_TRIES = 100
_READER_PAUSE_SECS = 0.02


class LockFile:
    """A file that is open to be locked; a forked child does not have it.

    Attributes:
        descriptor: of the open file; None when it was closed.
    """

    def __init__(self, path: str, flags: int, mode: int = 0o666) -> None:
        self.descriptor: int | None = None
        with _forking:
            self.descriptor = os.open(path, flags | _FLAGS, mode)
            open_files.add(self)

    def lock(self, kind: int) -> bool:
        """Whether the lock was had at once; True too where the file system has none."""
        assert self.descriptor is not None
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def close(self) -> None:
        """Closes it, and lets its lock go."""
        with _forking:
            open_files.discard(self)
            descriptor, self.descriptor = self.descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> LockFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        # the interpreter takes modules apart before the last objects; the system lets go then
        # and one whose making was interrupted has no descriptor
        if callable(getattr(os, "close", None)) and getattr(self, "descriptor", None) is not None:
            self.close()


open_files: weakref.WeakSet[LockFile] = weakref.WeakSet()
"""All that are open, which is what a child has to close: of the process, as its descriptors are."""
_forking = threading.RLock()
"""Held while a descriptor is opened or closed, and while a child is forked: it knows them all."""


def _close_in_child() -> None:
    for file in list(open_files):
        file.close()
    _forking.release()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child
)


def _open_to_lock(path: str) -> LockFile:
    """Open for an exclusive lock: for writing where that is allowed, as NFS wants it."""
    try:
        return LockFile(path, os.O_RDWR)
    except PermissionError:
        return LockFile(path, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return LockFile(path, os.O_RDONLY)


def is_locked(path: str) -> bool:
    """Whether somebody holds a lock on the file, as far as locks reach; False where there is none."""
    try:
        file = _open_to_lock(path)
    except OSError:
        return False
    with file:
        return not file.lock(fcntl.LOCK_EX)


@contextlib.contextmanager
def reading(path: str, head: bytes) -> Generator[None]:
    """Holds a file for reading while the block runs.

    Raises:
        FileNotFoundError: it was deleted, or no longer begins with ``head``.
    """
    try:
        file = LockFile(path, os.O_RDONLY)
    except PermissionError:  # what may not be read is told by whoever reads it
        yield
        return
    with file:
        # whoever deletes holds the file for the moment of a rename
        for _ in range(_READER_TRIES):
            if file.lock(fcntl.LOCK_SH):
                break
            time.sleep(_READER_PAUSE_SECS)
        assert file.descriptor is not None
        mine, there = os.fstat(file.descriptor), os.stat(path)
        same_file = (mine.st_ino, mine.st_dev) == (there.st_ino, there.st_dev)
        if not same_file or os.pread(file.descriptor, len(head), 0) != head:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield


@contextlib.contextmanager
def deleting(path: str) -> Generator[None]:
    """Keeps readers of a file away while the block runs; a missing file has none.

    Raises:
        BlockingIOError: it is being read.
    """
    try:
        file = _open_to_lock(path)
    except OSError:
        yield
        return
    with file:
        if not file.lock(fcntl.LOCK_EX):
            raise BlockingIOError(errno.EAGAIN, "it is being read", path)
        yield


class Claim:
    """A locked file that says who writes to a directory; let go by ``close``, or with the process.

    Attributes:
        contested: whether another living writer of this machine had it.
    """

    def __init__(self, file: LockFile | None, contested: bool) -> None:
        self._file = file
        self.contested = contested

    def close(self) -> None:
        """Lets it go; the file stays."""
        if self._file is not None:
            self._file.close()
