"""Measures a place in an object store: round trips, and whether it keeps conditions. Its key is deleted again."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckpt_core._directory import SIGNS
from ckpt_core._storage import open_keys
from ckpt_core._storage.location import Location

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


def probe_store(location: Location, probe_bytes: int) -> Store:
    """Measures a place, or the first above it that is in no checkpoint."""
    location = _outside(location)
    keys = open_keys(location)
    small, large = (f".ckpt-doctor.{secrets.token_hex(8)}.{n}" for n in range(2))
    try:
        _, missing = keys.get_version(small)
        puts = [_timed(lambda: keys.put(small, b"x" * 1024))[0] for _ in range(_REQUESTS)]
        gets = [_timed(lambda: keys.get(small))[0] for _ in range(_REQUESTS)]
        replaced = keys.put_if_unchanged(small, b"y", missing)
        data = secrets.token_bytes(probe_bytes)
        write_secs, _ = _timed(lambda: keys.put(large, data))
        read_secs, _ = _timed(lambda: keys.get(large))
        return Store(
            url=location.path,
            put_secs=statistics.median(puts),
            get_secs=statistics.median(gets),
            write_bytes_per_sec=probe_bytes / write_secs,
            read_bytes_per_sec=probe_bytes / read_secs,
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


def _timed(do: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = do()
    return max(time.perf_counter() - began, 1e-9), found
