"""Buffers that regions of arrays are read into, and which part of a chunk goes where in them."""

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
"""Bytes. On CPU, jax uses host memory without a copy only if its address is a multiple of this."""


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array that jax on CPU can use without a copy: numpy aligns to 16 bytes.

    Raises:
        MemoryError: there is no memory for it, which says nothing of what was to be read into it.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
    except ValueError:  # more bytes than addresses
        raise MemoryError(f"no memory for {size} bytes: {dtype.name}{list(shape)}") from None
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class BufferPart:
    """The part of a chunk that goes into the buffer of one region.

    Attributes:
        part: the overlap of chunk and region.
        out: the buffer, of the region's shape.
    """

    part: ChunkPart
    out: Array

    @property
    def rows(self) -> tuple[int, int]:
        """First and last (exclusive) row of the chunk in the overlap."""
        return self.part.in_chunk[0] if self.part.in_chunk else (0, 1)

    def memory(self, block: Block, chunk: tuple[int, ...]) -> Array | None:
        """The bytes of the buffer that a block can be read into; None if it must be copied.

        Args:
            block: whole rows of the chunk, with one checksum.
            chunk: shape of the chunk.
        """
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
        """The contiguous part of the buffer that is exactly the chunk; None if there is none."""
        # the ellipsis makes a view of a scalar, too
        place = self.out[(*region_slices(self.part.in_region), ...)]
        return place if place.shape == chunk and place.flags.c_contiguous else None

    def take(self, block: Block, values: Array) -> None:
        """Copies the rows of a block that belong to the region, cast to the buffer's dtype."""
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
        """Copies the part of a whole chunk that belongs to the region, cast as needed."""
        self.out[region_slices(self.part.in_region)] = values[region_slices(self.part.in_chunk)]


def sole_taker(shares: Sequence[BufferPart], dtype: np.dtype[Any]) -> BufferPart | None:
    """The only part, if its buffer has the stored dtype; None if values must be copied or cast."""
    return shares[0] if len(shares) == 1 and shares[0].out.dtype == dtype else None
