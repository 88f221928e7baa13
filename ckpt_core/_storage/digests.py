"""Digests of data files, which cover the bytes outside of all checksummed blocks.

``verify`` gets the ranges here; a save computes them as it writes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

from ckpt_core._errors import name_file
from ckpt_core._layout.ranges import gaps
from ckpt_core._options import MIB
from ckpt_core._storage._tensorstore import StoreContext
from ckpt_core._storage.database import read_index
from ckpt_core._storage.location import Location

_AT_ONCE_BYTES = 4 * MIB

Ranges = list[tuple[int, int]]


def ranges_in_blocks(
    checkpoint: Location, folder: str, context: StoreContext, manifest: bytes | None = None
) -> dict[str, Ranges]:
    """Data file, relative to the checkpoint -> (offset, size) of everything in it that block checksums cover,
    for the database in ``folder``; ``manifest`` is the content of its manifest, if the caller has read that.
    """
    found: dict[str, Ranges] = {}
    for key, (file, offset, size_bytes, _) in read_index(
        checkpoint / folder, context, manifest=manifest
    ).places.items():
        if file and not key.endswith("zarr.json"):
            found.setdefault(f"{folder}/{file}", []).append((offset, size_bytes))
    return {file: sorted(ranges) for file, ranges in found.items()}


def outside_of_blocks(size_bytes: int, in_blocks: Iterable[tuple[int, int]]) -> Ranges:
    """(start, stop) of the bytes that the digest of a file of that size covers."""
    return gaps(size_bytes, in_blocks)


def crc32_of(path: str, ranges: Ranges) -> int:
    """CRC-32 of ranges of a file, each ``(start, stop)``; reads 4 MiB at a time."""
    crc = 0
    with open(os.fspath(path), "rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            while start < stop:
                try:
                    data = file.read(min(stop - start, _AT_ONCE_BYTES))
                except OSError as error:
                    name_file(error, path)
                    raise
                if not data:
                    break
                crc = zlib.crc32(data, crc)
                start += len(data)
    return crc
