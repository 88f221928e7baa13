"""Safe reads of untrusted paths: files that are too large, pipes, devices, dangling links."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Iterator

from ckpt_core._errors import CheckpointCorrupt, name_file
from ckpt_core._platform import READ, WINDOWS

_LEAST_BYTES = 4095
_PIECE_BYTES = 4 * 1024 * 1024
_LEADS_NOWHERE = (errno.ELOOP, errno.ENAMETOOLONG)


def read_bounded(directory: str, name: str, most_bytes: int) -> bytes | None:
    """The bytes of a regular file, following links; None if there is no file. Raises CheckpointCorrupt if it is
    larger than ``most_bytes``, is not a regular file, or is a dangling link.
    """
    path = os.path.join(directory, name)
    try:
        descriptor = os.open(path, READ)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            what = f"is a link to {os.readlink(path)}, which is not there"
            raise _corrupt(path, name, what) from None
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _corrupt(path, name, "is a link that leads in a circle") from error
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
        what = f"has {size} bytes, and can have {most_bytes} at most"
        raise _corrupt(path, name, f"{what}: it is damaged, and not read")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_beginning(directory: str, name: str, most_bytes: int = 2**20) -> bytes | None:
    """The first bytes of a regular file; None if there is none."""
    path = os.path.join(directory, name)
    try:
        descriptor = os.open(path, READ)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, *_LEADS_NOWHERE):
            return None
        if WINDOWS and os.path.isdir(path):
            return None
        raise
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return os.read(descriptor, most_bytes) if regular else None
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        os.close(descriptor)


def read_pieces(directory: str, name: str, size_bytes: int) -> Iterator[bytes]:
    """The bytes of a file that should have this size, 4 MiB at a time; one more if it is longer. Raises
    FileNotFoundError, or CheckpointCorrupt for anything but a regular file.
    """
    path = os.path.join(directory, name)
    descriptor = os.open(path, READ)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _special(path, name)
        left = size_bytes + 1
        while left > 0 and (piece := os.read(descriptor, min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        os.close(descriptor)


def _special(path: str, name: str) -> CheckpointCorrupt:
    return _corrupt(path, name, "is no regular file (a pipe, a device or a socket)")


def size_of(path: str) -> int | None:
    """Size of a regular file, following links; -1 for anything else, None if nothing is there."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return -1 if os.path.islink(path) else None
    except OSError as error:
        if error.errno in _LEADS_NOWHERE:
            return -1
        raise
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def file_sizes(path: str) -> dict[str, int]:
    """``size_of`` of all files below a directory, by relative path. Follows links to directories, but enters each
    directory once, so that cycles of links end.
    """
    found: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        full = os.path.join(path, folder)
        try:
            status = os.stat(full)
            with os.scandir(full) as entries:
                listed = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted meanwhile
        except OSError as error:
            if error.errno not in _LEADS_NOWHERE:
                raise
            found[folder] = -1
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in listed:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if _is_directory(entry):
                waiting.append(name)
                continue
            size = size_of(entry.path)
            if size is not None:
                found[name] = size
    return found


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno not in _LEADS_NOWHERE:
            raise
        return False


def _corrupt(path: str, name: str, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} {what}", file=name)


def crc32_of(path: str, ranges: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of ranges of a file, each ``(start, stop)``; reads 4 MiB at a time."""
    crc = 0
    with open(os.fspath(path), "rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            while start < stop:
                try:
                    data = file.read(min(stop - start, _PIECE_BYTES))
                except OSError as error:
                    name_file(error, path)
                    raise
                if not data:
                    break
                crc = zlib.crc32(data, crc)
                start += len(data)
    return crc
