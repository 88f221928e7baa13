"""Writes the arrays of an item into data files, and notes what the item's index has to say."""

from __future__ import annotations

import functools
import json
import math
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import zstandard

from ckpt_core._background import Workers
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.checksums import bytes_of, checksum_chunk, crc_of, whole_chunk
from ckpt_core._format.record import FileRecord
from ckpt_core._layout.chunks import BLOCK_BYTES, INLINE_BYTES, blocks, chunk_key, keyed_parts
from ckpt_core._layout.regions import Region, Shape, region_slices
from ckpt_core._options import KIB, MIB, codec_parts
from ckpt_core._storage.arrays import BLOSC_HEADER_BYTES, refuse_blosc, refuse_without_memory
from ckpt_core._storage.encode import Rows
from ckpt_core._storage.location import result_of, ts, unreadable
from ckpt_core._tree.leaves import LeafSpec, dtype_from_name

_WATCH_SECS = 0.1
_COPIED_BYTES = 16 * KIB  # copying arrays up to this size is faster than keeping thousands of them
_COPIED_FILE_BYTES = 16 * MIB  # size of a data file of copied values
_ALIGNMENT_BYTES = 64  # values in data files begin at a multiple of it, so that they can be mapped
_PADDING = bytes(_ALIGNMENT_BYTES)
_DESCRIBED_BYTES = 64 * KIB  # a data file may be so much larger, for what describes its arrays

_FILL_VALUES = {"bool": False, "complex64": [0.0, 0.0], "complex128": [0.0, 0.0]}
Array = np.ndarray[Any, Any]
Piece = tuple[Region, Array]
Place = tuple[str, int, int]  # path of a data file, offset and size of a value in it


@dataclass(slots=True)
class ArrayToWrite:
    """One array, and the pieces of it that this process writes."""

    name: str  # in the database
    spec: LeafSpec
    chunk: Shape
    pieces: tuple[Piece, ...]  # regions and values; no list, for the garbage collector's sake
    size_bytes: int  # of the pieces
    codec: str | None = None
    source: Any = None  # weak reference to the ``jax.Array`` that the values were copied from


_Description = tuple[bytes, str | None]
"""``zarr.json`` of an array, and the key of its chunk if it has only one, else None."""


class _Chunk(NamedTuple):
    """A chunk that waits to be written."""

    key: str
    values: Array  # a view, of any order
    in_chunk: Region
    array: ArrayToWrite


_Content = tuple[int, bytes | _Chunk, bool]
"""Position of a value, its content, and whether that is a chunk, whose checksums cover it."""


@dataclass(slots=True)
class _Batch:
    """What the next data file of a kind will hold."""

    limit_bytes: int
    contents: list[_Content] = field(default_factory=list[Any])
    size_bytes: int = 0
    holds_chunks: bool = False  # else only what describes arrays


class ArrayWriter:
    """Writes this process's arrays of one item, in the threads of ``workers``. ``write`` writes a file at a path relative to the item;
    those of data files start with ``prefix``. After ``settle``, ``rows``, ``checksums`` and ``files`` say
    what is where; ``rows`` do after ``start``, unless the writer ``compresses``.
    """

    def __init__(
        self,
        write: Callable[[str, Iterable[Any]], object],
        workers: Workers,
        prefix: str,
        *,
        first: bool,  # also writes what describes the arrays, which is the same on all processes
        file_bytes: int,
        max_host_bytes: int,
    ) -> None:
        self._write, self._workers = write, workers
        self._prefix, self._first, self._limit_bytes = prefix, first, max_host_bytes
        self._described: dict[bytes, int] = {}  # zarr.json -> position of the value
        self._copies = _Batch(min(file_bytes, _COPIED_FILE_BYTES))
        self._views = _Batch(file_bytes + _DESCRIBED_BYTES)
        self._copied_bytes = 0  # since the last ``settle``
        self._jobs: list[Future[None]] = []
        self.compresses = False
        self.done_bytes = 0  # in files that are written; about, as threads add to it
        self.rows = Rows()
        self.checksums: dict[str, tuple[int, ...]] = {}  # of the blocks of each chunk, by key
        self.files: dict[str, FileRecord] = {}  # data files, by path in the item

    def put(self, arrays: Iterable[ArrayToWrite], copied_bytes: int = _COPIED_BYTES) -> None:
        """Begins to write arrays; values must stand still until ``settle``, but for arrays of at most ``copied_bytes``."""
        known: dict[Any, _Description] = {}
        keys, which, checksums = self.rows.keys, self.rows.which, self.checksums
        for array in arrays:
            if self._copied_bytes > self._limit_bytes:
                self.settle()
            spec, chunk, codec, size_bytes = array.spec, array.chunk, array.codec, array.size_bytes
            layout = known.get((id(spec), chunk, codec))  # hashes faster than the spec
            if layout is None:
                layout = _described(spec.stored_dtype, spec.stored_shape, chunk, codec)
                known[id(spec), chunk, codec] = layout
            metadata, only_key = layout
            small = size_bytes <= copied_bytes
            in_one = only_key is not None and len(array.pieces) == 1 and size_bytes <= BLOCK_BYTES
            copied = small and in_one and codec is None
            batch = self._copies if copied else self._views
            # its files hold no other arrays, which may change when it does not
            spans_files = not copied and size_bytes > batch.limit_bytes
            if spans_files:
                self._start(batch)
            prefix = f"{array.name}/" if array.name else ""
            if self._first:
                position = self._described.get(metadata)
                if position is None:
                    position = self._add(batch, metadata, len(metadata), False)
                    self._described[metadata] = position
                keys.append(f"{prefix}zarr.json")
                which.append(position)
            if copied:
                data = array.pieces[0][1].tobytes()
                key = f"{prefix}{only_key}"
                checksums[key] = (crc_of(data),)
                keys.append(key)
                which.append(self._add(batch, data, size_bytes))
                self._copied_bytes += size_bytes
                array.pieces = ()
                continue
            self.compresses = self.compresses or codec is not None
            for region, piece in array.pieces:
                for place, part in keyed_parts(region, chunk):
                    key, values = prefix + place, piece[region_slices(part.in_region)]
                    if small:
                        values = values.copy()
                        self._copied_bytes += values.nbytes
                    checksums[key] = ()  # until it is written
                    keys.append(key)
                    one = _Chunk(key, values, part.in_chunk, array)
                    which.append(self._add(batch, one, math.prod(chunk) * values.itemsize))
            if spans_files:
                self._start(batch)

    def take_over(self, places: Mapping[str, Place]) -> None:
        """Adds chunks that stand in files already: key -> place."""
        rows, numbers = self.rows, dict[str, int]()
        for key, (path, offset, size_bytes) in places.items():
            if path not in numbers:
                numbers[path] = len(rows.paths)
                rows.paths.append(path)
            rows.keys.append(key)
            rows.which.append(len(rows.inline))
            rows.inline.append(b"")
            rows.places.extend((numbers[path], offset, size_bytes))

    def start(self) -> None:
        """Begins to write what was put, into one file if it is not much; does not wait for it."""
        copies, views = self._copies, self._views
        if views.contents and views.size_bytes + copies.size_bytes <= views.limit_bytes:
            for position, _, _ in copies.contents:
                self.rows.places[3 * position + 1] += views.size_bytes
            views.contents += copies.contents
            views.size_bytes += copies.size_bytes
            copies.contents, copies.size_bytes = [], 0
        self._start(copies)
        self._start(views)

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

    def _add(
        self, batch: _Batch, content: bytes | _Chunk, size_bytes: int, is_chunk: bool = True
    ) -> int:
        """Adds a value to the next file, or to the index if it is small; returns its position."""
        rows, position = self.rows, len(self.rows.inline)
        if size_bytes <= INLINE_BYTES and isinstance(content, bytes):
            rows.inline.append(content)
            rows.places.extend((-1, 0, size_bytes))
            return position
        if batch.holds_chunks and batch.size_bytes + size_bytes > batch.limit_bytes:
            self._start(batch)
        batch.holds_chunks = batch.holds_chunks or is_chunk
        rows.inline.append(b"")
        rows.places.extend((0, batch.size_bytes, size_bytes))
        batch.contents.append((position, content, is_chunk))
        batch.size_bytes += size_bytes + -size_bytes % _ALIGNMENT_BYTES
        return position

    def _start(self, batch: _Batch) -> None:
        if batch.contents:
            number = len(self.rows.paths)
            self.rows.paths.append(self._prefix + secrets.token_hex(16))
            for position, _, _ in batch.contents:
                self.rows.places[3 * position] = number
            job = functools.partial(self._write_file, number, batch.contents)
            batch.contents, batch.size_bytes, batch.holds_chunks = [], 0, False
            self._jobs.append(self._workers.submit(job))

    def _write_file(self, number: int, contents: Sequence[_Content]) -> None:
        """Job: writes a data file. Its digest is of what no block checksum covers: of all, if chunks are compressed."""
        compressed = any(isinstance(one, _Chunk) and one.array.codec for _, one, _ in contents)
        crc = size_bytes = 0

        def parts() -> Iterator[Any]:
            nonlocal crc, size_bytes
            for position, content, is_chunk in contents:
                start = size_bytes
                for part in (content,) if isinstance(content, bytes) else self._parts(content):
                    if compressed or not is_chunk:
                        crc = zlib.crc32(part, crc)
                    size_bytes += len(part)
                    yield part
                if compressed:
                    self.rows.places[3 * position + 1] = start
                    self.rows.places[3 * position + 2] = size_bytes - start
                if padding := _PADDING[: -size_bytes % _ALIGNMENT_BYTES]:
                    crc = zlib.crc32(padding, crc)
                    size_bytes += len(padding)
                    yield padding

        path = self.rows.paths[number]
        self._write(path, parts())
        self.files[path] = FileRecord(size_bytes, crc, data=not compressed)
        self.done_bytes += size_bytes

    def _parts(self, chunk: _Chunk) -> Iterator[Any]:
        """The stored bytes of a chunk. A view that is not contiguous is copied block by block."""
        array = chunk.array
        values = whole_chunk(chunk.values, chunk.in_chunk, array.chunk)
        if array.codec is not None:
            self.checksums[chunk.key] = checksum_chunk(values)
            yield _encoded(values, chunk.key, array.spec.stored_dtype, array.codec)
            return
        crcs: list[int] = []
        for block in blocks(values.shape, values.itemsize):
            data = bytes_of(values[block.start : block.stop] if values.shape else values)
            crcs.append(crc_of(data))
            yield data
        self.checksums[chunk.key] = tuple(crcs)


def _encoded(values: Array, key: str, dtype: str, codec: str) -> bytes:
    """A compressed chunk, as TensorStore reads it."""
    name, _, level = codec_parts(codec)
    if name == "zstd":
        return zstandard.ZstdCompressor(level).compress(bytes_of(values).data)
    array = _in_memory(dtype, values.shape, codec)
    result_of(array.write(values), f"{key}: cannot compress with {codec}")
    return array.kvstore[chunk_key((0,) * values.ndim)]


def decode_chunk(data: memoryview, name: str, dtype: str, codec: str, out: Array) -> None:
    """Decodes a compressed chunk of an array into ``out``, which is contiguous; CheckpointCorrupt if it does not fill that."""
    refuse_without_memory(name, out.nbytes)
    if codec_parts(codec)[0] == "zstd":
        try:
            with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                got = reader.readinto(out.reshape(-1).view(np.uint8).data) if out.size else 0
                is_all = got == out.nbytes and not reader.read(1)
        except zstandard.ZstdError as error:
            raise CheckpointCorrupt(f"a chunk cannot be decoded: {error}", leaf=name) from error
        if not is_all:
            raise CheckpointCorrupt(f"a chunk does not decode to {out.nbytes} bytes", leaf=name)
        return
    refuse_blosc(data[:BLOSC_HEADER_BYTES], out.nbytes, name)
    array = _in_memory(dtype, out.shape, codec)
    array.kvstore[chunk_key((0,) * out.ndim)] = bytes(data)
    try:
        ts.array(out).write(array).result()
    except ValueError as error:
        raise unreadable(error, "a chunk cannot be decoded", leaf=name) from error


def _in_memory(dtype: str, chunk: Shape, codec: str) -> Any:
    """An array of TensorStore with one chunk, by which that is encoded or decoded."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "metadata": zarr_metadata(dtype, chunk, chunk, codec),
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, create=True, context=ts.Context()).result()


@functools.lru_cache(4096)
def _described(dtype: str, shape: Shape, chunk: Shape, codec: str | None) -> _Description:
    metadata = json.dumps(zarr_metadata(dtype, shape, chunk, codec)).encode()
    return metadata, chunk_key((0,) * len(shape)) if chunk == shape else None


def zarr_metadata(dtype: str, shape: Shape, chunk: Shape, codec: str | None) -> dict[str, Any]:
    """``zarr.json`` of an array (zarr-specs, core v3)."""
    itemsize = dtype_from_name(dtype).itemsize
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
        "fill_value": _FILL_VALUES.get(dtype, 0 if dtype.startswith(("int", "uint")) else 0.0),
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
