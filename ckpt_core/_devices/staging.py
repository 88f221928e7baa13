"""Memory for copies of host arrays, used again by the next save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Copy = Callable[[Array], Array]
"""Copies host memory that the caller could change."""


class Staging:
    """Copies arrays for one save after the other: memory that is warm takes a copy much faster.

    Fresh memory costs a page fault for every 4 KiB, several times what the copying itself takes.

    Args:
        limit_bytes: how much is kept from one save to the next.

    Attributes:
        lent: the copies since the last ``release``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.lent: list[Array] = []
        self._limit_bytes = limit_bytes
        self._free: dict[tuple[np.dtype[Any], tuple[int, ...]], list[Array]] = {}

    def copy(self, array: Array) -> Array:
        """A copy in C order."""
        free = self._free.get((array.dtype, array.shape))
        buffer = free.pop() if free else np.empty(array.shape, array.dtype)
        np.copyto(buffer, array)
        self.lent.append(buffer)
        return buffer

    def release(self) -> None:
        """Takes the copies back, of which nobody may read any more, and lets go what was not used."""
        self._free = {}
        kept_bytes = 0
        for buffer in self.lent:
            kept_bytes += buffer.nbytes
            if kept_bytes > self._limit_bytes:
                break
            self._free.setdefault((buffer.dtype, buffer.shape), []).append(buffer)
        self.lent = []
