"""Reads files past the page cache of the system, but for what is in it already.

A read through the page cache takes memory twice, for the cache and for the caller. Where state and cache together fill the
memory, or where the host of a virtual machine gives memory only when it is first touched, that takes longer than the disk
does. So a thread reads blocks with ``O_DIRECT`` into a window of its own and copies from there: the memory of the caller,
unlike the window, need not be aligned to the sectors of the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
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
    """What a thread read last, the bytes from ``start`` to ``stop`` of ``file``; and up to where it reads through the cache."""

    def __init__(self) -> None:
        self.bytes: np.ndarray[Any, Any] | None = None
        self.file, self.start, self.stop = "", 0, 0
        self.cached: tuple[str, int, int] = "", 0, 0


class PastCache:
    """Reads the files of one folder past the page cache; for any number of threads, which take ``BYTES_OF_A_THREAD`` each."""

    BYTES_OF_A_THREAD = _WINDOW_BYTES

    def __init__(self) -> None:
        self._window = _Window()
        self._never: set[str] = set()
        self._own: set[str] = set()  # the system says of these what is in its cache

    def opened(self, file: str, descriptor: int, *, local: bool) -> None:
        """A file was opened; one that is not ``local`` is read through the cache."""
        if not local:
            self._never.add(file)
            return
        user = os.geteuid()
        if user in (0, os.fstat(descriptor).st_uid):
            self._own.add(file)
        # Else the system reads on from what is read through the cache, and finds more in it each time.
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(
        self, file: str, descriptor: int, offset: int, target: np.ndarray[Any, Any], end: int
    ) -> int:
        """Reads some bytes into ``target``; gives how many: 0 at the file's end, or if they must be read through the cache. This
        thread reads on up to ``end``. Windows go by the file's name, since another file may get the descriptor's number later.
        """
        window = self._window
        if file != window.file or not window.start <= offset < window.stop:
            if self._is_cached(file, descriptor, offset, end):
                return 0
            self._fill(file, descriptor, offset, end)
        if window.bytes is None or file != window.file or not window.start <= offset < window.stop:
            return 0
        part = window.bytes[offset - window.start : window.stop - window.start][: target.size]
        np.copyto(target[: part.size], part)  # an assignment to a memoryview keeps the GIL
        return part.size

    def _is_cached(self, file: str, descriptor: int, offset: int, end: int) -> bool:
        """Whether what comes next is read through the cache; its first whole page tells it, once for all up to ``end``: the
        page before may hold the end of what another thread has just read through the cache.
        """
        cached, start, stop = self._window.cached
        if file in self._never or (file == cached and start <= offset < stop):
            return True
        page = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        place = page if page < end else offset
        if not (_is_resident if file in self._own else _is_read_at_once)(descriptor, place):
            return False
        self._window.cached = file, offset, end
        return True

    def _fill(self, file: str, descriptor: int, offset: int, end: int) -> None:
        """Reads what comes next into this thread's window. On an error (no direct reads, larger sectors, no memory,
        no further descriptor) it has nothing; the read through the cache says what it is, if it fails, too.
        """
        window = self._window
        window.file = ""
        start = offset - offset % _ALIGNMENT
        size = min(_WINDOW_BYTES, -(-(end - start) // _ALIGNMENT) * _ALIGNMENT)
        try:
            if window.bytes is None:
                window.bytes = np.frombuffer(mmap.mmap(-1, _WINDOW_BYTES), np.uint8)
            # for this read only: there may be thousands of files
            direct = os.open(f"/proc/self/fd/{descriptor}", READ | DIRECT)
            try:
                found = os.preadv(direct, [window.bytes[:size].data], start)
            finally:
                os.close(direct)
        except (OSError, MemoryError):
            return
        window.start, window.stop, window.file = start, start + found, file


def _is_resident(descriptor: int, offset: int) -> bool:
    """Whether a page of a file of this user is in the page cache; the system is not asked to read it."""
    try:
        page = mmap.mmap(
            descriptor, 1, prot=mmap.PROT_READ, offset=offset - offset % mmap.ALLOCATIONGRANULARITY
        )
        found, mincore = ctypes.c_ubyte(), ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        if mincore(np.frombuffer(page, np.uint8).ctypes.data, 1, ctypes.byref(found)) == 0:
            return bool(found.value & 1)
    except (OSError, ValueError):  # no further descriptor or memory; beyond the file's end
        pass
    return _is_read_at_once(descriptor, offset)


def _is_read_at_once(descriptor: int, offset: int) -> bool:
    """The same of any file. If it is not there, Linux begins to read the page, and may have it before it looks."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot say
        pass
    return True
