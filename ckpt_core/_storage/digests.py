"""What a digest of a data file covers: the bytes that no checksum of a block does.

A save and ``verify`` must see the same ranges, or ``verify`` would raise false alarms: both take them from here.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

from ckpt_core._layout.ranges import gaps
from ckpt_core._options import MIB
from ckpt_core._storage.index import read_index
from ckpt_core._storage.writer import Location

_AT_ONCE_BYTES = 4 * MIB

Ranges = list[tuple[int, int]]


def ranges_in_blocks(directory: str, folder: str, context: Any) -> dict[str, Ranges]:
    """(offset, size) of everything in a database that block checksums cover, by data file.

    Args:
        directory: of the checkpoint, in a file system.
        folder: of the database in it; files are named relative to the checkpoint.
        context: of the save or load.

    Raises:
        CheckpointCorrupt: the index cannot be read.
    """
    found: dict[str, Ranges] = {}
    for key, extent in read_index(Location(f"{directory}/{folder}", True), context).items():
        if extent.file and not key.endswith("zarr.json"):
            ranges = found.setdefault(f"{folder}/{extent.file}", [])
            ranges.append((extent.offset, extent.size_bytes))
    return found


def outside_of_blocks(size_bytes: int, in_blocks: Iterable[tuple[int, int]]) -> Ranges:
    """(start, stop) of what a digest covers of a file of that size."""
    return gaps(size_bytes, in_blocks)


def crc32_of(path: str, ranges: Ranges) -> int:
    """The digest of parts of a file, each ``(start, stop)``, which may be of any length."""
    crc = 0
    with open(os.fspath(path), "rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(start)
            while start < stop and (data := file.read(min(stop - start, _AT_ONCE_BYTES))):
                crc = zlib.crc32(data, crc)
                start += len(data)
    return crc
