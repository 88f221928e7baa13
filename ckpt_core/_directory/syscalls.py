"""System calls that the standard library lacks or wraps badly, with what takes their place where the system has none.

| call | on Linux | on macOS | elsewhere |
|---|---|---|---|
| swap two directories | renameat2 | renamex_np | none: two renames, and readers find the old one under its hidden name between them |
| fsync | fsync | F_FULLFSYNC: fsync leaves the data in the drive's own cache | fsync |
| is the disk local | statfs | not asked: files are read instead of mapped | the same |
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
from ckpt_core._platform import LINUX, MACOS

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Of renameat2 and, under the name RENAME_SWAP, of renamex_np."""
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY)
"""What a file system answers that does not know a call."""
_LOCAL_KINDS = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlay, of containers
        0x73717368,  # squashfs
        0xE0F5E1E2,  # erofs
    }
)
"""``f_type`` (statfs(2)) of file systems that no other machine can change."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""What the system says of a path at which nothing is, or can be."""
_CONTROL_BYTES = 64
_STATFS_BYTES = 512  # larger than struct statfs on any architecture


def kind_at(path: str, *, follow: bool = True) -> str:
    """What is at a path: ``"directory"``, ``"file"`` or ``"other"``, which a link is without ``follow``; empty if
    nothing is, as behind a dangling link. Raises OSError if the system cannot say (EIO, EACCES, ESTALE), where
    ``os.path.exists`` and its kin say that nothing is there.
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
        if MACOS:
            return _control_text("kern.bootsessionuuid")
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _control_text(name: str) -> str:
    """What sysctl says; empty if it knows no such name."""
    answer = ctypes.create_string_buffer(_CONTROL_BYTES)
    size = ctypes.c_size_t(_CONTROL_BYTES)
    try:
        ask = ctypes.CDLL(None).sysctlbyname
    except AttributeError:
        return ""
    done = ask(name.encode(), answer, ctypes.byref(size), None, ctypes.c_size_t(0))
    return answer.value.decode() if done == 0 else ""


sync_file: Callable[[int], object] = (
    _sync_the_drive if MACOS else lambda descriptor: os.fsync(descriptor)
)
"""Makes the content of an open file or directory last through a power cut.

TensorStore syncs its files by fsync alone. On macOS they are then in the drive's cache, which the sync of the record,
the last file of a checkpoint, empties before the checkpoint gets its name.
"""


def cannot_write(path: str) -> CheckpointError:
    """The error of every call that would change a directory on Windows, where checkpoints can be read only: no commit
    there would be one. A directory cannot be synced, nor renamed while a file in it is open, and no lock keeps
    retention from what is being read.
    """
    return CheckpointError(
        f"{path}: on Windows, checkpoints in directories can be read (load, inspect, verify, ckpt), and neither "
        "saved nor deleted: a directory cannot be made durable and swapped in one step there, nor locked against "
        "its readers. Save to an object store (s3://, gs://), or in WSL 2, which is Linux"
    )


def link_new(source: str, target: str) -> None:
    """Gives a file a second name; raises FileExistsError if something has it. On file systems without hard links
    (exFAT, some FUSE) it is renamed: of two processes at the same moment the later one wins, and none of them learns
    of it.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, *_CANNOT):
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)


def is_local_disk(path: str) -> bool:
    """Whether a path is on a local file system; False if unknown. On a network file system another machine may
    truncate a file; a process that then touches its memory map of the file is killed (SIGBUS).
    """
    if not LINUX:
        return False
    try:
        statfs = ctypes.CDLL(None, use_errno=True).statfs
    except (OSError, AttributeError):
        return False
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs(os.fsencode(path), answer) != 0:
        return False
    kind = ctypes.c_long.from_buffer(answer).value  # f_type, the first field, is a machine word
    return kind & 0xFFFFFFFF in _LOCAL_KINDS


def remove(path: str) -> None:
    """Like ``remove_tree``, but deletes as much as possible and raises no error of the file system."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Deletes a directory tree, or a link itself and not its target."""
    if os.path.islink(path):
        os.unlink(path)
        return
    shutil.rmtree(path)


def unless_absent(error: OSError) -> None:
    """For ``os.walk(onerror=)``, which by default treats an unreadable directory as empty: raises the error unless
    the directory is gone.
    """
    if not isinstance(error, FileNotFoundError):
        raise error
