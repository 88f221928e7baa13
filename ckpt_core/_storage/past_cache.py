"""Reads files past the page cache of the system, but for what is in it already.

A read through the page cache takes memory twice, for the cache and for the caller. Where state and cache together fill the
memory, or where the host of a virtual machine gives memory only when it is first touched, that takes longer than the disk
does. So a thread reads blocks with ``O_DIRECT`` into a window of its own and copies from there: the memory of the caller,
unlike the window, need not be aligned to the sectors of the disk.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np

from ckpt_core._options import MIB
from ckpt_core._platform import DIRECT, READ

_ALIGNMENT = 4096
"""Bytes: a multiple of the sectors of any disk. Places in files, in memory, and sizes must be multiples of a sector."""
_WINDOW_BYTES = 4 * MIB + 2 * _ALIGNMENT
"""Takes a block with a checksum, wherever that begins."""


class _Window(threading.local):
    """What a thread read last, the bytes from ``start`` to ``stop`` of a file; and up to where it reads through the cache."""

    def __init__(self) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, _WINDOW_BYTES), np.uint8)
        self.file, self.start, self.stop = -1, 0, 0
        self.cached: tuple[int, int, int] = -1, 0, 0
        self.probe = bytearray(1)


class PastCache:
    """Reads files past the page cache; for any number of threads. Files are given by their descriptors."""

    def __init__(self) -> None:
        self._window = _Window()
        self._lock = threading.Lock()
        self._direct: dict[int, int | None] = {}
        self._ahead: dict[int, tuple[int, int]] = {}

    def never(self, descriptor: int) -> None:
        """This file is read through the cache alone."""
        self._direct[descriptor] = None

    def leave(self, descriptor: int, start: int, stop: int) -> None:
        """The system reads this range into its cache, so that ``read`` shall not read it a second time."""
        first, last = self._ahead.get(descriptor, (start, stop))
        self._ahead[descriptor] = min(first, start), max(last, stop)

    def read(self, descriptor: int, offset: int, target: np.ndarray[Any, Any], end: int) -> int:
        """Reads some bytes into ``target``; gives how many, 0 if they must be read through the cache, or at the file's end.

        Args:
            descriptor: the file.
            offset: where the bytes begin.
            target: memory for them.
            end: up to where this thread reads the file next.
        """
        window = self._window
        is_there = window.file == descriptor and window.start <= offset < window.stop
        if not is_there and (
            self._is_cached(descriptor, offset, end) or not self._fill(descriptor, offset, end)
        ):
            return 0
        part = window.bytes[offset - window.start : window.stop - window.start][: target.size]
        np.copyto(target[: part.size], part)  # an assignment to a memoryview keeps the GIL
        return part.size

    def _is_cached(self, descriptor: int, offset: int, end: int) -> bool:
        """Whether what comes next is in the cache, or will be; looks at its first page, once for all up to ``end``."""
        window = self._window
        file, start, stop = window.cached
        if file == descriptor and start <= offset < stop:
            return True
        first, last = self._ahead.get(descriptor, (0, 0))
        if first <= offset < last:
            return True
        try:  # one byte: the system begins to read as many into its cache as it is asked for
            os.preadv(descriptor, [window.probe], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:  # a file system that cannot say
            pass
        window.cached = descriptor, offset, end
        return True

    def _fill(self, descriptor: int, offset: int, end: int) -> bool:
        """Reads what comes next into this thread's window; whether anything came."""
        direct = self._direct.get(descriptor, -1)
        if direct == -1:
            direct = self._opened(descriptor)
        if direct is None:
            return False
        window = self._window
        window.file = -1  # should this be interrupted
        start = offset - offset % _ALIGNMENT
        size = min(_WINDOW_BYTES, -(-(end - start) // _ALIGNMENT) * _ALIGNMENT)
        try:
            window.stop = start + os.preadv(direct, [window.bytes[:size].data], start)
        except OSError:  # a disk of larger sectors, or a file system that refuses: the read through the cache says what it is
            return False
        window.file, window.start = descriptor, start
        return offset < window.stop

    def _opened(self, descriptor: int) -> int | None:
        """The same file, opened once more; None if its file system cannot do without the cache."""
        with self._lock:
            if descriptor not in self._direct:
                try:
                    self._direct[descriptor] = os.open(f"/proc/self/fd/{descriptor}", READ | DIRECT)
                except OSError:
                    self._direct[descriptor] = None
            return self._direct[descriptor]

    def close(self) -> None:
        """Closes what it opened."""
        for direct in self._direct.values():
            if direct is not None:
                os.close(direct)
        self._direct.clear()
