"""Reads a contiguous part of an array into the buffers of the regions that need some of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._layout.ranges import coalesce
from ckpt_core._layout.regions import Region, region_size, region_slices, whole
from ckpt_core._load.readers.wants import Array
from ckpt_core._options import MIB

PIECE_BYTES = 8 * MIB
"""The most that one job reads, and what a reader thread may hold beside the arrays."""

Share = tuple[Region, Array]
"""A part of what is read, and the view of a buffer that takes it."""


class ReadsOf(NamedTuple):
    """How an array is read.

    Attributes:
        read: reads from a position in its file into memory given as bytes.
        dtype: its dtype.
        gap_bytes: wanted bytes at most this far apart are read at once.
    """

    read: Callable[[int, Array], None]
    dtype: np.dtype[Any]
    gap_bytes: int


def fill(reads: ReadsOf, offset: int, shape: tuple[int, ...], shares: Sequence[Share]) -> None:
    """Reads what the shares need: all at once, or row by row if too much would be read for nothing.

    Args:
        reads: how the array is read.
        offset: position of the part in the file.
        shape: its shape.
        shares: what goes where.
    """
    if len(shares) == 1 and _is_all(shares[0], shape, reads.dtype):
        reads.read(offset, shares[0][1].reshape(-1).view(np.uint8))
        return
    row_bytes = reads.dtype.itemsize * math.prod(shape[1:])
    if len(shape) > 1 and row_bytes > reads.gap_bytes and not _is_dense(shape, shares):
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
    if len(shape) == 1:
        _fill_runs(reads, offset, shares)
        return
    values = np.empty(shape, reads.dtype)
    reads.read(offset, values.reshape(-1).view(np.uint8))
    take(values, shares)


def _fill_runs(reads: ReadsOf, offset: int, shares: Sequence[Share]) -> None:
    """Reads parts of one row; those that lie close together at once."""
    size = reads.dtype.itemsize
    ranges = [(part[0][0] * size, (part[0][1] - part[0][0]) * size) for part, _ in shares]
    for start, length, members in coalesce(
        ranges, gap_bytes=reads.gap_bytes, limit_bytes=PIECE_BYTES
    ):
        first, count = start // size, length // size
        near: list[Share] = [
            (((shares[n][0][0][0] - first, shares[n][0][0][1] - first),), shares[n][1])
            for n in members
        ]
        if len(near) == 1 and _is_all(near[0], (count,), reads.dtype):
            reads.read(offset + start, near[0][1].view(np.uint8))
            continue
        values = np.empty(count, reads.dtype)
        reads.read(offset + start, values.view(np.uint8))
        take(values, near)


def _is_all(share: Share, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether a share is all of what is read, so that it can be read where it belongs."""
    part, view = share
    return view.dtype == dtype and part == whole(shape) and view.flags.c_contiguous


def _is_dense(shape: tuple[int, ...], shares: Sequence[Share]) -> bool:
    """Whether the shares together need every element."""
    return sum(region_size(part) for part, _ in shares) >= math.prod(shape)


def take(values: Array, shares: Sequence[Share]) -> None:
    """Copies to each share its part of what was read, cast to the buffer's dtype."""
    with np.errstate(all="ignore"):  # a cast that the caller asked for may overflow
        for part, view in shares:
            view[...] = values[(*region_slices(part), ...)]
