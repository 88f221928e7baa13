"""Measures what a directory can do: speed, durability, links, locks, clock. Its files are deleted again."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_core._directory import hidden_names
from ckpt_core._directory.leftovers import has_sign
from ckpt_core._directory.locks import EXCLUSIVE, LockFile
from ckpt_core._directory.paths import file_system_of, mounted_bucket
from ckpt_core._directory.syscalls import exchange, is_local_disk, remove, sync_file

_SYNCS = 9
_BLOCK_BYTES = 2**22


@dataclass(frozen=True)
class Disk:
    """What a directory of a file system can do."""

    directory: str  # or the first one above it that exists and is in no checkpoint
    file_system: str  # type, as the kernel names it; empty if unknown
    mounted_by: str | None  # the program that mounts a bucket there
    local: bool  # no other machine can change it
    free_bytes: int | None  # for this user, as the inodes; None if the file system does not say
    free_inodes: int | None
    write_bytes_per_sec: float  # of one file, with its fsync
    read_bytes_per_sec: float  # of the same file, past the page cache where the system allows it
    reads_cached: bool
    sync_secs: float  # median of an fsync after 4 KiB
    clock_ahead_secs: float  # the file system's clock minus this machine's
    hard_links: bool
    exchanges: bool  # of two directories, at once
    locks: bool  # it refuses a second lock of a file


def probe_directory(path: str, probe_bytes: int) -> Disk:
    """Measures the directory at ``path``, or the first above it that exists and is in no checkpoint, with one file of
    ``probe_bytes``.
    """
    path = _outside(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    free_bytes, free_inodes = _free(path)
    # named as an unfinished save of this process: if it is killed here, the next clean-up deletes it
    folder = hidden_names.make(hidden_names.TEMPORARY, path, "doctor")
    os.mkdir(folder)
    try:
        file = os.path.join(folder, "speed")
        write_secs = _seconds(lambda: _write(file, probe_bytes))
        cached = not _forget(file)
        read_secs = _seconds(lambda: _read(file))
        ahead_secs = os.stat(_touched(os.path.join(folder, "now"))).st_mtime - time.time()
        sync_secs = statistics.median(
            _seconds(lambda: _write(os.path.join(folder, "small"), 4096)) for _ in range(_SYNCS)
        )
        return Disk(
            directory=path,
            file_system=file_system_of(path),
            mounted_by=mounted_bucket(path),
            local=is_local_disk(path),
            free_bytes=free_bytes,
            free_inodes=free_inodes,
            write_bytes_per_sec=probe_bytes / write_secs,
            read_bytes_per_sec=probe_bytes / read_secs,
            reads_cached=cached,
            sync_secs=sync_secs,
            clock_ahead_secs=ahead_secs,
            hard_links=_links(file),
            exchanges=_exchanges(folder),
            locks=_locks(file),
        )
    finally:
        remove(folder)


def _free(path: str) -> tuple[int | None, int | None]:
    """Free bytes and inodes for this user; None where the file system does not say."""
    if not hasattr(os, "statvfs"):  # Windows
        return shutil.disk_usage(path).free, None
    room = os.statvfs(path)
    return (
        room.f_bavail * room.f_frsize if room.f_blocks else None,
        room.f_favail if room.f_files else None,
    )


def _outside(path: str) -> str:
    """The directory of the checkpoint that a path is in, which would be damaged by one file more; else the path."""
    around = path
    while around != os.path.dirname(around):
        if has_sign(around):
            path = os.path.dirname(around)
        around = os.path.dirname(around)
    return path


def _seconds(do: Callable[[], None]) -> float:
    began = time.perf_counter()
    do()
    return max(time.perf_counter() - began, 1e-9)


def _write(path: str, count: int) -> None:
    block = os.urandom(min(count, _BLOCK_BYTES))
    with open(path, "wb", buffering=0) as file:
        left = count
        while left > 0:
            left -= file.write(block[:left])
        sync_file(file.fileno())


def _touched(path: str) -> str:
    _write(path, 1)
    return path


def _forget(path: str) -> bool:
    """Takes a file out of the page cache; whether the system knows how. A RAM disk keeps it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file_system_of(path) not in ("tmpfs", "ramfs")


def _read(path: str) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _links(file: str) -> bool:
    with contextlib.suppress(OSError):
        os.link(file, f"{file}.link")
        return os.path.samefile(file, f"{file}.link")
    return False


def _exchanges(folder: str) -> bool:
    names = [os.path.join(folder, name) for name in ("one", "two")]
    for name in names:
        os.mkdir(name)
    with contextlib.suppress(OSError):
        return exchange(names[0], names[1])
    return False


def _locks(file: str) -> bool:
    """Whether a second lock is refused; a file system without locks grants both."""
    with LockFile(file, os.O_RDWR) as first, LockFile(file, os.O_RDWR) as second:
        return first.lock(EXCLUSIVE) and not second.lock(EXCLUSIVE)
