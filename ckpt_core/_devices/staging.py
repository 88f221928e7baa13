"""Buffers for copies of host arrays, reused by the next save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Copy = Callable[[Array], Array]
"""A function that copies a host array which the caller may change later."""


class Staging:
    """Copies arrays into buffers that successive saves reuse; keeps at most ``limit_bytes`` of them between saves. New memory
    costs a page fault per 4 KiB, which takes several times as long as the copy itself.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.lent: list[Array] = []  # in use since the last ``release``
        self._limit_bytes = limit_bytes
        self._free: dict[tuple[np.dtype[Any], tuple[int, ...]], list[Array]] = {}

    def copy(self, array: Array) -> Array:
        """A copy in C order."""
        free = self._free.get((array.dtype, array.shape))
        buffer = free.pop() if free else np.empty(array.shape, array.dtype)
        np.copyto(buffer, array)
        self.lent.append(buffer)
        return buffer

    def lend(self, users: int) -> Callable[[], None]:
        """Begins a snapshot; each of the ``users`` saves that read it calls the result after its last read."""
        if self.lent:
            self.release()
        reading = list(range(users))

        def release() -> None:
            if reading.pop() == 0:  # one atomic call: of two threads, one gets the last
                self.release()

        return release

    def release(self) -> None:
        """Makes the lent buffers reusable, after their last read, and frees those not lent."""
        self._free = {}
        kept_bytes = 0
        for buffer in self.lent:
            kept_bytes += buffer.nbytes
            if kept_bytes > self._limit_bytes:
                break
            self._free.setdefault((buffer.dtype, buffer.shape), []).append(buffer)
        self.lent = []
