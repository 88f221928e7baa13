"""Digests of data files, which cover the bytes outside of all checksummed blocks.

A save and ``verify`` both get the ranges here: with different ones, ``verify`` would report false
damage.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

from ckpt_core._errors import name_file
from ckpt_core._layout.ranges import gaps
from ckpt_core._options import MIB
from ckpt_core._storage._tensorstore import StoreContext
from ckpt_core._storage.database import Index, read_index
from ckpt_core._storage.location import Location

_AT_ONCE_BYTES = 4 * MIB

Ranges = list[tuple[int, int]]
StoredValues = list[tuple[int, int, str]]
"""(offset, size, key) of values in a data file, ascending."""


def values_in_files(index: Index) -> dict[str, StoredValues]:
    """Data file -> the values in it."""
    found: dict[str, StoredValues] = {}
    for key, (file, offset, size_bytes, _) in index.places.items():
        if file:
            found.setdefault(file, []).append((offset, size_bytes, key))
    for values in found.values():
        values.sort()
    return found


def ranges_in_blocks(
    checkpoint: Location, folder: str, context: StoreContext, manifest: bytes | None = None
) -> dict[str, Ranges]:
    """Data file, relative to the checkpoint -> (offset, size) of everything in it that block checksums cover,
    for the database in ``folder``; ``manifest`` is the content of its manifest, if the caller has read that.
    """
    index = read_index(checkpoint / folder, context, manifest=manifest)
    return {
        f"{folder}/{file}": [(offset, size) for offset, size, key in values if not is_metadata(key)]
        for file, values in values_in_files(index).items()
    }


def is_metadata(key: str) -> bool:
    """Whether a key is that of an array's metadata, which no block checksum covers."""
    return key.endswith("zarr.json")


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
