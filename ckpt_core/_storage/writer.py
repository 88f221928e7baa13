"""Writes the arrays of an item into data files, and notes what the item's index has to say."""

from __future__ import annotations

import functools
import json
import math
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import zstandard

from ckpt_core._background.threads import Workers
from ckpt_core._format.checksums import bytes_of, checksum_chunk, crc_of, whole_chunk
from ckpt_core._format.record import FileRecord
from ckpt_core._layout.chunks import BLOCK_BYTES, blocks, chunk_key, keyed_parts
from ckpt_core._layout.regions import Region, region_slices
from ckpt_core._layout.writers import INLINE_BYTES
from ckpt_core._options import KIB, codec_parts
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.encode import Rows
from ckpt_core._tree.leaves import LeafSpec

_WATCH_SECS = 0.1
_COPIED_BYTES = 16 * KIB
"""It is faster to copy arrays up to this size than to keep, and free at once, thousands of them."""
_ALIGNMENT_BYTES = 64
"""Values in data files begin at a multiple of it, so that they can be mapped."""

Piece = tuple[Region, np.ndarray[Any, Any]]
Place = tuple[str, int, int]
"""Path of a data file, offset and size of a value in it."""


@dataclass(slots=True)
class ArrayToWrite:
    """One array, and the pieces of it that this process writes."""

    name: str  # in the database
    spec: LeafSpec
    chunk: tuple[int, ...]
    pieces: tuple[Piece, ...]  # regions and values; no list, for the garbage collector's sake
    size_bytes: int  # of the pieces
    codec: str | None = None
    source: Any = None  # weak reference to the ``jax.Array`` that the values were copied from


class _Chunk(NamedTuple):
    """A chunk that waits to be written."""

    key: str
    values: np.ndarray[Any, Any]  # a view, of any order
    in_chunk: Region
    array: ArrayToWrite

    def stored(self) -> np.ndarray[Any, Any]:
        return whole_chunk(self.values, self.in_chunk, self.array.chunk)


class ArrayWriter:
    """Writes this process's arrays of one item, in the threads of ``workers``. ``write`` writes a file, durable if the save is, at a path
    relative to the item; data files have paths that start with ``prefix``. After ``settle``, ``rows``, ``checksums`` and ``files`` say what is where.
    """

    def __init__(
        self,
        write: Callable[[str, Iterable[Any]], object],
        workers: Workers,
        prefix: str,
        *,
        first: bool,  # also writes what describes the arrays, which is the same on all processes
        compressed: bool,  # whether any array of the item is
        file_bytes: int,
        max_host_bytes: int,
    ) -> None:
        self._write = write
        self._workers = workers
        self._prefix = prefix
        self._first = first
        self._compressed = compressed
        self._file_bytes = file_bytes
        self._limit_bytes = max_host_bytes
        self._described: dict[bytes, int] = {}  # zarr.json -> position of the value
        self._batch: list[tuple[int, bytes | _Chunk, bool]] = []  # position, content, is a chunk
        self._batch_bytes = self._copied_bytes = 0
        self._jobs: list[Future[None]] = []
        self._done_bytes: dict[int, int] = {}  # of each data file
        self.rows = Rows()
        self.checksums: dict[str, tuple[int, ...]] = {}  # of the blocks of each chunk, by key
        self.files: dict[str, FileRecord] = {}  # data files, by path in the item

    @property
    def done_bytes(self) -> int:
        """The bytes of arrays in files that are written."""
        return sum(self._done_bytes.copy().values())

    def put(self, arrays: Iterable[ArrayToWrite], copied_bytes: int = _COPIED_BYTES) -> None:
        """Begins to write arrays. Those of at most ``copied_bytes`` are copied, and lose their ``pieces``; the values of others must
        not change until ``settle``.
        """
        known: dict[Any, tuple[int, str | None]] = {}  # id(spec) hashes faster than the spec
        keys, which, checksums = self.rows.keys, self.rows.which, self.checksums
        for array in arrays:
            alike = id(array.spec), array.chunk, array.codec
            if alike not in known:
                known[alike] = self._describe(array)
            described, only_key = known[alike]
            prefix = f"{array.name}/" if array.name else ""
            if self._first:
                keys.append(f"{prefix}zarr.json")
                which.append(described)
            copied = array.codec is None and array.size_bytes <= copied_bytes
            for key, values, in_chunk in _chunks(array, prefix, only_key):
                keys.append(key)
                checksums[key] = ()
                chunk = _Chunk(key, values, in_chunk, array)
                if copied:
                    stored = values if values.shape == array.chunk else chunk.stored()
                    data = stored.tobytes()
                    small = len(data) <= BLOCK_BYTES
                    checksums[key] = (crc_of(data),) if small else checksum_chunk(stored)
                    which.append(self._place(data, True))
                    self._copied_bytes += len(data)
                else:
                    size_bytes = math.prod(array.chunk) * values.itemsize
                    which.append(self._queue(chunk, size_bytes, True))
            if copied:
                array.pieces = ()
                if self._copied_bytes > self._limit_bytes:
                    self.settle()

    def take_over(self, places: Mapping[str, Place]) -> None:
        """Adds chunks that stand in files already: key -> place."""
        rows, numbers = self.rows, dict[str, int]()
        for key, (path, offset, size_bytes) in places.items():
            if path not in numbers:
                numbers[path] = len(rows.paths)
                rows.paths.append(path)
            rows.keys.append(key)
            rows.which.append(position := rows.add())
            rows.put(position, numbers[path], offset, size_bytes)

    def start(self) -> None:
        """Begins to write what was put; does not wait for it."""
        if self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            number = len(self.rows.paths)
            self.rows.paths.append(self._prefix + secrets.token_hex(16))
            self._jobs.append(self._workers.submit(functools.partial(self._job, number, batch)))

    def settle(self, watch: Callable[[], None] = lambda: None) -> None:
        """Blocks until all that was put is in files; calls ``watch`` about every 0.1 s meanwhile."""
        self.start()
        while wait(self._jobs, _WATCH_SECS, FIRST_EXCEPTION).not_done:
            watch()
            if any(job.done() and job.exception() for job in self._jobs):
                break
        for job in self._jobs:
            job.result()
        self._jobs, self._copied_bytes = [], 0

    def _describe(self, array: ArrayToWrite) -> tuple[int, str | None]:
        """Position of the ``zarr.json`` of an array, and the key of its chunk if it has only one, else None."""
        shape, chunk = array.spec.stored_shape, array.chunk
        metadata = zarr_json(array.spec.stored_dtype, shape, chunk, array.codec)
        if self._first and metadata not in self._described:
            self._described[metadata] = self._place(metadata, False)
        return self._described.get(metadata, -1), chunk_key(
            (0,) * len(shape)
        ) if chunk == shape else None

    def _place(self, data: bytes, is_chunk: bool) -> int:
        """Stores bytes, in the index if they are few; returns the position of the value."""
        few = len(data) <= INLINE_BYTES
        return self.rows.add(data) if few else self._queue(data, len(data), is_chunk)

    def _queue(self, content: bytes | _Chunk, size_bytes: int, is_chunk: bool) -> int:
        if is_chunk and self._batch_bytes + size_bytes > self._file_bytes:
            self.start()
        self._batch_bytes += size_bytes * is_chunk
        position = self.rows.add()
        self._batch.append((position, content, is_chunk))
        return position

    def _job(self, number: int, batch: Sequence[tuple[int, bytes | _Chunk, bool]]) -> None:
        """Writes a data file. Its digest is of what no block checksum covers; the checksums of compressed chunks cover no stored byte."""
        crc = size_bytes = array_bytes = 0

        def parts() -> Iterator[Any]:
            nonlocal crc, size_bytes, array_bytes
            for position, content, is_chunk in batch:
                start = size_bytes
                pieces = self._pieces(content) if isinstance(content, _Chunk) else (content,)
                for piece in pieces:
                    if self._compressed or not is_chunk:
                        crc = zlib.crc32(piece, crc)
                    size_bytes += len(piece)
                    yield piece
                self.rows.put(position, number, start, size_bytes - start)
                array_bytes += (size_bytes - start) * is_chunk
                if padding := bytes(-size_bytes % _ALIGNMENT_BYTES):
                    crc = zlib.crc32(padding, crc)
                    size_bytes += len(padding)
                    yield padding

        path = self.rows.paths[number]
        self._write(path, parts())
        self.files[path] = FileRecord(size_bytes, crc, data=not self._compressed)
        self._done_bytes[number] = array_bytes

    def _pieces(self, chunk: _Chunk) -> Iterator[Any]:
        """The stored bytes of a chunk. A view that is not contiguous is copied block by block."""
        values, array = chunk.stored(), chunk.array
        if array.codec is not None:
            self.checksums[chunk.key] = checksum_chunk(values)
            yield _encoded(values, array.spec.stored_dtype, array.codec)
            return
        crcs: list[int] = []
        for block in blocks(values.shape, values.itemsize):
            data = bytes_of(values[block.start : block.stop] if values.shape else values)
            crcs.append(crc_of(data))
            yield data
        self.checksums[chunk.key] = tuple(crcs)


def _chunks(
    array: ArrayToWrite, prefix: str, only_key: str | None
) -> Iterator[tuple[str, np.ndarray[Any, Any], Region]]:
    """Key of every chunk in an array's pieces, its values, and their region in it; ``only_key`` if the array has one chunk."""
    for region, values in array.pieces:
        if only_key is not None and values.shape == array.chunk:
            yield prefix + only_key, values, region
            continue
        for key, part in keyed_parts(region, array.chunk):
            yield prefix + key, values[region_slices(part.in_region)], part.in_chunk


def _encoded(values: np.ndarray[Any, Any], dtype: str, codec: str) -> bytes:
    """A compressed chunk, as TensorStore reads it."""
    name, _, level = codec_parts(codec)
    if name == "zstd":
        return zstandard.ZstdCompressor(level).compress(bytes_of(values))
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "metadata": zarr_metadata(dtype, values.shape, values.shape, codec),
        "store_data_equal_to_fill_value": True,
    }
    array: Any = ts.open(spec, create=True, context=ts.Context()).result()
    array.write(values).result()
    return array.kvstore[chunk_key((0,) * values.ndim)]


@functools.lru_cache(4096)
def zarr_json(
    dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...], codec: str | None
) -> bytes:
    """The content of an array's ``zarr.json``."""
    return json.dumps(zarr_metadata(dtype, shape, chunk, codec)).encode()


def zarr_metadata(
    dtype: str, shape: Sequence[int], chunk: Sequence[int], codec: str | None
) -> dict[str, Any]:
    """``zarr.json`` of an array (zarr-specs, core v3)."""
    itemsize = np.dtype(_numpy_name(dtype)).itemsize
    codecs: list[dict[str, Any]] = [{"name": "bytes"}]
    if itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if codec is not None:
        codecs.append(_compressor(codec, itemsize))
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "fill_value": _fill_value(dtype),
    }


def _compressor(codec: str, itemsize: int) -> dict[str, Any]:
    name, compressor, level = codec_parts(codec)
    if name == "zstd":
        return {"name": "zstd", "configuration": {"level": level}}
    configuration = {
        "cname": compressor,
        "clevel": level,
        # Byte shuffle groups bytes of equal significance; single bytes (masks) need bit shuffle.
        "shuffle": "shuffle" if itemsize > 1 else "bitshuffle",
        "typesize": itemsize,
        "blocksize": 0,
    }
    return {"name": "blosc", "configuration": configuration}


def _numpy_name(dtype: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, dtype, dtype)


def _fill_value(dtype: str) -> Any:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if dtype.startswith(("int", "uint")) else 0.0
