"""Writes the arrays of an item into its OCDBT database."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._background.threads import Workers
from ckpt_core._format.checksums import checksum_chunk, crc_of, stored_chunks
from ckpt_core._layout.chunks import chunk_count, chunk_key, chunk_parts
from ckpt_core._layout.regions import Region, region_slices, whole
from ckpt_core._layout.writers import INLINE_BYTES
from ckpt_core._options import codec_parts
from ckpt_core._storage._tensorstore import StoreContext, ts
from ckpt_core._storage.failures import settled
from ckpt_core._storage.location import INDEX_FILE, NewDatabase, database_spec
from ckpt_core._storage.new_nodes import encode_index, place
from ckpt_core._storage.upload import Upload
from ckpt_core._tree.leaves import LeafSpec

_WATCH_SECS = 0.1
SMALL_LEAF_BYTES = 256 * 1024
"""Up to this size it is faster to write an array's chunks as plain keys than to open the array."""
_MANY_ARRAYS = 512
_TINY_LEAF_BYTES = 16 * 1024
"""So many arrays up to this size are written as a database of their own: TensorStore takes 5 us to queue a value."""
_VALUES_FOLDER = "ocdbt.values"
"""The database of many small values beside large ones, whose index is taken over; in the folder of the process."""
_FILE_BYTES = 16 * 1024 * 1024
_FILES_AT_ONCE = 3
"""Its data files have that size, and so many of them are written and synced at once."""

Piece = tuple[Region, np.ndarray[Any, Any]]
WriteFile = Callable[[str, bytes], None]
KeyRun = tuple[bytes, bytes]
"""First and last key of a contiguous run of keys."""


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

    @property
    def stored(self) -> tuple[str, tuple[int, ...], tuple[int, ...], str | None]:
        """Stored dtype and shape, chunk shape, codec."""
        return self.spec.stored_dtype, self.spec.stored_shape, self.chunk, self.codec


class ArrayWriter:
    """Writes this process's arrays of one item; nothing is durable before ``finish``. A transaction keeps its values in memory
    until it is committed, so a save larger than ``max_host_bytes`` is split into several; ``upload`` gets each. ``write_file``
    (None in an object store) writes a file, durable if the context is, at a path relative to the item that begins with a slash.
    """

    def __init__(
        self,
        item: NewDatabase,
        process: int,
        process_count: int,
        context: StoreContext,
        *,
        max_host_bytes: int,
        upload: Upload | None = None,
        write_file: WriteFile | None = None,
    ) -> None:
        self._database = item.of_process(process, process_count)
        self._spec = self._database.spec()
        self._location = item.location
        self._write_file = write_file
        self._empty = True
        self._context = context()
        self._upload = upload
        self._limit_bytes = max_host_bytes
        self._first = process == 0
        self._store: Any = ts.KvStore.open(self._spec, context=self._context).result()
        self._held_bytes = 0
        self._committing: deque[tuple[Any, int]] = deque()
        # nothing has an end in a store, if it is not given one
        self._timeout_secs = None if upload is None else upload.timeout_secs
        self._begin()

    def _begin(self) -> None:
        self._transaction: Any = ts.Transaction(atomic=True)
        self._keys: Any = self._store.with_transaction(self._transaction)
        self._writes: list[Any] = []

    def take_over(self, child: str, runs: Sequence[KeyRun]) -> None:
        """Queues copies of index entries, for these runs of keys, from a database in the directory ``child`` below; copies no data."""
        doing = f"taking over {child}"
        spec = database_spec(self._database.location / child)
        source = settled(ts.KvStore.open(spec, context=self._context), doing)
        self._empty = False
        for first, last in runs:
            taken = ts.KvStore.KeyRange(first, last + b"\0")
            settled(source.experimental_copy_range_to(self._keys, taken), doing)

    def put(self, arrays: Sequence[ArrayToWrite]) -> dict[str, tuple[int, ...]]:
        """Starts writing arrays and gives chunk key -> checksums of its blocks; their values must not change until ``finish``.
        Many small ones are written when it returns. Clears the ``pieces`` of small arrays, which are written or copied.
        """
        checksums: dict[str, tuple[int, ...]] = {}
        many: list[ArrayToWrite] = []
        if len(arrays) >= _MANY_ARRAYS and (many := self._many_of(arrays)):
            alone = self._empty and len(many) == len(arrays)
            checksums = self._put_many(many, alone=alone)
            if alone:
                return checksums
        large: list[ArrayToWrite] = []
        copied: list[ArrayToWrite] = []
        known: dict[Any, tuple[bytes, str | None]] = {}  # id(spec) hashes faster than the spec
        chosen = {array.name for array in many}
        for array in arrays:
            if array.name in chosen:
                continue
            name, spec, chunk, codec = array.name, array.spec, array.chunk, array.codec
            layout = known.get((id(spec), chunk, codec))
            if layout is None:
                layout = known[id(spec), chunk, codec] = layout_of(*array.stored)
            metadata, only_key = layout
            prefix = f"{name}/" if name else ""
            if self._first:
                # the metadata is the same on all processes
                self._keys[f"{prefix}zarr.json"] = metadata
                if self._upload is not None:
                    self._upload.metadata[f"{prefix}zarr.json"] = metadata
            if array.size_bytes > SMALL_LEAF_BYTES or codec is not None:
                self._put_large(array)
                large.append(array)
                continue
            for key, values in _chunks(array, prefix, only_key):
                data = values.tobytes()
                # A plain key takes 11 us, an opened array 110 us.
                self._make_room(len(data))
                self._keys[key] = data
                checksums[key] = (crc_of(data),)
            copied.append(array)
        self.start()
        # Freeing thousands of values takes time: do it while TensorStore writes.
        for array in copied:
            array.pieces = ()
        # Compute the checksums of large arrays while TensorStore writes them.
        for array in large:
            for key, values in stored_chunks(array.name, array.pieces, array.chunk):
                checksums[key] = checksum_chunk(values)
        return checksums

    def _many_of(self, arrays: Sequence[ArrayToWrite]) -> list[ArrayToWrite]:
        """The small ones, if they are many; none if few, or too large together to be in memory at once."""
        if self._write_file is None:
            return []
        small = [
            array
            for array in arrays
            if array.size_bytes <= _TINY_LEAF_BYTES and array.codec is None
        ]
        fits = sum(array.size_bytes for array in small) <= self._limit_bytes
        return small if len(small) >= _MANY_ARRAYS and fits else []

    def _put_many(
        self, arrays: Sequence[ArrayToWrite], *, alone: bool
    ) -> dict[str, tuple[int, ...]]:
        """Writes a database of small arrays: this one, if it holds no others, else one that it takes over."""
        checksums: dict[str, tuple[int, ...]] = {}
        keys: list[str] = []
        which: list[int] = []
        values: list[bytes] = []
        described: dict[bytes, int] = {}  # arrays of one layout have one zarr.json
        known: dict[Any, tuple[int, str | None]] = {}
        for array in arrays:
            name, spec, chunk = array.name, array.spec, array.chunk
            layout = known.get((id(spec), chunk))
            if layout is None:
                metadata, only_key = layout_of(*array.stored)
                where = described.setdefault(metadata, len(values))
                if where == len(values) and self._first:
                    values.append(metadata)
                layout = known[id(spec), chunk] = where, only_key
            where, only_key = layout
            prefix = f"{name}/" if name else ""
            for key, part in _chunks(array, prefix, only_key):
                data = part.tobytes()
                keys.append(key)
                which.append(len(values))
                values.append(data)
                checksums[key] = (crc_of(data),)
            if self._first:
                keys.append(f"{prefix}zarr.json")
                which.append(where)
            array.pieces = ()
        if keys:
            self._write_database(keys, which, values, alone=alone)
        return checksums

    def _write_database(
        self, keys: list[str], which: list[int], values: list[bytes], *, alone: bool
    ) -> None:
        write = self._write_file
        assert write is not None
        below, inside = self._database.location.path[len(self._location.path) :], ""
        child = f"{self._database.values_in}{_VALUES_FOLDER}"
        if alone:
            inside = self._database.values_in
        else:
            below += f"/{child}"
        name = f"d/{self._database.prefix}"
        placed = place(values, min(_FILE_BYTES, self._database.target_data_file_bytes))
        paths = [f"{inside}{name}{secrets.token_hex(16)}" for _ in placed.sizes_of_files]
        nodes_path = f"{name}{secrets.token_hex(16)}"
        encoded = [key.encode(errors="surrogateescape") for key in keys]

        def write_values(file: int) -> None:
            write(f"{below}/{paths[file]}", placed.content(file))

        with Workers(_FILES_AT_ONCE - 1, "ckpt-values") as workers:
            others = range(1, len(paths))
            writing = [workers.submit(functools.partial(write_values, file)) for file in others]
            if paths:
                write_values(0)
            nodes, manifest = encode_index(
                encoded, which, placed, paths, nodes_path, secrets.token_bytes(16), time.time_ns()
            )
            write(f"{below}/{nodes_path}", nodes)
            write(f"{below}/{INDEX_FILE}", manifest)
            for one in writing:
                one.result()
        if not alone:
            self.take_over(child, [(min(encoded), max(encoded))])

    def _put_large(self, array: ArrayToWrite) -> None:
        """Queues the regions of an array, which TensorStore references without a copy; compressed data is in memory until it is committed."""
        name = array.name
        store: Any = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**self._spec, "path": f"{name}/" if name else ""},
                "metadata": zarr_metadata(*array.stored),
                "store_data_equal_to_fill_value": True,
            },
            open=True,
            assume_metadata=True,
            context=self._context,
        ).result()
        pieces = array.pieces
        if array.codec is not None and array.size_bytes > self._limit_bytes:
            pieces = tuple(_by_chunks(pieces, array.chunk))
        for region, values in pieces:
            self._make_room(values.nbytes)
            # No copy is needed, because the caller does not change the values before finish().
            part = store.with_transaction(self._transaction)[region_slices(region)]
            write = functools.partial(part.write, can_reference_source_data_indefinitely=True)
            # One call in C: TensorStore crashes now and then if a signal handler raises between the
            # two, so that nobody waits for a write that has begun.
            self._writes.extend(map(write, (values,)))

    def _make_room(self, size_bytes: int) -> None:
        if self._held_bytes and self._held_bytes + size_bytes > self._limit_bytes:
            self.start()
            self._wait(0 if self._upload is None else self._upload.overlap)
            self._begin()
            self._held_bytes = 0
        self._held_bytes += size_bytes

    def start(self) -> None:
        """Starts the commit of the queued writes; does not wait for it."""
        for write in self._writes:
            settled(write.copy, "writing arrays")
        self._committing.append((self._transaction.commit_async(), self._held_bytes))

    def finish(self, watch: Callable[[], None] | None = None) -> None:
        """Blocks until all started writes are in the database, and durable if the context is; calls ``watch`` about every 0.1 s meanwhile."""
        while watch is not None and self._committing:
            with contextlib.suppress(TimeoutError):
                self._committing[-1][0].exception(timeout=_WATCH_SECS)
                break
            watch()
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Blocks until at most so many transactions are being committed."""
        while len(self._committing) > most:
            committing, size_bytes = self._committing[0]
            settled(committing, f"{self._location.path}: writing arrays", self._timeout_secs)
            self._committing.popleft()
            if self._upload is not None:
                self._upload.committed(size_bytes)

    def abort(self) -> None:
        """Drops the queued writes; blocks until running ones and uploads have ended."""
        # a write that has begun goes on in a thread of TensorStore, in the transaction
        self._settle([write.copy for write in self._writes])
        self._transaction.abort()
        # the newest may have been started, and its future lost to a signal handler's exception
        self._settle([self._transaction.future, *(future for future, _ in self._committing)])
        if self._upload is not None:
            self._upload.abandon()

    def _settle(self, futures: Iterable[Any]) -> None:
        """Blocks until all have ended, well or not."""
        for future in futures:
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=self._timeout_secs)


def _chunks(
    array: ArrayToWrite, prefix: str, only_key: str | None
) -> Iterable[tuple[str, np.ndarray[Any, Any]]]:
    """Key and stored values of every chunk in an array's pieces; ``only_key`` if the array has one chunk."""
    pieces = array.pieces
    if only_key is not None and len(pieces) == 1 and pieces[0][1].shape == array.chunk:
        return ((prefix + only_key, pieces[0][1]),)
    return stored_chunks(array.name, pieces, array.chunk)


def _by_chunks(pieces: Iterable[Piece], chunk: tuple[int, ...]) -> Iterator[Piece]:
    """The pieces, cut at chunk boundaries."""
    for region, values in pieces:
        for part in chunk_parts(region, chunk):
            cut = tuple(
                (begin + start, begin + stop)
                for (begin, _), (start, stop) in zip(region, part.in_region, strict=True)
            )
            yield cut, values[region_slices(part.in_region)]


def merge(item: NewDatabase, process_count: int, context: StoreContext) -> None:
    """Creates the item's database from those of all processes, without copying data; called on process 0, after all have written.
    It takes the context with which this process wrote: TensorStore copies index entries only between databases of one context.
    """
    processes = range(process_count)
    add(item, (item.of_process(process, process_count) for process in processes), context)


def add(item: NewDatabase, children: Iterable[NewDatabase], context: StoreContext) -> None:
    """Adds what databases in folders of an item's database hold, without copying data; creates it if need be."""
    doing = "merging the processes' databases"
    parent = settled(ts.KvStore.open(item.spec(), context=context()), doing)
    transaction: Any = ts.Transaction(atomic=True)
    target = parent.with_transaction(transaction)
    for database in children:
        child = settled(ts.KvStore.open(database.spec(), context=context()), doing)
        settled(child.experimental_copy_range_to(target), doing)
    settled(transaction.commit_async(), doing)


_ALIGNMENT = 64


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


@functools.lru_cache(4096)
def layout_of(
    dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...], codec: str | None
) -> tuple[bytes, str | None]:
    """``zarr.json`` of an array, and the key of its chunk if it has only one, else None."""
    metadata = json.dumps(zarr_metadata(dtype, shape, chunk, codec)).encode()
    # Values are stored in the order of their keys, an array's chunks before its zarr.json. Pad that
    # with blanks, so that the next array begins at a multiple of 64 bytes and can be mapped.
    size = math.prod(chunk) * np.dtype(_numpy_name(dtype)).itemsize
    count = chunk_count(whole(shape), chunk) if size > INLINE_BYTES else 0
    metadata += b" " * (-(len(metadata) + count * size) % _ALIGNMENT)
    return metadata, chunk_key((0,) * len(shape)) if chunk == shape else None
