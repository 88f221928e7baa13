"""System calls that the standard library lacks or wraps badly, with what takes their place where the system has none.

| call | on Linux | on macOS | elsewhere |
|---|---|---|---|
| swap two directories | renameat2 | renamex_np | none: two renames, and readers find the old one under its hidden name between them |
| fsync | fsync | F_FULLFSYNC: fsync leaves the data in the drive's own cache | fsync |
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable

from ckpt_core._errors import CheckpointError
from ckpt_core._platform import MACOS

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Of renameat2 and, under the name RENAME_SWAP, of renamex_np."""
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY)
"""What a file system answers that does not know a call."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""What the system says of a path at which nothing is, or can be."""


def kind_at(path: str, *, follow: bool = True) -> str:
    """What is at a path: ``"directory"``, ``"file"``, ``"other"`` (a link without ``follow``), or empty for nothing, as behind
    a dangling link. OSError if the system cannot say, where ``os.path.exists`` says that nothing is there.
    """
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except OSError as error:
        if error.errno in ABSENT:
            return ""
        raise
    except ValueError:  # a zero byte
        return ""
    return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def refuse_file(path: str) -> None:
    """Raises NotADirectoryError if ``path`` is a file; never for a URL."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # nothing is there, or who lists it says what is wrong
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "a file is where a directory should be", path)


def exchange(one: str, other: str) -> bool:
    """Atomically swaps two directories; False if the system or the file system cannot."""
    paths, flags = (os.fsencode(one), os.fsencode(other)), ctypes.c_uint(_RENAME_EXCHANGE)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if MACOS:
            done = library.renamex_np(*paths, flags)
        else:
            done = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], flags)
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no library without a name
        return False
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), other)


def _sync_the_drive(descriptor: int) -> None:
    """fsync that also empties the drive's own cache, where the file system can; costs as much as all that is in it."""
    try:
        assert fcntl is not None
        full: int = fcntl.F_FULLFSYNC  # pyright: ignore[reportAttributeAccessIssue] # not on Linux
        fcntl.fcntl(descriptor, full)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        os.fsync(descriptor)


def boot_id() -> str:
    """Differs between machines, and between two starts of one; empty where the system tells none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


sync_file: Callable[[int], object] = (
    _sync_the_drive if MACOS else lambda descriptor: os.fsync(descriptor)
)
"""Makes the content of an open file or directory last through a power cut."""


def cannot_write(path: str) -> CheckpointError:
    """The error of every call that would change a directory on Windows, where no commit would be one."""
    return CheckpointError(
        f"{path}: on Windows, checkpoints in directories can be read (load, inspect, verify, ckpt), and neither "
        "saved nor deleted: a directory cannot be made durable and swapped in one step there, nor locked against "
        "its readers. Save to an object store (s3://, gs://), or in WSL 2, which is Linux"
    )


def link_new(source: str, target: str) -> None:
    """Gives a file a second name; raises FileExistsError if something has it. On file systems without hard links
    (exFAT, some FUSE) it is renamed: of two processes at the same moment the later one wins in silence.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, *_CANNOT):
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)


def remove(path: str) -> None:
    """Deletes as much as possible of a directory tree, or a link itself; raises no error of the file system."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def unless_absent(error: OSError) -> None:
    """For ``os.walk(onerror=)``, which treats an unreadable directory as empty: raises the error unless nothing is there."""
    if error.errno not in ABSENT:
        raise error
