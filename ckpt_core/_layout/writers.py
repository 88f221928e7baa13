"""Decides which process writes a region that several processes hold (replicas)."""

from __future__ import annotations

import heapq
import math

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


class WriterTurns:
    """Distributes replicated regions among their holders, so that all write about the same bytes.

    For each set of holders, the process with the fewest bytes so far is next, over all arrays of a
    tree. Each process asks about the regions that it holds, in the same order as the other holders,
    so all get the same answers without communication and without regard to regions that they do not
    hold.
    """

    def __init__(self) -> None:
        self._loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def writer(self, holders: tuple[int, ...], size_bytes: int) -> int:
        """The process that writes the next ``size_bytes`` of what these processes hold."""
        # Inline values do not show which process wrote them: readers use the first holder's
        # checksums.
        if len(holders) == 1 or size_bytes <= INLINE_BYTES:
            return holders[0]
        # Equal loads in index order already form a heap.
        loads = self._loads.setdefault(holders, [(0, process) for process in holders])
        load, process = loads[0]
        heapq.heapreplace(loads, (load + size_bytes, process))
        return process

    def parts(
        self, region: Region, holders: tuple[int, ...], chunk: Shape, itemsize: int, process: int
    ) -> list[Region]:
        """The parts of a region, in whole chunks, that ``process`` writes; ``[region]`` if all."""
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
