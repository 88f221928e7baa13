"""What changed between two values of an array, bit by bit: found, packed, and put in place. Pure.

An array is seen as its *cells*: unsigned integers of one, two or four bytes, flat and in C order. The data of a change has a byte
that says how it lists cells: 0 for a byte with the number of skipped cells before each, 1 for a bit of each cell of the array.
That list is next, and then what to xor the listed cells with, byte plane by byte plane.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from ckpt_core._format.untrusted import decompress, parse_json
from ckpt_core._layout.regions import Region

Array = np.ndarray[Any, Any]
_STRIDE = 256
"""One of so many cells is listed even if it is equal, so that a byte holds the number of skipped ones."""


class Change(NamedTuple):
    """What changed in one region of a leaf."""

    item: str
    leaf: int  # position in the item
    region: Region
    size_bytes: int  # of its data
    crc: int  # CRC-32C of the whole region, after the change


def cells(array: Array) -> Array:
    """The cells of an array; a view if it is contiguous."""
    unit = np.dtype(f"u{min(array.dtype.itemsize, 4)}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(unit)


def difference(before: Array, after: Array) -> bytes:
    """The data of the change from some cells to others; empty if all are equal."""
    bits = before ^ after
    listed = bits != 0
    if not listed.any():
        return b""
    is_dense = 8 * int(np.count_nonzero(listed)) > listed.size
    if is_dense:
        where, changed = np.packbits(listed), bits[listed]
    else:
        listed[_STRIDE - 1 :: _STRIDE] = True
        at = np.flatnonzero(listed)
        where, changed = (np.diff(at, prepend=-1) - 1).astype(np.uint8), bits[at]
    planes = changed.view(np.uint8).reshape(-1, bits.itemsize).T
    return b"".join((bytes([is_dense]), where.tobytes(), planes.tobytes()))


def apply(data: Array, found: Array) -> None:
    """Changes cells. Data that no ``difference`` gives raises ValueError or IndexError, or makes values of another CRC."""
    if data[0]:
        bitmap, planes = np.split(data[1:], [-(-found.size // 8)])
        at = np.flatnonzero(np.unpackbits(bitmap, count=found.size).view(bool))
        planes = planes.reshape(found.itemsize, -1)
    else:
        skipped, *planes = data[1:].reshape(1 + found.itemsize, -1)
        at = np.cumsum(skipped, dtype=np.int64) + np.arange(skipped.size)
    bits = np.ascontiguousarray(np.transpose(planes))
    found[at] ^= bits.view(found.dtype).reshape(-1)


def pack(changes: Sequence[Change], data: Iterable[bytes]) -> bytes:
    """The content of a delta file: these changes and their data, in one order."""
    header = json.dumps(changes, separators=(",", ":")).encode()
    raw = b"".join((len(header).to_bytes(8, "little"), header, *data))
    return zstandard.ZstdCompressor(level=1).compress(raw)


def unpack(file: str, packed: bytes, most_bytes: int) -> Iterator[tuple[Change, Array]]:
    """The changes in a delta file, each with its data. ValueError for what is none, or unpacks to more than ``most_bytes``."""
    raw = decompress(packed, most_bytes)
    start = 8 + int.from_bytes(raw[:8], "little")
    data = np.frombuffer(raw, np.uint8)[start:]
    for item, leaf, region, size_bytes, crc in parse_json(raw[8:start], file):
        yield Change(item, leaf, tuple(map(tuple, region)), size_bytes, crc), data[:size_bytes]
        data = data[size_bytes:]
