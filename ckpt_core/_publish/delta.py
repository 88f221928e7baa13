"""What changed between two values of an array, bit by bit: found, packed, put in place, and proved. Pure.

An array is seen as its *cells*: unsigned integers of one, two or four bytes, flat and in C order. A block of cells has the gaps
between those that changed, one byte each, and what to xor them with, byte plane by byte plane; where many changed, the xor of
all. zstd takes out of both what is left. The digest of cells is the sum, modulo 2^64, of their words of four bytes with odd
weights: a few changed cells change it by a sum over these alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from ckpt_core._format.untrusted import decompress, parse_json
from ckpt_core._layout.regions import Region, region_shape, region_size, whole

Array = np.ndarray[Any, Any]
Block = tuple[int, int]
"""Bytes of gaps, 0 if the block has the xor of all its cells; and number of cells."""
MASK = 2**64 - 1
_BLOCK = 1 << 20
_DENSE = 3
"""Of a block in which more than one of so many cells changed, all are stored."""
_LONG = 255
"""As a gap: so many cells did not change, and no changed one follows."""
_HEADER_BYTES = 64 * 1024 * 1024


class Change(NamedTuple):
    """What changed in one region of a leaf."""

    item: str
    leaf: int  # position in the item
    region: Region
    blocks: Sequence[Block]
    digest: int  # of the whole region, after the change
    size_bytes: int  # of its data


def cells(array: Array) -> Array:
    """The cells of an array; a view if it is contiguous."""
    unit = np.dtype(f"u{min(array.dtype.itemsize, 4)}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(unit)


def digest(found: Array, first: int = 0) -> int:
    """The digest of cells, of which the first one begins word ``first``."""
    data, total = found.view(np.uint8), 0
    for start in range(0, data.size, _BLOCK):
        part = data[start : start + _BLOCK]
        words = (np.pad(part, (0, -part.size % 4)) if part.size % 4 else part).view(np.uint32)
        total += int((words * _weights(np.arange(words.size) + (first + start // 4))).sum())
    return total & MASK


def _weights(words: Array) -> Array:
    mixed = words.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed | np.uint64(1)


def _moved(at: Array, old: Array, new: Array, first: int) -> int:
    """By how much the digest changes if these cells of a block do, which begins at cell ``first``."""
    if at.size == old.size == at[-1] + 1:
        word = first * old.itemsize // 4
        return digest(new, word) - digest(old, word)
    place = (at + first) * old.itemsize
    by = new.astype(np.uint64) - old.astype(np.uint64)
    if old.itemsize < 4:
        by <<= ((place & 3) << 3).astype(np.uint64)
    return int((by * _weights(place >> 2)).sum())


def encode(before: Array, after: Array) -> tuple[list[Block], list[bytes], int]:
    """Blocks and data of what changed between two values' cells, and by how much the digest did; no data if nothing changed."""
    blocks, data, moved = list[Block](), list[bytes](), 0
    for first in range(0, before.size, _BLOCK):
        old, new = before[first : first + _BLOCK], after[first : first + _BLOCK]
        bits = old ^ new
        at, gaps = np.flatnonzero(bits), np.empty(0, np.uint8)
        if at.size * _DENSE > bits.size:
            at = np.arange(bits.size)
        elif at.size:
            gaps = np.diff(at, prepend=-1) - 1
            ends = np.cumsum(gaps // _LONG + 1)
            gaps, rest = np.full(ends[-1], _LONG, np.uint8), gaps % _LONG
            gaps[ends - 1] = rest
        blocks.append((gaps.size, at.size))
        if at.size:
            moved += _moved(at, old[at], new[at], first)
            planes = bits[at].view(np.uint8).reshape(-1, bits.itemsize).T
            data += [gaps.tobytes(), planes.tobytes()]
    return blocks, data, moved


def apply(change: Change, data: Array, array: Array) -> int:
    """Xors a change into an array; returns by how much the digest of the region changes. ValueError for a change that no ``encode``
    made, after which the array may hold a part of it.
    """
    flat, moved = cells(array), 0
    per_value = array.dtype.itemsize // flat.itemsize
    size, is_whole = region_size(change.region) * per_value, change.region == whole(array.shape)
    if len(change.blocks) != -(-size // _BLOCK):
        raise ValueError(f"it has {len(change.blocks)} blocks for {size} cells")
    for first, (gaps, count) in zip(range(0, size, _BLOCK), change.blocks, strict=True):
        most, stop = min(_BLOCK, size - first), gaps + count * flat.itemsize
        at = np.arange(most) if count and not gaps else _positions(data[:gaps])
        if at.size != count or stop > data.size or (count and at[-1] >= most):
            raise ValueError(f"it has a block of {at.size} changed cells for {count} of {most}")
        if count:
            planes = data[gaps:stop].reshape(flat.itemsize, count).T
            bits = np.ascontiguousarray(planes).view(flat.dtype).reshape(-1)
            place: Any = slice(first, first + most) if is_whole and not gaps else at + first
            if not is_whole:
                place = _in_array(place, change.region, array.shape, per_value)
            old = flat[place]
            new = old ^ bits
            moved += _moved(at, old, new, first)
            flat[place] = new
        data = data[stop:]
    return moved


def _positions(gaps: Array) -> Array:
    """Which cells changed."""
    changed = gaps != _LONG
    return np.cumsum(gaps + changed, dtype=np.int64)[changed] - 1


def _in_array(at: Array, region: Region, shape: tuple[int, ...], per_value: int) -> Array:
    """From positions of cells in a region to those in the whole array."""
    found = np.unravel_index(at, (*region_shape(region), per_value))
    moved = [axis + start for axis, (start, _) in zip(found, region, strict=False)]
    return np.ravel_multi_index((*moved, found[-1]), (*shape, per_value))


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
    for item, leaf, region, blocks, after, size in parse_json(raw[8:start], file):
        change = Change(item, leaf, tuple(map(tuple, region)), blocks, after, size)
        found.append((change, data[:size]))
        data = data[size:]
    return found
