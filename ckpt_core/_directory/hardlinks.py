"""Files that two checkpoints share: hard links, and only to what is known to be unchanged."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class FileIdentity(NamedTuple):
    """What tells whether a file is still the very one that was written."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def identify(directory: str, names: Iterable[str]) -> dict[str, FileIdentity]:
    """The identity of files, by their paths relative to ``directory``."""
    return {name: _identity(os.path.join(directory, name)) for name in names}


def link_files(
    source: str, target: str, names: Mapping[str, str], known: Mapping[str, FileIdentity]
) -> None:
    """Links files of one directory into another; all of them or none.

    Args:
        source, target: directories.
        names: name in ``target`` by name in ``source``, both relative.
        known: identity by name in ``source``.

    Raises:
        OSError: the file system has no links, a file is gone or another one (ESTALE), ...
    """
    try:
        for folder in sorted({os.path.dirname(name) for name in names.values()}):
            os.makedirs(os.path.join(target, folder), exist_ok=True)
        for name, new in names.items():
            linked = os.path.join(target, new)
            os.link(os.path.join(source, name), linked, follow_symlinks=False)
            # looked at after linking: what is compared is what was linked, whatever the name is now
            if _identity(linked) != known.get(name):
                raise OSError(errno.ESTALE, "not the file that was written any more", name)
    except OSError:
        for top in {new.partition("/")[0] for new in names.values()}:
            shutil.rmtree(os.path.join(target, top), ignore_errors=True)
        raise


def _identity(path: str) -> FileIdentity:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", path)
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
