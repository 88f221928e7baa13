"""Which process writes what several of them hold."""

from __future__ import annotations

import heapq
import math

from ckpt_core._layout.chunks import chunk_parts
from ckpt_core._layout.regions import Region, Shape, region_shape

INLINE_BYTES = 100
"""Values up to this size stand in the index itself: it stays small, and a scalar is no file's end."""

_SHARE_BYTES = 4 * 1024 * 1024
"""Regions up to this size are written whole by one of their holders."""


def shared_chunk_bytes(region_bytes: int, holders: int, chunk_bytes: int) -> int:
    """The largest chunk of a region that several processes hold: each may write its part of it."""
    if holders == 1:
        return chunk_bytes
    return min(chunk_bytes, max(_SHARE_BYTES, -(-region_bytes // holders)))


class WriterTurns:
    """Which of its holders writes each region or part of one, so that all write about the same.

    Processes that hold the same regions take turns by bytes, over all arrays of a tree. Each asks
    for the regions that it holds itself, in the same order as the others that hold them: they come
    to the same answers without talking, and without looking at what they do not hold.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def writer(self, holders: tuple[int, ...], size_bytes: int) -> int:
        """The process that writes the next ``size_bytes`` of what these processes hold."""
        # what stands in the index does not tell who wrote it: readers look at the first one's checksums
        if len(holders) == 1 or size_bytes <= INLINE_BYTES:
            return holders[0]
        # in index order this is a heap already
        loads = self._loads.setdefault(holders, [(0, process) for process in holders])
        load, process = loads[0]
        heapq.heapreplace(loads, (load + size_bytes, process))
        return process

    def parts(
        self, region: Region, holders: tuple[int, ...], chunk: Shape, itemsize: int, process: int
    ) -> list[Region]:
        """What of a region ``process`` writes, in whole chunks."""
        if len(holders) == 1:
            return [region] if holders[0] == process else []
        found: list[Region] = []
        whole_region = True
        for part in chunk_parts(region, chunk):
            size_bytes = itemsize * math.prod(region_shape(part.in_region))
            if self.writer(holders, size_bytes) != process:
                whole_region = False
                continue
            corner = zip(part.in_region, region, strict=True)
            found.append(tuple((a + start, b + start) for (a, b), (start, _) in corner))
        return [region] if found and whole_region else found
