"""Hard links between checkpoints, made only to files that are known to be unchanged."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class FileIdentity(NamedTuple):
    """Identifies an unchanged file: device, inode, size and modification time."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def identify(directory: str, names: Iterable[str]) -> dict[str, FileIdentity]:
    """The identity of each file, by its path relative to ``directory``."""
    return {name: _identity(os.path.join(directory, name)) for name in names}


def link_files(
    source: str, target: str, names: Mapping[str, str], known: Mapping[str, FileIdentity]
) -> None:
    """Hard-links files of ``source`` into ``target``: all of them or, on an error, none. ``names`` maps relative
    paths there to new ones. Raises OSError if the file system has no hard links, or a file is missing or no longer
    the ``known`` one (ESTALE).
    """
    try:
        for folder in sorted({os.path.dirname(name) for name in names.values()}):
            os.makedirs(os.path.join(target, folder), exist_ok=True)
        for name, new in names.items():
            linked = os.path.join(target, new)
            os.link(os.path.join(source, name), linked, follow_symlinks=False)
            # Check after linking: this checks the linked file, even if the source name was
            # replaced.
            if _identity(linked) != known.get(name):
                raise OSError(errno.ESTALE, "not the file that was written any more", name)
    except OSError:
        for top in {new.partition("/")[0] for new in names.values()}:
            shutil.rmtree(os.path.join(target, top), ignore_errors=True)
        raise


def link_same(source: str, target: str, known: FileIdentity, pieces: Iterable[bytes]) -> bool:
    """Hard-links ``source`` to ``target`` if it is still the known file and holds these bytes. Nothing is left at
    ``target`` if it is not, or if the file system has no hard links.
    """
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    same = False
    try:
        same = _identity(target) == known and _holds(target, pieces)
    finally:
        if not same:
            os.unlink(target)
    return same


def _holds(path: str, pieces: Iterable[bytes]) -> bool:
    with open(path, "rb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                there = _read(file, len(view))
                if not there or memoryview(there) != view[: len(there)]:
                    return False
                view = view[len(there) :]
        return _read(file, 1) == b""


def _read(file: io.FileIO, most_bytes: int) -> bytes | None:
    """Bytes of the old file; None if the disk does not give them: then it is not linked, and the save goes on."""
    try:
        return file.read(most_bytes)
    except OSError:
        return None


def _identity(path: str) -> FileIdentity:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", path)
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
