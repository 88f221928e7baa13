"""What is read of a file: pieces with the wanted regions of an array that lies there in C order. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpt_core._layout.regions import Region, Shape

_Taking = tuple[int, tuple[int, ...], Region]
"""A region that takes part: its number, and what is left of it below so many leading indices."""


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
        (number, (), region)
        for number, region in enumerate(regions)
        if all(start < stop for start, stop in region)
    ]
    if not shape:
        takers = tuple(Taker(number, (), ()) for number, _, _ in taking)
        yield from (Piece(0, (), takers) for _ in takers[:1])
    elif taking:
        yield from _pieces(0, shape, itemsize, taking, piece_bytes)


def _pieces(
    offset: int, shape: Shape, itemsize: int, taking: Sequence[_Taking], piece_bytes: int
) -> Iterator[Piece]:
    row_bytes = itemsize * math.prod(shape[1:])
    edges = sorted({edge for _, _, region in taking for edge in region[0]})
    for first, last in itertools.pairwise(edges):
        here = [one for one in taking if one[2][0][0] <= first and last <= one[2][0][1]]
        if not here:
            continue
        if row_bytes > piece_bytes and len(shape) > 1:
            for row in range(first, last):
                inner = [
                    (number, (*lead, row - region[0][0]), region[1:])
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
