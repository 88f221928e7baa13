"""What the standard library lacks: swapping two directories, removing whatever it is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat

from ckpt_core._errors import CheckpointCorrupt

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


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


def remove(path: str) -> None:
    """Removes a directory with all that is in it, or a file; never raises."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)


def refuse_special(mode: int, path: str) -> None:
    """Raises CheckpointCorrupt for what is no regular file."""
    if not stat.S_ISREG(mode):
        name = os.path.basename(path)
        raise CheckpointCorrupt(
            f"{path} is no regular file (a pipe, a device or a socket)", file=name
        )
