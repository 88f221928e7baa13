"""System calls that the standard library lacks or wraps badly: renameat2, statfs, rmtree."""

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
"""``f_type`` (statfs(2)) of file systems that no other machine can change."""
_STATFS_BYTES = 512  # larger than struct statfs on any architecture


def exchange(one: str, other: str) -> bool:
    """Atomically swaps two directories; False if the system cannot (see renameat2(2))."""
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
    """Whether a path is on a local file system; False if unknown.

    On a network file system another machine may truncate a file; a process that then touches its
    memory map of the file is killed (SIGBUS).
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
    kind = ctypes.c_long.from_buffer(answer).value  # f_type, the first field, is a machine word
    return kind & 0xFFFFFFFF in _LOCAL_KINDS


def remove(path: str) -> None:
    """Like ``remove_tree``, but deletes as much as possible and never raises OSError."""
    with contextlib.suppress(OSError):  # rmtree(ignore_errors=True) still raises errors of close
        try:
            _remove(path)
        except BaseException:  # of a signal handler: nobody will look at this name again
            _remove(path)
            raise


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def remove_tree(path: str) -> None:
    """Deletes a directory tree, or a link itself and not its target."""
    if os.path.islink(path):
        os.unlink(path)
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        # If a signal handler raises right after rmtree closed a descriptor, rmtree closes it again
        # and fails with EBADF: raise the handler's exception instead.
        interrupt = raised_by_a_handler(error.__context__)
        if interrupt is not None:
            raise interrupt from None
        raise


def unless_absent(error: OSError) -> None:
    """For ``os.walk(onerror=)``, which by default treats an unreadable directory as empty.

    Raises:
        OSError: the directory exists but cannot be listed.
    """
    if not isinstance(error, FileNotFoundError):
        raise error
