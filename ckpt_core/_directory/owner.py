"""Which process owns a directory or a claim, whether that process is alive, and what it keeps locked.

The owner is written into the directory's name or the claim's file as ``<host>-<pid>-<start>``, where host is a digest of
host name, boot and process namespace, and start is the start time in clock ticks.

Locks (flock(2)) are between readers, writers and deleters of checkpoints. The kernel releases a lock when its process
ends in any way, so no stale lock remains. On a file system or a system (Windows) without locks, locking succeeds and has
no effect. A lock belongs to the open file description, which a forked child shares: a data worker that outlives its
parent would keep the lock. Therefore a forked child closes all lock files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass

from ckpt_core._directory.files import unless_absent
from ckpt_core._fork import around_forks
from ckpt_core._platform import READ, WINDOWS

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FOREIGN_AGE_SECS = 3600.0
_OWNER = re.compile(r"([0-9a-f]+)-([0-9]{1,9})-([0-9]*)")


@functools.cache
def this_owner() -> str:
    """The owner string of this process."""
    return f"{_host()}-{os.getpid()}-{_start_time(os.getpid()) or ''}"


around_forks(after_in_child=this_owner.cache_clear)


def _boot_id() -> str:
    """Differs between machines, and between two starts of one; empty where the system tells none."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def this_machine() -> str:
    """Identifies the machine: equal for all its containers, different after it was started anew."""
    return _boot_id() or socket.gethostname()


def this_network() -> str:
    """Identifies the machine and its network namespace, whose processes reach each other by loopback."""
    return f"{this_machine()} {_namespace('net') or socket.gethostname()}"


def introduction() -> str:
    """Process id, host and current time, for messages."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"


@functools.cache
def _host() -> str:
    text = f"{socket.gethostname()}\n{_boot_id()}\n{_namespace('pid')}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _namespace(kind: str) -> str:
    with contextlib.suppress(OSError):  # a system without them
        return os.readlink(f"/proc/self/ns/{kind}")
    return ""


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks; empty if it is a zombie, None if /proc does not show it (``hidepid``)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        # The command name, in parentheses, may contain spaces and parentheses.
        fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return None


def lives(owner: str) -> bool | None:
    """Whether the owner is alive; None if it runs on another host or is unknown. Without /proc, a later process with its id counts."""
    parts = _OWNER.fullmatch(owner)
    if parts is None or parts[1] != _host() or int(parts[2]) == 0:
        return None
    pid, start = int(parts[2]), parts[3]
    now = _start_time(pid)
    if now == "":
        return False
    if now is not None and start:
        return now == start
    if WINDOWS:  # where os.kill ends or interrupts the process
        return True if pid == os.getpid() else None
    try:
        os.kill(pid, 0)
    except OSError as error:  # EPERM: the process exists and belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True


def is_dead(owner: str, path: str) -> bool:
    """Whether the owner of the files at ``path`` is dead; of one on another host, whether nothing below ``path`` has changed
    for ``FOREIGN_AGE_SECS`` by the clock of the file system, since that of this host may be wrong.
    """
    living = lives(owner)
    if living is not None:
        return not living
    with contextlib.suppress(OSError):
        newest = os.stat(path).st_mtime
        # a long save may change only the deepest files
        for top, directories, files in os.walk(path, onerror=unless_absent):
            inside = (os.path.join(top, name) for name in (*directories, *files))
            newest = max([newest, *(os.stat(entry).st_mtime for entry in inside)])
        with tempfile.TemporaryFile(dir=os.path.dirname(path), prefix=".ckpt-") as clock:
            return os.fstat(clock.fileno()).st_mtime - newest > FOREIGN_AGE_SECS
    return False


SHARED, EXCLUSIVE = (1, 2) if fcntl is None else (fcntl.LOCK_SH, fcntl.LOCK_EX)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""EBADF: NFS grants exclusive locks only on files open for writing, which may not be permitted."""
_READER_TRIES = 100
_READER_PAUSE_SECS = 0.02


class LockFile(contextlib.AbstractContextManager["LockFile"]):
    """An open file for flock; a forked child closes it."""

    descriptor = -1  # after ``close``

    def __init__(self, path: str, flags: int) -> None:
        with _forking:
            self.descriptor = os.open(path, flags | READ, 0o666)
            open_files.add(self)

    def lock(self, kind: int) -> bool:
        """Tries to lock without blocking; True on success, or if the file system has no locks."""
        if fcntl is None:
            return True
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def close(self) -> None:
        """Closes the file, which releases its lock."""
        # At interpreter exit, when generators are closed, modules may be torn down: then the kernel releases the lock.
        if not (_forking and callable(getattr(os, "close", None))):
            return
        with _forking:
            open_files.discard(self)
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.descriptor >= 0:
            self.close()


open_files: weakref.WeakSet[LockFile] = weakref.WeakSet()
"""All open lock files of this process, which a forked child has to close."""
_forking = threading.RLock()
"""Held while a descriptor is opened or closed and during a fork, so ``open_files`` is complete."""


def _close_all() -> None:
    for file in list(open_files):
        file.close()
    _forking.release()


around_forks(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_all)


def _open_to_lock(path: str) -> LockFile:
    """Opens a file or a folder for a lock: for writing if permitted, because NFS requires that for an exclusive one."""
    try:
        return LockFile(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR):
            raise
        return LockFile(path, os.O_RDONLY)


def lock_folder(path: str, *, exclusive: bool) -> LockFile | None:
    """Holds a lock on a folder itself until it is closed; None if another process holds one that excludes it."""
    file = _open_to_lock(path)
    if file.lock(EXCLUSIVE if exclusive else SHARED):
        return file
    file.close()
    return None


def is_locked(path: str) -> bool:
    """Whether any process, as far as this host sees, holds a lock on the file; False if the file or the file system has none."""
    try:
        file = _open_to_lock(path)
    except OSError:
        return False
    with file:
        return not file.lock(EXCLUSIVE)


def locks_work_in(directory: str) -> bool:
    """Whether a lock on a file in a directory can be seen; False if no file can be written there. Leaves nothing."""
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile(dir=directory, prefix=".ckpt-lock-") as file,
        LockFile(file.name, os.O_RDWR) as held,
    ):
        return held.lock(EXCLUSIVE) and is_locked(file.name)
    return False


@contextlib.contextmanager
def reading(path: str, head: bytes) -> Generator[None]:
    """Keeps ``deleting`` out during the block; FileNotFoundError if the file is gone or no longer begins with ``head``."""
    try:
        file = LockFile(path, os.O_RDONLY)
    except PermissionError:  # unreadable: let the read itself raise
        yield
        return
    with file:
        # A deleter holds its exclusive lock only during a rename: retry for up to 2 s.
        for _ in range(_READER_TRIES):
            if file.lock(SHARED):
                break
            time.sleep(_READER_PAUSE_SECS)
        same_file = os.path.samestat(os.fstat(file.descriptor), os.stat(path))
        if not same_file or os.read(file.descriptor, len(head)) != head:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield


@contextlib.contextmanager
def deleting(path: str) -> Generator[None]:
    """Holds an exclusive lock on a file, if it can be opened, during the block; BlockingIOError if a reader holds it."""
    try:
        file = _open_to_lock(path)
    except OSError:
        yield
        return
    with file:
        if not file.lock(EXCLUSIVE):
            raise BlockingIOError(errno.EAGAIN, "it is being read", path)
        yield


@dataclass(frozen=True)
class Claim:
    """A locked file that names the writer of a directory; held until ``close`` or process exit."""

    file: LockFile | None  # an object store has no locks
    contested: bool  # another live writer held the lock before

    def close(self) -> None:
        """Releases the lock; the file stays."""
        if self.file is not None:
            self.file.close()
