"""What the standard library lacks: swapping two directories, removing whatever it is, statfs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys

from ckpt_core._errors import raised_by_a_handler

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
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
"""``f_type`` of file systems whose pages are this machine's own (statfs(2))."""
_STATFS_BYTES = 512  # more than any architecture's struct takes


def exchange(one: str, other: str) -> bool:
    """Swaps two directories in one step; False where the system cannot (see renameat2(2))."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    done = rename(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if done == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), other)


def is_local_disk(path: str) -> bool:
    """Whether a path lies on a file system of this machine; False where that is not known.

    A file of a network file system may be cut short by another machine: whoever then touches a
    mapping of it is killed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        statfs = ctypes.CDLL(None, use_errno=True).statfs
    except (OSError, AttributeError):
        return False
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs(os.fsencode(path), answer) != 0:
        return False
    kind = ctypes.c_long.from_buffer(answer).value  # the first field, a machine word
    return kind & 0xFFFFFFFF in _LOCAL_KINDS


def remove(path: str) -> None:
    """``remove_tree`` of what can be removed; never raises."""
    with contextlib.suppress(OSError):  # rmtree ignores all errors but those of closing
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def remove_tree(path: str) -> None:
    """Removes a directory with all that is in it, or a file; of a link the link, not what it leads to."""
    if os.path.islink(path):
        os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        # what a handler raises between the closing of a descriptor and the note of it has it closed twice
        interrupt = raised_by_a_handler(error.__context__)
        if interrupt is not None:
            raise interrupt from None
        raise


def unless_absent(error: OSError) -> None:
    """For ``os.walk(onerror=)``, which otherwise takes a directory that cannot be listed for empty.

    Raises:
        OSError: the directory is there.
    """
    if not isinstance(error, FileNotFoundError):
        raise error
