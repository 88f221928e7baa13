"""Decides which process writes a region that several processes hold (replicas)."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from ckpt_core._layout.chunks import chunk_parts
from ckpt_core._layout.regions import Region, Shape, region_shape

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
