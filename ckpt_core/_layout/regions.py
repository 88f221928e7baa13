"""Regions of arrays, one ``(start, stop)`` per dimension; and what is read of a file in which an array lies in C order. Pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Region = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


def to_region(index: Any, shape: Shape) -> Region:
    """The region of a tuple of slices, such as the ``index`` of a ``jax.Array`` shard."""
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def region_shape(region: Region) -> Shape:
    """The shape of a region: ``((2, 5), (0, 4))`` gives ``(3, 4)``."""
    return tuple(stop - start for start, stop in region)


@functools.lru_cache(4096)
def region_size(region: Region) -> int:
    """The number of elements in a region."""
    return math.prod(region_shape(region))


def region_slices(region: Region) -> tuple[slice, ...]:
    """The region as a tuple of slices."""
    return tuple(slice(start, stop) for start, stop in region)


def within(inner: Region, outer: Region) -> tuple[slice, ...]:
    """The region ``inner`` as slices relative to the first element of ``outer``."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)


@functools.lru_cache(4096)
def whole(shape: Shape) -> Region:
    """The region of a whole array."""
    return tuple((0, size) for size in shape)


class Taker(NamedTuple):
    """A region that takes a part of a piece."""

    number: int  # position among the wanted regions
    place: tuple[int | slice, ...]  # the part, as an index into the region's own array
    part: Region  # the same, as a region of the piece


class Piece(NamedTuple):
    """Whole rows of an array, or of a part of it with fixed leading indices: contiguous in the file."""

    offset_bytes: int  # relative to the array
    shape: Shape
    takers: tuple[Taker, ...]  # each needs some of every row


def pieces(
    shape: Shape, itemsize: int, regions: Sequence[Region], piece_bytes: int
) -> Iterator[Piece]:
    """The pieces that hold the regions, of at most ``piece_bytes`` unless one element has more; no row that no region needs is in one."""
    taking = [
        Taker(number, (), region)
        for number, region in enumerate(regions)
        if all(start < stop for start, stop in region)
    ]
    if taking and not shape:
        yield Piece(0, (), tuple(taking))
    elif taking:
        yield from _pieces(0, shape, itemsize, taking, piece_bytes)


def _pieces(
    offset: int, shape: Shape, itemsize: int, taking: Sequence[Taker], piece_bytes: int
) -> Iterator[Piece]:
    """The same for an array at an offset: of each that takes part, what is left of its region below some leading indices."""
    row_bytes = itemsize * math.prod(shape[1:])
    edges = sorted({edge for one in taking for edge in one.part[0]})
    for first, last in itertools.pairwise(edges):
        here = [one for one in taking if one.part[0][0] <= first and last <= one.part[0][1]]
        if not here:
            continue
        if row_bytes > piece_bytes and len(shape) > 1:
            for row in range(first, last):
                inner = [
                    Taker(number, (*lead, row - region[0][0]), region[1:])
                    for number, lead, region in here
                ]
                where = offset + row * row_bytes
                yield from _pieces(where, shape[1:], itemsize, inner, piece_bytes)
            continue
        step = max(1, piece_bytes // row_bytes)
        for start in range(first, last, step):
            rows = min(step, last - start)
            takers = tuple(
                Taker(
                    number,
                    (*lead, slice(start - region[0][0], start - region[0][0] + rows)),
                    ((0, rows), *region[1:]),
                )
                for number, lead, region in here
            )
            yield Piece(offset + start * row_bytes, (rows, *shape[1:]), takers)


def gaps(size_bytes: int, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ``(start, stop)`` that no ``(offset, length)`` covers: ``gaps(10, [(2, 3), (7, 1)])`` is ``[(0, 2), (5, 7), (8, 10)]``."""
    found: list[tuple[int, int]] = []
    position = 0
    for offset, length in sorted(covered):
        if offset > position:
            found.append((position, offset))
        position = max(position, offset + length)
    if position < size_bytes:
        found.append((position, size_bytes))
    return found
