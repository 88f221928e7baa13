"""Chunks and blocks: an array is stored as a regular grid of chunks; each chunk is divided into
blocks of whole rows, each with its own checksum. Of a region that several processes hold (replicas), one
writes each chunk.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_core._layout.regions import Region, Shape, region_shape

BLOCK_BYTES = 4 * 1024 * 1024
"""Approximate size of a block: small, so that a verified read of a slice reads little more."""


def chunk_shape(shape: Shape, regions: Iterable[Region], itemsize: int, chunk_bytes: int) -> Shape:
    """The shape of chunks that cross no border of a region (a shard), and have at most ``chunk_bytes`` if the dimensions
    can be divided so. Leading dimensions are divided first, so that a chunk is contiguous in the memory of its shard.
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
        # A partial last chunk needs padding: accept it only if the best divisor is below limit / 2.
        chunk[axis] = divisor if crossed or 2 * divisor >= limit else limit
    return tuple(chunk)


def _largest_divisor(number: int, limit: int) -> int:
    small = (divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0)
    return max(n for divisor in small for n in (divisor, number // divisor) if n <= limit)


def chunk_count(region: Region, chunk: Shape) -> int:
    """The number of chunks that overlap a region, computed without listing them."""
    pairs = zip(region, chunk, strict=True)
    return math.prod(-(-stop // step) - start // step for (start, stop), step in pairs)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The overlap of one chunk with a region that is written or read."""

    index: tuple[int, ...]  # of the chunk in the grid
    in_chunk: Region  # relative to the chunk's first element
    in_region: Region  # relative to the region's first element


def chunk_parts(region: Region, chunk: Shape) -> Iterator[ChunkPart]:
    """The chunks that overlap a region, in C order; none if the region is empty."""
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
    """Zarr v3's default key of a chunk, relative to its array: ``(0, 1)`` gives ``c/0/1``."""
    return "/".join(("c", *map(str, index)))


_KEY = re.compile(r"(?:(.*)/)?c((?:/\d{1,19})*)", re.DOTALL)


def chunk_of_key(key: str) -> tuple[str, tuple[int, ...]]:
    """Name of the array and index of the chunk, of a chunk's key in the array database; ValueError for any other key."""
    found = _KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is no key of a chunk")
    return found[1] or "", tuple(map(int, found[2].split("/")[1:]))


@functools.lru_cache(4096)
def keyed_parts(region: Region, chunk: Shape) -> tuple[tuple[str, ChunkPart], ...]:
    """The chunks that overlap a region, with their keys; cached, since many arrays are alike."""
    return tuple((chunk_key(part.index), part) for part in chunk_parts(region, chunk))


def rows_per_block(chunk: Shape, itemsize: int, block_bytes: int = BLOCK_BYTES) -> int:
    """The number of rows (indices of the first dimension) in a block."""
    row_bytes = itemsize * math.prod(chunk[1:])
    return max(1, block_bytes // max(1, row_bytes))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``[start, stop)`` of a chunk, with their byte offset and size in it."""

    number: int  # of the block in its chunk
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
    """The blocks of a chunk, or only those that overlap rows ``[start, stop)``."""
    total = chunk[0] if chunk else 1
    row_bytes = itemsize * math.prod(chunk[1:])
    step = rows_per_block(chunk, itemsize, block_bytes)
    first, last = rows if rows is not None else (0, total)
    starts = range(first // step * step, last, step)
    stops = [min(start + step, total) for start in starts]
    return [
        Block(start // step, start, stop, start * row_bytes, (stop - start) * row_bytes)
        for start, stop in zip(starts, stops, strict=True)
    ]


INLINE_BYTES = 100
"""Values up to this size are stored in the index: it stays small, and scalars need no data file."""

_SHARE_BYTES = 4 * 1024 * 1024
"""Regions up to this size are written by a single process and not divided between holders."""


def shared_chunk_bytes(region_bytes: int, holders: int, chunk_bytes: int) -> int:
    """The maximum chunk size for a region with several holders: each can then write a part."""
    if holders == 1:
        return chunk_bytes
    return min(chunk_bytes, max(_SHARE_BYTES, -(-region_bytes // holders)))


class CutRegion(NamedTuple):
    """A region that a process holds, cut along the chunks of its array."""

    region: Region
    holders: tuple[int, ...]  # the processes that hold it
    parts: tuple[tuple[Region, int], ...]  # of each chunk, with bytes; none for a single holder
    size_bytes: int


def cut_region(region: Region, holders: tuple[int, ...], chunk: Shape, itemsize: int) -> CutRegion:
    """The region, cut along chunks of this shape."""
    parts: list[tuple[Region, int]] = []
    for part in chunk_parts(region, chunk) if len(holders) > 1 else ():
        corner = zip(part.in_region, region, strict=True)
        place = tuple((a + start, b + start) for (a, b), (start, _) in corner)
        parts.append((place, itemsize * math.prod(region_shape(part.in_region))))
    size_bytes = itemsize * math.prod(region_shape(region))
    return CutRegion(region, holders, tuple(parts), size_bytes)


class WriterTurns:
    """Distributes replicated regions among their holders: the one with the fewest bytes so far is next. All ask in the same
    order, so all get the same answers without communication.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def writer(self, holders: tuple[int, ...], size_bytes: int) -> int:
        """The process that writes the next ``size_bytes`` of what these processes hold."""
        # Inline values do not show which process wrote them: readers use the first holder's
        # checksums.
        if len(holders) == 1 or size_bytes <= INLINE_BYTES:
            return holders[0]
        if holders not in self._loads:  # equal loads in index order already form a heap
            self._loads[holders] = [(0, process) for process in holders]
        loads = self._loads[holders]
        load, process = loads[0]
        heapq.heapreplace(loads, (load + size_bytes, process))
        return process

    def regions(self, cut: CutRegion, process: int) -> tuple[tuple[Region, ...], int]:
        """The parts of a region, in whole chunks, that ``process`` writes, and their bytes; the region itself if all."""
        if len(cut.holders) == 1:
            return ((cut.region,), cut.size_bytes) if cut.holders[0] == process else ((), 0)
        found: list[Region] = []
        found_bytes = 0
        for region, size_bytes in cut.parts:
            if self.writer(cut.holders, size_bytes) == process:
                found.append(region)
                found_bytes += size_bytes
        all_of_it = len(found) == len(cut.parts) > 0
        return ((cut.region,) if all_of_it else tuple(found)), found_bytes
