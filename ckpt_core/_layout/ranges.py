"""Ranges of bytes in one file: joined into few reads, and what they leave uncovered."""

from __future__ import annotations

from collections.abc import Iterable


def gaps(size_bytes: int, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of a file of ``size_bytes`` that none of the ``(offset, length)`` covers."""
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
    """Joins ``(offset, length)`` ranges of one file into few reads.

    Returns:
        ``(offset, length, members)`` with the positions of the ranges that each read holds; no
        read joins ranges more than ``gap_bytes`` apart or grows beyond ``limit_bytes`` by joining.
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
