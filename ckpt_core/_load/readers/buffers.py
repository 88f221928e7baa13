"""The memory that regions of arrays are read into, and what of a chunk goes where in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._layout.chunks import Block, ChunkPart
from ckpt_core._layout.regions import region_slices
from ckpt_core._load.readers.wants import Array

_ALIGNMENT = 64
"""jax on CPU takes over host memory that begins at such an address, and copies any other."""


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array that jax can take over; numpy alone gives addresses of 16."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class BufferPart:
    """What of a chunk goes into the buffer of a region.

    Attributes:
        part: the overlap of the two.
        out: the buffer.
    """

    part: ChunkPart
    out: Array

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of the chunk."""
        return self.part.in_chunk[0] if self.part.in_chunk else (0, 1)

    def memory(self, block: Block, chunk: tuple[int, ...]) -> Array | None:
        """The bytes of the buffer into which a block can be read as it is; None where it cannot."""
        part, out = self.part, self.out
        if not part.in_region:
            return out.reshape(-1).view(np.uint8)
        first, last = self.rows
        whole_rows = region_slices(part.in_chunk[1:]) == tuple(slice(0, size) for size in chunk[1:])
        if not (whole_rows and out.shape[1:] == chunk[1:]):
            return None
        if block.start < first or block.stop > last:
            return None
        base = part.in_region[0][0] - first
        return out[base + block.start : base + block.stop].reshape(-1).view(np.uint8)

    def whole_chunk(self, chunk: tuple[int, ...]) -> Array | None:
        """The part of the buffer that is a chunk as it is stored; None where there is none."""
        # with the ellipsis, what a scalar gives is a view as well
        place = self.out[(*region_slices(self.part.in_region), ...)]
        return place if place.shape == chunk and place.flags.c_contiguous else None

    def take(self, block: Block, values: Array) -> None:
        """Copies its share of a block's values; the buffer may be of another dtype."""
        part, out = self.part, self.out
        if not part.in_region:
            out[...] = values[0]
            return
        first, last = self.rows
        start, stop = max(block.start, first), min(block.stop, last)
        base = part.in_region[0][0] - first
        taken = values[
            (slice(start - block.start, stop - block.start), *region_slices(part.in_chunk[1:]))
        ]
        out[(slice(base + start, base + stop), *region_slices(part.in_region[1:]))] = taken

    def take_chunk(self, values: Array) -> None:
        """Copies its share of a whole chunk's values."""
        self.out[region_slices(self.part.in_region)] = values[region_slices(self.part.in_chunk)]


def sole_taker(shares: Sequence[BufferPart], dtype: np.dtype[Any]) -> BufferPart | None:
    """The one region that takes values as they are stored; None where they have to be copied."""
    return shares[0] if len(shares) == 1 and shares[0].out.dtype == dtype else None
