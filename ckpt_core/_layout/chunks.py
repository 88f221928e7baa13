"""Chunks and blocks: an array is stored as a regular grid of chunks, and a chunk is cut into blocks of
whole rows, the unit of a checksum.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckpt_core._layout.regions import Region, Shape

BLOCK_BYTES = 4 * 1024 * 1024
"""A checksum covers about this much: a slice is verified by reading little more than the slice."""


def chunk_shape(shape: Shape, regions: Iterable[Region], itemsize: int, chunk_bytes: int) -> Shape:
    """A chunk grid in which no chunk crosses the border of a region.

    Chunks are at most ``chunk_bytes`` where a dimension can be divided: leading dimensions are cut
    first, so that a chunk stays one contiguous piece of memory of its shard.

    Args:
        shape: of the array.
        regions: the shards that are written, none overlapping another partly.
        itemsize: bytes per element.
        chunk_bytes: the largest chunk wanted.
    """
    chunk: list[int] = []
    inner_borders: list[bool] = []
    regions = list(regions)
    for axis, size in enumerate(shape):
        borders = {edge for region in regions for edge in region[axis] if 0 < edge < size}
        step = math.gcd(*borders) if borders else size
        chunk.append(max(1, step))
        inner_borders.append(bool(borders))
    for axis, crossed in enumerate(inner_borders):
        row_bytes = itemsize * math.prod(chunk[axis + 1 :])
        if chunk[axis] * row_bytes <= chunk_bytes:
            break
        limit = max(1, chunk_bytes // row_bytes)
        divisor = _largest_divisor(chunk[axis], limit)
        # a last, partial chunk costs padding: only worth it where no divisor comes near
        chunk[axis] = divisor if crossed or 2 * divisor >= limit else limit
    return tuple(chunk)


def _largest_divisor(number: int, limit: int) -> int:
    best = 1
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            for divisor in (small, number // small):
                if best < divisor <= limit:
                    best = divisor
    return best


def chunk_count(region: Region, chunk: Shape) -> int:
    """How many chunks a region touches, without listing them."""
    pairs = zip(region, chunk, strict=True)
    return math.prod(-(-stop // step) - start // step for (start, stop), step in pairs)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The overlap of one chunk with a region that is written or read.

    Attributes:
        index: of the chunk in the grid.
        in_chunk: the overlap, counted from the chunk's first element.
        in_region: the overlap, counted from the region's first element.
    """

    index: tuple[int, ...]
    in_chunk: Region
    in_region: Region


def chunk_parts(region: Region, chunk: Shape) -> Iterator[ChunkPart]:
    """The chunks that a region touches, in C order; none where it is empty."""
    if any(start >= stop for start, stop in region):
        return
    if not region:
        yield ChunkPart((), (), ())
        return
    ranges = [
        range(start // step, -(-stop // step))
        for (start, stop), step in zip(region, chunk, strict=True)
    ]
    for index in itertools.product(*ranges):
        in_chunk: list[tuple[int, int]] = []
        in_region: list[tuple[int, int]] = []
        for position, step, (start, stop) in zip(index, chunk, region, strict=True):
            first, last = max(start, position * step), min(stop, (position + 1) * step)
            in_chunk.append((first - position * step, last - position * step))
            in_region.append((first - start, last - start))
        yield ChunkPart(index, tuple(in_chunk), tuple(in_region))


@functools.lru_cache(4096)
def chunk_key(index: tuple[int, ...]) -> str:
    """Zarr3's default key of a chunk, relative to its array (zarr-specs v3, chunk key encoding)."""
    return "/".join(("c", *map(str, index)))


@functools.lru_cache(4096)
def keyed_parts(region: Region, chunk: Shape) -> tuple[tuple[str, ChunkPart], ...]:
    """The chunks that a region touches, with their keys; remembered, as many arrays are alike."""
    return tuple((chunk_key(part.index), part) for part in chunk_parts(region, chunk))


def rows_per_block(chunk: Shape, itemsize: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many rows (steps of the first dimension) one checksum covers."""
    row_bytes = itemsize * math.prod(chunk[1:])
    return max(1, block_bytes // max(1, row_bytes))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``[start, stop)`` of a chunk, and the bytes they take in it."""

    start: int
    stop: int
    offset_bytes: int
    size_bytes: int


def blocks(
    chunk: Shape,
    itemsize: int,
    *,
    rows: tuple[int, int] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> list[Block]:
    """The checksummed blocks of a chunk, or those that the rows ``[start, stop)`` touch."""
    total = chunk[0] if chunk else 1
    row_bytes = itemsize * math.prod(chunk[1:])
    step = rows_per_block(chunk, itemsize, block_bytes)
    first, last = rows if rows is not None else (0, total)
    begin = first // step * step
    return [
        Block(
            row, min(row + step, total), row * row_bytes, (min(row + step, total) - row) * row_bytes
        )
        for row in range(begin, last, step)
    ]


def covered_blocks(
    chunk: Shape, itemsize: int, *, rows: tuple[int, int], block_bytes: int = BLOCK_BYTES
) -> tuple[int, list[Block]]:
    """Number of the first block that ``rows`` touch, and those blocks."""
    step = rows_per_block(chunk, itemsize, block_bytes)
    return rows[0] // step, blocks(chunk, itemsize, rows=rows, block_bytes=block_bytes)
