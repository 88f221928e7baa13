"""Byte ranges of one file: joins them into few reads, and finds the gaps between them."""

from __future__ import annotations

from collections.abc import Iterable


def gaps(size_bytes: int, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """``(start, stop)`` of the parts of a file that no ``(offset, length)`` covers:
    ``gaps(10, [(2, 3), (7, 1)])`` is ``[(0, 2), (5, 7), (8, 10)]``.
    """
    found: list[tuple[int, int]] = []
    position = 0
    for offset, length in sorted(covered):
        if offset > position:
            found.append((position, offset))
        position = max(position, offset + length)
    if position < size_bytes:
        found.append((position, size_bytes))
    return found


def coalesce(
    ranges: Iterable[tuple[int, int]], *, gap_bytes: int, limit_bytes: int
) -> list[tuple[int, int, list[int]]]:
    """``(offset, length, members)`` for each of few reads that hold all ``(offset, length)`` ranges; members are indices
    into ``ranges``. Ranges at most ``gap_bytes`` apart are joined, unless the read would exceed ``limit_bytes``.
    """
    entries = sorted((offset, length, position) for position, (offset, length) in enumerate(ranges))
    reads: list[tuple[int, int, list[int]]] = []
    for offset, length, position in entries:
        if reads:
            start, size, members = reads[-1]
            end = max(start + size, offset + length)
            if offset <= start + size + gap_bytes and end - start <= limit_bytes:
                members.append(position)
                reads[-1] = (start, end - start, members)
                continue
        reads.append((offset, length, [position]))
    return reads
