"""Whom this process waits for, for reports of a save or load that takes long."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

_absent: dict[str, Sequence[int]] = {}
"""Tag of an agreement -> the processes that have not arrived there."""


def awaited() -> tuple[int, ...]:
    """The processes that this one waits for now, at any agreement."""
    return tuple(sorted({process for absent in [*_absent.values()] for process in absent}))


def note(tag: str, absent: Sequence[int]) -> None:
    """These have not arrived yet."""
    _absent[tag] = absent


@contextlib.contextmanager
def during(tag: str, absent: Sequence[int]) -> Generator[None]:
    """While the block runs, this process waits for others at an agreement."""
    try:
        note(tag, absent)
        yield
    finally:
        _absent.pop(tag, None)
