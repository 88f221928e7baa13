"""Measures where checkpoints are to be, and how fast memory is copied. What is written to measure is deleted again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath

from ckpt_core._directory import (
    SIGNS,
    exchange,
    file_system_of,
    has_sign,
    hidden_names,
    locks_work_in,
    mounted_bucket,
    remove,
    sync_file,
)
from ckpt_core._platform import ROOTS
from ckpt_core._storage import Location, open_keys

_REQUESTS = 5
_SYNCS = 9
_BLOCK_BYTES = 2**22


@dataclass(frozen=True)
class Disk:
    """What a directory of a file system can do."""

    directory: str  # or the first one above it that exists and is in no checkpoint
    file_system: str  # type, as the kernel names it; empty if unknown
    mounted_by: str | None  # the program that mounts a bucket there
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


@dataclass(frozen=True)
class Store:
    """What a place in a bucket can do."""

    url: str
    put_secs: float  # median of requests for 1 KiB, as of get_secs
    get_secs: float
    write_bytes_per_sec: float  # of one object, by one connection; reads as well
    read_bytes_per_sec: float
    conditions: bool  # a put that must not replace is refused where an object is


def probe(path: str, local: bool, probe_bytes: int) -> Disk | Store:
    """Measures a place, or the first above it that is in no checkpoint, with round trips and one file of ``probe_bytes``."""
    if path.startswith(ROOTS):
        return _probe_disk(path, probe_bytes)
    return _probe_store(_outside(Location(path, local)), probe_bytes)


def _probe_disk(path: str, probe_bytes: int) -> Disk:
    for around in (path, *map(str, PurePath(path).parents)):
        if has_sign(around) or not os.path.isdir(around):
            path = os.path.dirname(around)
    free_bytes, free_inodes = _free(path)
    # named as an unfinished save of this process: if it is killed here, the next clean-up deletes it
    folder = hidden_names.make(hidden_names.TEMPORARY, path, "doctor")
    os.mkdir(folder)
    try:
        file, small, *swapped = (
            os.path.join(folder, name) for name in ("speed", "small", "1", "2")
        )
        for name in swapped:
            os.mkdir(name)
        write_secs = _secs(lambda: _write(file, probe_bytes))
        cached = not _forget(file)
        read_secs = _secs(lambda: _read(file))
        sync_secs = statistics.median(_secs(lambda: _write(small, 4096)) for _ in range(_SYNCS))
        return Disk(
            directory=path,
            file_system=file_system_of(path),
            mounted_by=mounted_bucket(path),
            free_bytes=free_bytes,
            free_inodes=free_inodes,
            write_bytes_per_sec=probe_bytes / write_secs,
            read_bytes_per_sec=probe_bytes / read_secs,
            reads_cached=cached,
            sync_secs=sync_secs,
            clock_ahead_secs=os.stat(small).st_mtime - time.time(),
            hard_links=_works(lambda: os.link(file, f"{file}.link")),
            exchanges=_works(lambda: exchange(*swapped)),
            locks=locks_work_in(folder),
        )
    finally:
        remove(folder)


def _free(path: str) -> tuple[int | None, int | None]:
    """Free bytes and inodes for this user; None where the file system does not say."""
    room = shutil.disk_usage(path)
    files = os.statvfs(path) if hasattr(os, "statvfs") else None  # Windows has none
    inodes = files.f_favail if files is not None and files.f_files else None
    return room.free if room.total else None, inodes


def _write(path: str, count: int) -> None:
    block = os.urandom(min(count, _BLOCK_BYTES))
    with open(path, "wb", buffering=0) as file:
        left = count
        while left > 0:
            left -= file.write(block[:left])
        sync_file(file.fileno())


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


def _works(call: Callable[[], object]) -> bool:
    with contextlib.suppress(OSError):
        return call() is not False
    return False


def _probe_store(location: Location, probe_bytes: int) -> Store:
    keys = open_keys(location)
    small, large = (f".ckpt-doctor.{secrets.token_hex(8)}.{n}" for n in range(2))
    try:
        _, missing = keys.get_version(small)
        puts = [_secs(lambda: keys.put(small, b"x" * 1024)) for _ in range(_REQUESTS)]
        gets = [_secs(lambda: keys.get(small)) for _ in range(_REQUESTS)]
        replaced = keys.put_if_unchanged(small, b"y", missing)
        data = secrets.token_bytes(probe_bytes)
        return Store(
            url=location.path,
            put_secs=statistics.median(puts),
            get_secs=statistics.median(gets),
            write_bytes_per_sec=probe_bytes / _secs(lambda: keys.put(large, data)),
            read_bytes_per_sec=probe_bytes / _secs(lambda: keys.get(large)),
            conditions=not replaced,
        )
    finally:
        with contextlib.suppress(Exception):
            keys.delete([small, large])


def _outside(location: Location) -> Location:
    """The location, or the one around the checkpoint in which it lies."""
    outside, parts = location, location.path.split("/")
    for count in range(len(parts), 3, -1):  # down to the bucket: scheme, nothing, name
        keys = open_keys(replace(location, path="/".join(parts[:count])))
        if any(keys.get(sign, first_bytes=1) is not None for sign in SIGNS):
            outside = replace(location, path="/".join(parts[: count - 1]))
    return outside


def copy_bytes_per_sec(probe_bytes: int) -> float:
    """Speed at which one thread copies memory into memory that it used before: what a snapshot on the host costs."""
    source, target = bytes(probe_bytes), bytearray(probe_bytes)

    def copy() -> None:
        target[:] = source

    copy()  # faults the pages in
    return probe_bytes / statistics.median(_secs(copy) for _ in range(_REQUESTS))


def _secs(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return max(time.perf_counter() - began, 1e-9)
