"""What changed between two values of an array, bit by bit: found, packed, and put in place. Pure.

An array is seen as its *cells*: unsigned integers of one, two or four bytes, flat and in C order. The data of a change has a bit
for each cell, set if it changed, and then what to xor these cells with, byte plane by byte plane.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from ckpt_core._format.untrusted import decompress, parse_json
from ckpt_core._layout.regions import Region

Array = np.ndarray[Any, Any]
_HEADER_BYTES = 64 * 1024 * 1024


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
    changed = bits != 0
    planes = bits[changed].view(np.uint8).reshape(-1, bits.itemsize).T
    return np.packbits(changed).tobytes() + planes.tobytes() if planes.size else b""


def apply(data: Array, found: Array) -> None:
    """Changes cells. Data that no ``difference`` gives raises ValueError or IndexError, or makes values of another CRC."""
    bitmap, planes = np.split(data, [-(-found.size // 8)])
    changed = np.flatnonzero(np.unpackbits(bitmap, count=found.size).view(bool))
    bits = np.ascontiguousarray(planes.reshape(found.itemsize, -1).T)
    found[changed] ^= bits.view(found.dtype).reshape(-1)


def pack(changes: Sequence[Change], data: Sequence[bytes]) -> bytes:
    """The content of a part: these changes and their data, in one order."""
    header = json.dumps(changes, separators=(",", ":")).encode()
    raw = b"".join((len(header).to_bytes(8, "little"), header, *data))
    return zstandard.ZstdCompressor(level=1).compress(raw)


def unpack(part: bytes, file: str, state_bytes: int) -> list[tuple[Change, Array]]:
    """The changes of a part, each with its data. ValueError for what is no part, or takes more than any change of a state of
    ``state_bytes``.
    """
    raw = decompress(part, 2 * state_bytes + _HEADER_BYTES)
    start = 8 + int.from_bytes(raw[:8], "little")
    data, found = np.frombuffer(raw, np.uint8)[start:], list[tuple[Change, Array]]()
    for item, leaf, region, size_bytes, crc in parse_json(raw[8:start], file):
        change = Change(item, leaf, tuple(map(tuple, region)), size_bytes, crc)
        found.append((change, data[:size_bytes]))
        data = data[size_bytes:]
    return found
