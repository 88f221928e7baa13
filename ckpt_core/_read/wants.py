"""What a load wants of stored arrays, and the memory that is filled with it."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._layout.regions import Region, region_shape, region_size, region_slices, whole
from ckpt_core._options import MIB
from ckpt_core._tree.leaves import LeafSpec

_ALIGNMENT = 64
"""Bytes. On CPU, jax uses host memory without a copy only if its address is a multiple of this."""
PIECE_BYTES = 8 * MIB
"""The most that one job reads of what has no checksum, and what a reader thread may hold beside the arrays."""

Array = np.ndarray[Any, Any]

Parts = dict[Region, Array]
"""What is read of one leaf, by region of the stored array."""


class Want(NamedTuple):
    """One leaf to read, and what it becomes."""

    leaf: int  # its position in the item
    regions: list[Region]  # of the stored array, that this process reads
    mapped: bool = False  # the file may be memory-mapped: a jax array must share no memory with one
    sharding: Any = None  # of the loaded array; None: on the host or uncommitted
    # The reader may cast to it block by block, so that memory never holds both; or it returns the stored dtype.
    dtype: np.dtype[Any] | None = None
    spec: LeafSpec | None = None  # of the result; None: as it is stored


Reading = Callable[..., Generator[tuple[Want, Parts]]]
"""A function that reads leaves, in order; arguments as for ``pipeline.read_leaves``, and closed like it."""

Job = Callable[[], None]

Reads = tuple[list[tuple[Want, Parts]], list[Job]]
"""For each leaf its buffers by region; and the jobs that fill the buffers, several of which one job may fill."""

Share = tuple[Region, Array]
"""A part of what is read, and the view of a buffer that takes it."""


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An empty array that jax on CPU uses without a copy: numpy aligns to 16 bytes. MemoryError if there is no room."""
    size = math.prod(shape) * dtype.itemsize
    if size > sys.maxsize - _ALIGNMENT:  # more than addresses: numpy would raise ValueError
        raise MemoryError(f"no memory for {size} bytes: {dtype.name}{list(shape)}")
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


def buffers(want: Want, dtype: np.dtype[Any]) -> Parts:
    """Memory for each region of a leaf, of its dtype or that to which it is cast."""
    return {region: aligned(region_shape(region), want.dtype or dtype) for region in want.regions}


class ReadsOf(NamedTuple):
    """How an array is read."""

    read: Callable[[int, Array], None]  # from a position into memory given as bytes
    dtype: np.dtype[Any]
    # Wanted bytes at most this far apart are read at once; None: all is read, to be verified.
    gap_bytes: int | None = None


def fill(reads: ReadsOf, offset: int, shape: tuple[int, ...], shares: Sequence[Share]) -> None:
    """Reads what the shares need of the part at ``offset``: all at once, or row by row if too much would be read for nothing."""
    if is_all(shares, shape, reads.dtype):
        reads.read(offset, shares[0][1].reshape(-1).view(np.uint8))
        return
    dense = sum(region_size(part) for part, _ in shares) >= math.prod(shape)
    if reads.gap_bytes is not None and not dense:
        row_bytes = reads.dtype.itemsize * math.prod(shape[1:])
        if len(shape) == 1:
            for ((first, stop),), view in shares:
                size = stop - first
                fill(reads, offset + first * row_bytes, (size,), [(((0, size),), view)])
            return
        if row_bytes > reads.gap_bytes:
            first = min(part[0][0] for part, _ in shares)
            for row in range(first, max(part[0][1] for part, _ in shares)):
                inner: list[Share] = [
                    (part[1:], view[(row - part[0][0], ...)])
                    for part, view in shares
                    if part[0][0] <= row < part[0][1]
                ]
                if inner:
                    fill(reads, offset + row * row_bytes, shape[1:], inner)
            return
    values = aligned(shape, reads.dtype)
    reads.read(offset, values.reshape(-1).view(np.uint8))
    take(values, shares)


def is_all(shares: Sequence[Share], shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether one share is all of what is read, so that it can be read where it belongs."""
    if len(shares) != 1:
        return False
    ((part, view),) = shares
    return view.dtype == dtype and part == whole(shape) and view.flags.c_contiguous


def take(values: Array, shares: Sequence[Share]) -> None:
    """Copies to each share its part of what was read, cast to the buffer's dtype."""
    with np.errstate(all="ignore"):  # a cast that the caller asked for may overflow
        for part, view in shares:
            view[...] = values[(*region_slices(part), ...)]


class HeldReader:
    """Copies arrays that are in memory already."""

    def __init__(self, arrays: Mapping[int, Array]) -> None:
        self._arrays = arrays

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        found = [(want, buffers(want, self._arrays[want.leaf].dtype)) for want in batch]
        return found, [
            functools.partial(take, self._arrays[want.leaf], [*parts.items()])
            for want, parts in found
        ]
