"""Reads ranges of files and objects, as the index of a database gives them, and other arrays through TensorStore."""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ckpt_core._errors import CheckpointCorrupt, name_file
from ckpt_core._format.record import parse_json
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._layout.chunks import chunk_count
from ckpt_core._layout.regions import Region, region_slices
from ckpt_core._options import KIB
from ckpt_core._platform import READ
from ckpt_core._storage._tensorstore import (
    StoreContext,
    answered,
    failure,
    is_shorter,
    ts,
    unreadable,
)
from ckpt_core._storage.bounds import Values, most_open_files, refuse_chunks, refuse_file
from ckpt_core._storage.location import Location, range_of
from ckpt_core._storage.past_cache import PastCache

_MAX_FOREIGN_BYTES = 2**46


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """An array opened through TensorStore."""

    store: Any  # TensorStore's handle
    dtype: str
    shape: tuple[int, ...]
    stored: int | None = None  # the most values it has, its metadata among them; None if unknown


def open_array(
    item: Location,
    name: str,
    context: StoreContext,
    *,
    zarr3: bool = True,
    ocdbt: bool = True,
    limit_bytes: int | None = None,
    values: Values | None = None,
) -> ForeignArray:
    """Opens an array of any layout that Orbax writes: zarr v3 or v2, in an OCDBT database or in directories.
    CheckpointCorrupt if it is missing or its metadata is damaged or impossible; MemoryError if a chunk would take
    more than half of this process's memory. A decoded chunk larger than ``limit_bytes`` is damaged. ``values`` are
    for an index that was not checked against a record.
    """
    prefix = f"{name}/" if name else ""
    metadata = "zarr.json" if zarr3 else ".zarray"
    first = "manifest.ocdbt" if ocdbt else prefix + metadata
    refuse_file(item, first, most_bytes(first))
    kvstore = (
        {"driver": "ocdbt", "base": item.spec(), "path": prefix}
        if ocdbt
        else {**item.spec(), "path": item.spec()["path"] + prefix}
    )
    _check_nesting(kvstore, metadata, name, context)
    spec = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kvstore,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": False,
    }
    try:
        store: Any = ts.open(spec, open=True, context=context()).result()
    except (ValueError, NotImplementedError) as error:
        raise unreadable(error, f"array {name!r}: cannot be opened", leaf=name) from error
    shape = tuple(store.shape)
    # A malicious shape or chunk shape would abort the process when TensorStore allocates memory.
    if math.prod(shape) * store.dtype.numpy_dtype.itemsize > _MAX_FOREIGN_BYTES:
        raise CheckpointCorrupt(f"array {name!r}: impossible shape {shape}", leaf=name)
    refuse_chunks(store, name, limit_bytes, values)
    stored = None if values is None else len(values.keys(name))
    return ForeignArray(store, store.dtype.name, shape, stored)


def _check_nesting(kvstore: dict[str, Any], file: str, name: str, context: StoreContext) -> None:
    """Parses an array's metadata with our parser: TensorStore's crashes on deeply nested JSON."""
    try:
        found: Any = ts.KvStore.open(kvstore, context=context()).result().read(file).result()
    except (ValueError, NotImplementedError) as error:
        raise unreadable(error, f"array {name!r}: cannot be opened", leaf=name) from error
    if found.state != "value":
        answered(found, f"array {name!r}: cannot be opened")
        raise CheckpointCorrupt(f"array {name!r}: its metadata {file} is missing", leaf=name)
    parse_json(bytes(found.value), f"{name}/{file}")


def read_region(
    array: ForeignArray, region: Region, name: str, out: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Reads the values of a region into ``out``, or into a new array; blocks. CheckpointCorrupt if a chunk is missing or cannot be decoded."""
    chunk = tuple(array.store.chunk_layout.write_chunk.shape or ())
    if array.stored is not None and chunk_count(region, chunk) > array.stored:
        raise CheckpointCorrupt(f"array {name!r}: chunks are missing", leaf=name)
    part = array.store[region_slices(region)]
    # A slice of a TensorStore keeps its origin; shift it to zero, to match ``out``.
    part = part.translate_to[(0,) * part.rank] if part.rank else part
    try:
        if out is None:
            out = np.empty(part.shape, array.store.dtype.numpy_dtype)
        if out.size:
            ts.array(out).write(part).result()
    except (MemoryError, RecursionError):
        raise  # of this machine, not of the data
    except Exception as error:
        raise unreadable(error, f"array {name!r}", leaf=name) from error
    return out


_NOTHING = np.empty(0, np.uint8)
_KEEPS_DESCRIPTORS = sys.version_info < (3, 13)
"""Whether an mmap object keeps a file descriptor open (before Python 3.13)."""
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


class Files(Protocol):
    """The data files of an item."""

    piece_bytes: int | None  # read so much at once for one purpose; None: all of it

    def read(
        self, file: str, offset: int, target: np.ndarray[Any, Any], end: int | None = None
    ) -> int:
        """Reads from ``offset`` into ``target``; gives the bytes read, fewer at file end. This thread reads on up to ``end``, if given."""
        ...

    def mapped(self, file: str) -> np.ndarray[Any, Any] | None:
        """All bytes of a file, memory-mapped; None if that is not possible."""
        ...

    def check(self, files: Iterable[str]) -> list[int]:
        """Sizes of files, ``sys.maxsize`` where only a read can tell; CheckpointCorrupt if one is missing or larger than recorded."""
        ...

    def close(self) -> None:
        """Closes all files; mappings live on in the arrays."""
        ...


class StoreFiles:
    """Data files in an object store, of which ranges are fetched; see ``Files``."""

    piece_bytes = None

    def __init__(self, location: Location, context: StoreContext) -> None:
        self._location = location
        self._store: Any = ts.KvStore.open(location.spec(), context=context()).result()

    def read(
        self, file: str, offset: int, target: np.ndarray[Any, Any], end: int | None = None
    ) -> int:
        start, stop = offset, offset + target.size
        future = self._store.read(file, byte_range=slice(start, stop))
        try:
            found = range_of(self._store, file, future, start, stop)
        except ValueError as error:
            if is_shorter(error):
                return 0
            raise failure(error, f"{self._location.path}/{file}: cannot be read") from error
        data = _NOTHING if found is None else np.frombuffer(found, np.uint8)
        target[: data.size] = data
        return data.size

    def mapped(self, file: str) -> None:
        return None

    def check(self, files: Iterable[str]) -> list[int]:
        return [sys.maxsize for _ in files]

    def close(self) -> None:
        pass


class _OpenFile:
    """A file that is open until it is closed, or nothing refers to it: a signal handler may raise between any two lines."""

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
    """Data files in a file system (see ``Files``); opens each once while they are not too many, and follows
    links. ``sizes_bytes`` has the maximum size of each file in the record. ``is_local`` says whether the
    file at a path may be memory-mapped, or read past the page cache by ``past_cache`` (None: nothing is).
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
        self._location = location
        self._sizes = sizes_bytes or {}
        self._is_local = is_local
        self._past_cache = past_cache
        self._open: dict[str, _OpenFile] = {}
        self._mapped: dict[str, np.ndarray[Any, Any] | None] = {}
        self._lock = threading.Lock()

    def read(
        self, file: str, offset: int, target: np.ndarray[Any, Any], end: int | None = None
    ) -> int:
        opened = self._open.get(file) or self._opened(file)
        descriptor = opened.descriptor
        try:
            done = 0
            if self._past_cache is not None:
                end = end or offset + target.size
                while done < target.size and (
                    count := self._past_cache.read(
                        file, descriptor, offset + done, target[done:], end
                    )
                ):
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
            found = os.pread(descriptor, size, offset)
            while len(found) < size:
                more = os.pread(descriptor, size - len(found), offset + len(found))
                if not more:
                    break
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

    def mapped(self, file: str) -> np.ndarray[Any, Any] | None:
        """All bytes of a file as a private copy-on-write mapping: only changed pages take memory. While a
        view of it lives, a deleted file keeps its disk space. None if the system allows no (further) mapping.
        """
        if file not in self._mapped:
            self._mapped[file] = self._map(file)
        return self._mapped[file]

    def _map(self, file: str) -> np.ndarray[Any, Any] | None:
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

    def check(self, files: Iterable[str]) -> list[int]:
        found: list[int] = []
        for file in files:
            if file not in self._sizes:
                found.append(sys.maxsize)
                continue
            opened = self._opened(file)
            found.append(os.fstat(opened.descriptor).st_size)
        return found

    def _checked(self, file: str) -> _OpenFile:
        path = f"{self._location.path}/{file}"
        try:
            opened = _OpenFile(path)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            raise self._corrupt(file, _NO_FILE[error.errno]) from error
        status = os.fstat(opened.descriptor)
        expected = self._sizes.get(file, status.st_size)
        # A file that is too short is reported by the read, which can name the leaf.
        if stat.S_ISREG(status.st_mode) and status.st_size <= expected:
            if self._past_cache is not None:
                self._past_cache.opened(file, opened.descriptor, local=self._is_local(path))
            return opened
        opened.close()
        if not stat.S_ISREG(status.st_mode):
            raise self._corrupt(file, "is no regular file")
        raise self._corrupt(file, f"has {status.st_size} bytes, was saved with {expected}")

    def _corrupt(self, file: str, what: str) -> CheckpointCorrupt:
        folder = self._location.path.rpartition("/")[2]
        return CheckpointCorrupt(f"file {file} {what}", file=f"{folder}/{file}")

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
        self._mapped.clear()


def _part_of_most_files() -> int:
    """What one load may keep open of what this process may: a quarter. So do all mappings that hold a descriptor."""
    most = most_open_files()
    return sys.maxsize if most is None else most // 4
