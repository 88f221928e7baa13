"""Files of checkpoints: reads that no huge file, pipe, device or dangling link can trap, and hard links to known files.

Also calls that the standard library lacks. Two directories are swapped by renameat2, on macOS by renamex_np; elsewhere by two
renames, between which readers find the old one under its hidden name. On macOS fsync leaves data in the drive's own cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, name_file, naming_file
from ckpt_core._platform import MACOS, READ, WINDOWS

_LEAST_BYTES = 4095
_PIECE_BYTES = 4 * 1024 * 1024
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # of renameat2 and, under the name RENAME_SWAP, of renamex_np
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
    import fcntl

    try:
        full: int = fcntl.F_FULLFSYNC  # pyright: ignore[reportAttributeAccessIssue] # not on Linux
        fcntl.fcntl(descriptor, full)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        os.fsync(descriptor)


sync_file: Callable[[int], object] = _sync_the_drive if MACOS else lambda number: os.fsync(number)
"""Makes the content of an open file or directory last through a power cut."""


def remove_empty(directories: Iterable[str]) -> None:
    """Removes those directories that are there and empty."""
    for directory in directories:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def cannot_write(path: str) -> CheckpointError:
    """The error of every call that would change a directory on Windows, where no commit would be one."""
    return CheckpointError(
        f"{path}: on Windows, checkpoints in directories can be read (load, inspect, verify, ckpt), and neither "
        "saved nor deleted: a directory cannot be made durable and swapped in one step there, nor locked against "
        "its readers. Save to an object store (s3://, gs://), or in WSL 2, which is Linux"
    )


def link_new(source: str, target: str) -> None:
    """Gives a file a second name or, without hard links (exFAT, some FUSE), a new one; FileExistsError if something has it."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, *_CANNOT):
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)  # of two processes at once, the later one wins


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


def read_bounded(directory: str, name: str, most_bytes: int) -> bytes | None:
    """The bytes of a file, as ``Backend.read`` gives them."""
    path = os.path.join(directory, name)
    try:
        descriptor = os.open(path, READ)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            what = f"is a link to {os.readlink(path)}, which is not there"
            raise CheckpointCorrupt(f"{path} {what}", file=name) from None
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = "is a link that leads in a circle"
            raise CheckpointCorrupt(f"{path} {what}", file=name) from error
        if WINDOWS and os.path.isdir(path):  # which nothing opens there
            return None
        if error.errno in (errno.ENXIO, errno.ENODEV) and not stat.S_ISREG(os.stat(path).st_mode):
            raise _special(path, name) from error  # a socket, or a device without driver
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            raise _special(path, name)
        size, parts = status.st_size, list[bytes]()
        if size <= most_bytes:
            expected_bytes, size = size, 0  # in /proc and /sys, sizes are not the real ones
            while size <= most_bytes and (
                part := os.read(descriptor, max(expected_bytes - size, _LEAST_BYTES) + 1)
            ):
                parts.append(part)
                size += len(part)
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        os.close(descriptor)
    if size > most_bytes:
        what = f"has {size} bytes, and can have {most_bytes} at most: it is damaged, and not read"
        raise CheckpointCorrupt(f"{path} {what}", file=name)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_pieces(
    directory: str,
    name: str,
    size_bytes: int,
    check: Callable[[os.stat_result], None] = lambda status: None,
) -> Iterator[bytes]:
    """The bytes of a file that should have this size, 4 MiB at a time; one more if it is longer. ``check`` gets the status of
    the open file, first and last. Raises FileNotFoundError, or CheckpointCorrupt for anything but a regular file.
    """
    path = os.path.join(directory, name)
    descriptor = os.open(path, READ)
    try:
        with naming_file(path):
            status = os.fstat(descriptor)
            check(status)
            if not stat.S_ISREG(status.st_mode):
                raise _special(path, name)
            left = size_bytes + 1
            while left > 0 and (piece := os.read(descriptor, min(left, _PIECE_BYTES))):
                left -= len(piece)
                yield piece
            check(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _special(path: str, name: str) -> CheckpointCorrupt:
    what = "is no regular file (a pipe, a device or a socket)"
    return CheckpointCorrupt(f"{path} {what}", file=name)


def size_of(path: str) -> int | None:
    """Size of a regular file, following links; -1 for anything else, None if nothing is there."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return -1 if os.path.islink(path) else None
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def file_sizes(path: str) -> dict[str, int]:
    """``size_of`` of all files below a directory, by relative path. Enters each directory once, so that cycles of links end."""
    found: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(path, onerror=unless_absent, followlinks=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            inside = folder[len(path) + 1 :].replace(os.sep, "/")
            for name in names:
                size = size_of(os.path.join(folder, name))
                if size is not None:
                    found[f"{inside}/{name}" if inside else name] = size
    return found


def crc32_of(path: str, ranges: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of ranges of a file, each ``(start, stop)``; reads 4 MiB at a time."""
    crc = 0
    with naming_file(path), open(path, "rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            while start < stop and (data := file.read(min(stop - start, _PIECE_BYTES))):
                crc = zlib.crc32(data, crc)
                start += len(data)
    return crc


class FileIdentity(NamedTuple):
    """Identifies an unchanged file; not by the time of its inode's last change, which moves when somebody links it."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int


def identity_of(status: os.stat_result) -> FileIdentity:
    """The identity of the file with this status."""
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def identify(directory: str, names: Iterable[str]) -> dict[str, FileIdentity]:
    """The identity of each file, by its path relative to ``directory``."""
    return {name: _identity(os.path.join(directory, name)) for name in names}


def link_files(
    source: str, target: str, names: Mapping[str, str], known: Mapping[str, FileIdentity]
) -> None:
    """Hard-links files of ``source`` into ``target``: all of them or, on an error, none. ``names`` maps relative
    paths there to new ones. OSError if there are no hard links, or a file is missing or not the ``known`` one (ESTALE).
    """
    try:
        for folder in sorted({os.path.dirname(name) for name in names.values()}):
            os.makedirs(os.path.join(target, folder), exist_ok=True)
        for name, new in names.items():
            linked = os.path.join(target, new)
            os.link(os.path.join(source, name), linked, follow_symlinks=False)
            # after linking: of the linked file, even if its name was given to another one
            if _identity(linked) != known.get(name):
                raise OSError(errno.ESTALE, "not the file that was written any more", name)
    except OSError:
        for top in {new.partition("/")[0] for new in names.values()}:
            shutil.rmtree(os.path.join(target, top), ignore_errors=True)
        raise


def link_same(source: str, target: str, known: FileIdentity, pieces: Iterable[bytes]) -> bool:
    """Hard-links ``source`` to ``target`` if it is still the known file and holds these ``pieces``; whether it is linked."""
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    same = False
    try:
        same = _identity(target) == known and _holds(target, known.size_bytes, pieces)
    finally:
        if not same:
            os.unlink(target)
    return same


def _holds(path: str, size_bytes: int, pieces: Iterable[bytes]) -> bool:
    there = read_pieces(*os.path.split(path), size_bytes)
    for piece in pieces:
        try:
            if next(there, b"") != piece:
                return False
        except OSError:  # the disk does not give the old file: the save writes a new one
            return False
    return True


def _identity(path: str) -> FileIdentity:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", path)
    return identity_of(status)
