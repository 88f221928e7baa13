"""Measures where checkpoints are to be, and how fast memory is copied. What is written to measure is deleted again."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckpt_core._directory import SIGNS
from ckpt_core._directory.probe import Disk, probe_directory
from ckpt_core._platform import ROOTS
from ckpt_core._storage import Location, open_keys

_REQUESTS = 5


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
        return probe_directory(path, probe_bytes)
    location = _outside(Location(path, local))
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
    outside, place = location, location
    bucket = len(location.path.split("/")[:3])  # scheme, nothing, name
    while len(place.path.split("/")) > bucket:
        above = replace(place, path=place.path.rpartition("/")[0])
        keys = open_keys(place)
        if any(keys.get(sign, first_bytes=1) is not None for sign in SIGNS):
            outside = above
        place = above
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
