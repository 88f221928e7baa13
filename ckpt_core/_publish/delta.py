"""What changed between two values of an array, bit by bit: found, packed, put in place, and proved. Pure.

An array is seen as its *cells*: unsigned integers of one, two or four bytes, flat and in C order. A block of cells has the
gaps between those that changed, one byte each, and what to xor them with, byte plane by byte plane. Where many changed, it has
the xor of all cells. zstd takes out of both what is left.

The digest of an array is a sum, modulo 2^64, of its words of four bytes with odd weights. So the change of a few cells
changes it by a sum over these alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from ckpt_core._format.untrusted import decompress, parse_json
from ckpt_core._layout.regions import Region, region_shape, whole

Array = np.ndarray[Any, Any]
MASK = 2**64 - 1
_BLOCK = 1 << 22
"""Cells that are worked on at a time; a multiple of the words of a row."""
_DENSE = 3
"""A block of which more than one in so many cells changed is stored as a whole."""
_LONG = 255
"""As a gap: so many cells did not change, and no changed one follows."""
_ROW = 1 << 14
_ROWS = 64
_WEIGHTS = np.random.PCG64(20240607).random_raw(_ROW) | np.uint64(1)
_HEADER_BYTES = 64 * 1024 * 1024


class Change(NamedTuple):
    """What changed in one region of a leaf."""

    item: str
    leaf: int  # position in the item
    region: Region
    blocks: Sequence[tuple[int, int]]  # of each the bytes of gaps, 0 if it is whole; and the cells
    digest: int  # of the whole region, after the change

    def size_bytes(self, cell_bytes: int) -> int:
        """How much the change takes in the data of its part."""
        return sum(gaps + count * cell_bytes for gaps, count in self.blocks)


def cells(array: Array) -> Array:
    """The cells of an array; a view if it is contiguous."""
    size = array.dtype.itemsize
    unit = np.dtype(f"u{size if size < 4 else 4}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(unit)


def digest(found: Array, first: int = 0) -> int:
    """The digest of these cells, which begin at position ``first``, a multiple of ``_BLOCK``."""
    data, total = found.view(np.uint8), 0
    row = first * found.itemsize // (4 * _ROW)
    for start in range(0, data.size, 4 * _ROW * _ROWS):
        part = data[start : start + 4 * _ROW * _ROWS]
        if rest := -part.size % (4 * _ROW):
            part = np.pad(part, (0, rest))
        words = part.view(np.uint32).reshape(-1, _ROW).astype(np.uint64)
        rows = np.arange(row, row + len(words))
        total += int(((words @ _WEIGHTS) * _of_rows(rows)).sum())
        row += len(words)
    return total & MASK


def _of_rows(rows: Array) -> Array:
    """The odd factor of each row of words."""
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return (mixed * np.uint64(0xBF58476D1CE4E5B9)) | np.uint64(1)


def _moved(at: Array, before: Array, after: Array) -> int:
    """By how much the digest changes if the cells at these positions do."""
    place = at * before.itemsize
    words, shift = place >> 2, ((place & 3) << 3).astype(np.uint64)
    by = (after.astype(np.uint64) - before.astype(np.uint64)) << shift
    return int((by * _WEIGHTS[words & (_ROW - 1)] * _of_rows(words // _ROW)).sum())


def encode(before: Array, after: Array) -> tuple[list[tuple[int, int]], list[bytes], int]:
    """Blocks and data of the change from one value's cells to another's, and by how much the digest changes; no data if they are equal."""
    blocks, data, moved = list[tuple[int, int]](), list[bytes](), 0
    for first in range(0, before.size, _BLOCK):
        old, new = before[first : first + _BLOCK], after[first : first + _BLOCK]
        bits = old ^ new
        at = np.flatnonzero(bits)
        if at.size * _DENSE > bits.size:
            blocks.append((0, bits.size))
            moved += digest(new, first) - digest(old, first)
        else:
            bits, gaps = bits[at], _gaps(at)
            blocks.append((gaps.size, at.size))
            moved += _moved(at + first, old[at], new[at])
            data.append(gaps.tobytes())
        data.append(
            np.ascontiguousarray(bits.view(np.uint8).reshape(-1, bits.itemsize).T).tobytes()
        )
    return blocks, data if any(map(len, data)) else [], moved


def _gaps(at: Array) -> Array:
    gaps = np.diff(at, prepend=-1) - 1
    longs = gaps // _LONG
    found = np.full(at.size + int(longs.sum()), _LONG, np.uint8)
    found[np.cumsum(longs + 1) - 1] = gaps % _LONG
    return found


def apply(change: Change, data: Array, flat: Array, shape: tuple[int, ...]) -> int:
    """Xors the change into the cells of an array of this shape; returns by how much the digest of the region changes. ValueError for
    a change that no ``encode`` made, after which the array may hold a part of it.
    """
    size = flat.itemsize
    inside = region_shape(change.region)
    per_value = flat.size // max(1, int(np.prod(shape)))  # cells of one value
    left, moved = int(np.prod(inside)) * per_value, 0
    place = _placing(change.region, shape, per_value)
    if len(change.blocks) != -(-left // _BLOCK):
        raise ValueError(f"it has {len(change.blocks)} blocks for {left} cells")
    for first, (gaps, count) in zip(range(0, left, _BLOCK), change.blocks, strict=True):
        most = min(_BLOCK, left - first)
        at = np.arange(most) if gaps == 0 and count else _positions(data[:gaps])
        if at.size != count or at.size > most or (count and at[-1] >= most):
            raise ValueError(f"a block has {at.size} changed cells for {count} of {most}")
        bits = np.ascontiguousarray(data[gaps : gaps + count * size].reshape(size, count).T)
        data = data[gaps + count * size :]
        target = place(at + first)
        old = flat[target]
        new = old ^ bits.view(flat.dtype).reshape(-1)
        flat[target] = new
        moved += _moved(at + first, old, new)
    return moved


def _positions(gaps: Array) -> Array:
    """The positions that ``_gaps`` was given."""
    changed = gaps != _LONG
    return (np.cumsum(gaps + changed.astype(np.int64)) - 1)[changed]


def _placing(region: Region, shape: tuple[int, ...], per_value: int) -> Callable[[Array], Array]:
    """From positions of cells in a region to those in the whole array."""
    if region == whole(shape):
        return lambda at: at
    inside = (*region_shape(region), per_value)

    def place(at: Array) -> Array:
        found = np.unravel_index(at, inside)
        moved = [axis + start for axis, (start, _) in zip(found, region, strict=False)]
        return np.ravel_multi_index((*moved, found[-1]), (*shape, per_value))

    return place


def pack(changes: Sequence[Change], data: Sequence[bytes]) -> bytes:
    """The content of a part: these changes and their data, in one order."""
    header = json.dumps(changes, separators=(",", ":")).encode()
    raw = b"".join((len(header).to_bytes(8, "little"), header, *data))
    return zstandard.ZstdCompressor(level=1).compress(raw)


def unpack(part: bytes, file: str, state_bytes: int) -> tuple[list[Change], Array]:
    """What ``pack`` was given, the data as one array of bytes. ``state_bytes`` bounds them: no change takes more than twice the state.
    Raises ValueError for what is too long, or no part.
    """
    raw = decompress(part, 2 * state_bytes + _HEADER_BYTES)
    stop = 8 + int.from_bytes(raw[:8], "little")
    if stop > min(len(raw), _HEADER_BYTES):
        raise ValueError("its header is longer than the part")
    made = [
        Change(
            str(item),
            int(leaf),
            tuple((int(start), int(end)) for start, end in region),
            [(int(gaps), int(count)) for gaps, count in blocks],
            int(after),
        )
        for item, leaf, region, blocks, after in parse_json(raw[8:stop], file)
    ]
    if any(min(0, *block) for one in made for block in one.blocks):
        raise ValueError("a block has a negative size")
    return made, np.frombuffer(raw, np.uint8)[stop:]
