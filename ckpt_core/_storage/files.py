"""Reads ranges of files and objects, as the index of a database gives them.

Files of this machine's disks are read past the page cache, but for what is in it already: through it a read takes memory
twice. That is slower than the disk where state and cache fill the memory, or where the host of a virtual machine gives
memory when it is first touched. So a thread reads blocks with ``O_DIRECT`` into a window of its own and copies from there:
the caller's memory need not be aligned to sectors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointCorrupt, name_file
from ckpt_core._options import KIB, MIB
from ckpt_core._platform import DIRECT, READ
from ckpt_core._storage.location import Location, StoreContext, failure, range_of, ts

try:
    import resource
except ImportError:  # Windows
    resource = None

Array = np.ndarray[Any, Any]
_NOTHING = np.empty(0, np.uint8)
_KEEPS_DESCRIPTORS = sys.version_info < (3, 13)  # whether a mapping keeps a file descriptor open
_FEW_FILES = 16
_NO_FILE = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is missing",
    errno.ELOOP: "leads in a circle",
    errno.ENXIO: "is no regular file",
}
"""What a file is that the system does not open, which is damage; a socket, for one, is none."""
_alive: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""The live mappings of this process, also those of arrays that earlier loads returned."""


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


class StoreFiles:
    """Data files in an object store, of which ranges are fetched; see ``DataFiles``."""

    piece_bytes = None  # all of a range is read at once

    def __init__(self, location: Location, context: StoreContext) -> None:
        self._location = location
        self._store: Any = ts.KvStore.open(location.spec(), context=context()).result()

    def read(self, file: str, offset: int, target: Array, end: int | None = None) -> int:
        stop = offset + target.size
        future = self._store.read(file, byte_range=slice(offset, stop))
        try:
            found = range_of(self._store, file, future, offset, stop)
        except ValueError as error:
            raise failure(error, f"{self._location.path}/{file}: cannot be read") from error
        data = _NOTHING if found is None else np.frombuffer(found, np.uint8)
        target[: data.size] = data
        return data.size

    def mapped(self, file: str) -> None:
        return None

    def size(self, file: str) -> int:
        return sys.maxsize

    def close(self) -> None:
        pass


class _OpenFile:
    """A file that is open until it is closed, or nothing refers to it."""

    descriptor = -1  # after ``close``
    _close = staticmethod(os.close)  # at interpreter exit, modules may be torn down already

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, READ)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._close(descriptor)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            self.close()


class DataFiles:
    """Data files in a file system; opens each once while they are not too many. ``sizes_bytes`` has their maximum sizes.
    ``is_local`` says whether the file at a path may be memory-mapped, or read by ``past_cache`` (None: nothing is).
    """

    piece_bytes = 256 * KIB
    """Each piece is checksummed while it is still in the core's second-level cache."""

    def __init__(
        self,
        location: Location,
        sizes_bytes: Mapping[str, int] | None = None,
        is_local: Callable[[str], bool] = lambda _: True,
        past_cache: PastCache | None = None,
    ) -> None:
        self._location, self._sizes = location, sizes_bytes or {}
        self._is_local, self._past_cache = is_local, past_cache
        self._open: dict[str, _OpenFile] = {}
        self._mapped: dict[str, Array | None] = {}
        self._lock = threading.Lock()

    def read(self, file: str, offset: int, target: Array, end: int | None = None) -> int:
        """Reads into ``target``; gives the bytes read, fewer at the file's end. This thread reads on up to ``end``, if given."""
        opened = self._open.get(file) or self._opened(file)
        descriptor = opened.descriptor
        try:
            done = 0
            if self._past_cache is not None:
                end, read = end or offset + target.size, self._past_cache.read
                while done < target.size:
                    count = read(file, descriptor, offset + done, target[done:], end)
                    if count == 0:
                        break
                    done += count
            view: Any = memoryview(target.data)
            while done < len(view):
                if hasattr(os, "preadv"):
                    count = os.preadv(descriptor, [view[done:]], offset + done)
                else:
                    count = self._read_in_turn(descriptor, view[done:], offset + done)
                if count == 0:
                    break
                done += count
            return done
        except OSError as error:
            name_file(error, f"{self._location.path}/{file}")
            raise

    def part(self, file: str, offset: int = 0, size_bytes: int | None = None) -> bytes:
        """The bytes of a range, or of all of a file; fewer at its end."""
        opened = self._opened(file)
        descriptor = opened.descriptor
        try:
            size = os.fstat(descriptor).st_size if size_bytes is None else size_bytes
            if not hasattr(os, "pread"):
                data = np.empty(size, np.uint8)
                return data[: self.read(file, offset, data)].tobytes()
            found = b""
            while more := os.pread(descriptor, size - len(found), offset + len(found)):
                found += more
            return found
        except OSError as error:
            name_file(error, f"{self._location.path}/{file}")
            raise

    def _read_in_turn(self, descriptor: int, target: memoryview, offset: int) -> int:
        """preadv where the system has none (Windows, macOS before 11): one read after the other."""
        with self._lock, io.FileIO(descriptor, closefd=False) as stream:
            stream.seek(offset)
            return stream.readinto(target) or 0

    def mapped(self, file: str) -> Array | None:
        """All bytes of a file as a private mapping: only changed pages take memory. None if the system allows no further one."""
        if file not in self._mapped:
            self._mapped[file] = self._map(file)
        return self._mapped[file]

    def _map(self, file: str) -> Array | None:
        if _KEEPS_DESCRIPTORS and len(_alive) >= _part_of_most_files():
            return None
        opened = self._opened(file)
        if os.fstat(opened.descriptor).st_size == 0:
            return _NOTHING
        # per file: it may be a link elsewhere
        if not self._is_local(f"{self._location.path}/{file}"):
            return None
        arguments: Any = {} if _KEEPS_DESCRIPTORS else {"trackfd": False}
        try:
            memory = mmap.mmap(opened.descriptor, 0, access=mmap.ACCESS_COPY, **arguments)
        except OSError:  # no address space, or no descriptor left
            return None
        _alive.add(memory)
        return np.frombuffer(memory, np.uint8)

    def _opened(self, file: str) -> _OpenFile:
        """The open file, for as long as the caller refers to it: it does not stay open if too many do."""
        with self._lock:
            if file in self._open:
                return self._open[file]
            opened = self._checked(file)
            if len(self._open) < _FEW_FILES or len(self._open) < _part_of_most_files():
                self._open[file] = opened
            return opened

    def size(self, file: str) -> int:
        """Bytes of a file, ``sys.maxsize`` where only a read can tell; CheckpointCorrupt if it is missing or too large."""
        if file not in self._sizes:
            return sys.maxsize
        opened = self._opened(file)
        return os.fstat(opened.descriptor).st_size

    def _checked(self, file: str) -> _OpenFile:
        path = f"{self._location.path}/{file}"
        try:
            opened = _OpenFile(path)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            raise self._corrupt(file, _NO_FILE[error.errno]) from error
        status = os.fstat(opened.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._corrupt(file, "is no regular file")
        # A file that is too short is reported by the read, which can name the leaf.
        if status.st_size > (expected := self._sizes.get(file, status.st_size)):
            raise self._corrupt(file, f"has {status.st_size} bytes, was saved with {expected}")
        if self._past_cache is not None:
            self._past_cache.opened(file, opened.descriptor, local=self._is_local(path))
        return opened

    def _corrupt(self, file: str, what: str) -> CheckpointCorrupt:
        folder = self._location.path.rpartition("/")[2]
        return CheckpointCorrupt(f"file {file} {what}", file=f"{folder}/{file}")

    def close(self) -> None:
        """Closes all files; mappings live on in the arrays."""
        while self._open:
            self._open.popitem()[1].close()
        self._mapped.clear()


def _part_of_most_files() -> int:
    """What one load may keep open of what this process may: a quarter. So do all mappings that hold a descriptor."""
    most = limit("RLIMIT_NOFILE")
    return sys.maxsize if most is None else most // 4


def limit(name: str) -> int | None:
    """A limit of this process, by the name that ``resource`` has for it; None for none, or none that is known."""
    if resource is None or not hasattr(resource, name):
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


_ALIGNMENT = 4096  # of places in files and memory, and of sizes: a multiple of any disk's sectors
_WINDOW_BYTES = 4 * MIB + 2 * _ALIGNMENT  # takes a block with a checksum, wherever that begins


class _Window(threading.local):
    """What a thread read last, the bytes from ``start`` to ``stop`` of ``file``; and up to where it reads through the cache."""

    def __init__(self) -> None:
        self.bytes: Array | None = None
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

    def read(self, file: str, descriptor: int, offset: int, target: Array, end: int) -> int:
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
        """Reads what comes next into this thread's window; that is empty after an error (no direct reads, larger sectors)."""
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
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        page = mmap.mmap(descriptor, 1, prot=mmap.PROT_READ, offset=start)
        found, mincore = ctypes.c_ubyte(), ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        if mincore(np.frombuffer(page, np.uint8).ctypes.data, 1, ctypes.byref(found)) == 0:
            return bool(found.value & 1)
    except (OSError, ValueError):  # no further descriptor or memory; beyond the file's end
        pass
    return _is_read_at_once(descriptor, offset)


def _is_read_at_once(descriptor: int, offset: int) -> bool:
    """The same of any file; of a page that is not there, Linux begins to read it, and may have it before it looks."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot say
        pass
    return True
