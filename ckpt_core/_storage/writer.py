"""The OCDBT database of an item: where it lies, how it is opened, and how arrays are put in."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._errors import CheckpointError
from ckpt_core._fork import HOME_PID, forked
from ckpt_core._format.checksums import checksum_chunk, crc_of, stored_chunks
from ckpt_core._layout.chunks import chunk_parts
from ckpt_core._layout.regions import Region, region_slices
from ckpt_core._layout.writers import INLINE_BYTES
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.failures import failure
from ckpt_core._storage.zarr import layout_of, zarr_metadata
from ckpt_core._tree.leaves import LeafSpec

_CACHE_BYTES = 100_000_000
_NODE_BYTES = 64 * 1024
"""A node of the index: whoever wants few arrays of many reads few nodes, about 600 keys each."""
_WATCH_SECS = 0.1
_IO_THREADS = min(16, max(4, os.cpu_count() or 1))
"""More than there are cores write no faster, and take them from the training step."""
SMALL_LEAF_BYTES = 256 * 1024
"""Up to this size an array's chunks are cheaper as plain keys than through an opened array."""
_MANY_ARRAYS = 2000
_FIRST_SHARE = 0.7
"""Of many arrays so many go ahead: TensorStore is done with them when the rest has been queued."""
_LEAST_REST_BYTES = 1024 * 1024
"""A rest that is smaller would be a file too small to be shared with the next step."""

Piece = tuple[Region, np.ndarray[Any, Any]]
KeyRun = tuple[bytes, bytes]
"""First and last of a run of keys."""


class ArrayToWrite(NamedTuple):
    """One array: what is stored of it, and the pieces that this process writes.

    Attributes:
        name: in the database.
        spec: what is stored.
        chunk: shape of its chunks.
        pieces: regions with their values.
        size_bytes: of the pieces.
        codec: name of its compression, or None.
        source: weak reference to the ``jax.Array`` that it was taken from, or None.
    """

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    pieces: list[Piece]
    size_bytes: int
    codec: str | None = None
    source: Any = None

    @property
    def stored(self) -> tuple[str, tuple[int, ...], tuple[int, ...], str | None]:
        """Dtype, shape, chunk shape, codec."""
        return self.spec.stored_dtype, self.spec.stored_shape, self.chunk, self.codec


@dataclass(frozen=True, slots=True)
class Location:
    """A directory of a file system, or a prefix of an object store.

    Attributes:
        path: absolute path, or URL (``memory://``, ``s3://``, ``gs://``), without a slash at the end.
        local: whether it is a path of a file system.
    """

    path: str
    local: bool

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.path.rstrip('/')}/{name}", self.local)

    def spec(self) -> dict[str, Any]:
        """TensorStore's spec of it.

        Raises:
            CheckpointError: the path is no UTF-8.
        """
        if self.local:
            if any("\udc80" <= character <= "\udcff" for character in self.path):
                raise CheckpointError(
                    f"{self.path!r} is no UTF-8, and TensorStore, which writes and reads the arrays, takes "
                    "no other paths: give the directory another name"
                )
            return {"driver": "file", "path": self.path.rstrip("/") + "/"}
        return dict(ts.KvStore.Spec(self.path.rstrip("/") + "/").to_json())


@functools.cache
def _process_wide() -> Any:
    """What must outlive one save: the content of ``memory://``, which belongs to a context."""
    return ts.Context({"memory_key_value_store": {}})


def new_context(*, durable: bool = True) -> Any:
    """A context for one save or load, to be dropped after it.

    One context for all arrays of a save, since each context opens the database anew; not one per
    process, since its cache would answer for directories that were replaced meanwhile.

    Raises:
        ForkedProcess: in a forked child.
    """
    if os.getpid() != HOME_PID:
        raise forked()
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": _IO_THREADS},
            "file_io_sync": durable,
        },
        _process_wide(),
    )


def database_spec(
    location: Location, *, target_data_file_bytes: int | None = None
) -> dict[str, Any]:
    """Spec of the OCDBT database that lies at a location.

    Values of up to 100 bytes stand in the index itself.
    """
    spec: dict[str, Any] = {"driver": "ocdbt", "base": location.spec()}
    if target_data_file_bytes is not None:
        spec |= {
            "target_data_file_size": target_data_file_bytes,
            "config": {
                "max_inline_value_bytes": INLINE_BYTES,
                "max_decoded_node_bytes": _NODE_BYTES,
                "manifest_kind": "single",
            },
            "assume_config": True,
        }
    return spec


def counters() -> dict[str, float]:
    """TensorStore's counters of this process since its start: name -> sum, zeros left out.

    Raises:
        ForkedProcess: in a forked child.
    """
    if os.getpid() != HOME_PID:
        raise forked()
    found: dict[str, float] = {}
    for metric in ts.experimental_collect_matching_metrics("/tensorstore/"):
        values = [
            float(entry["value"])
            for entry in metric["values"]
            if isinstance(entry.get("value"), int | float)
        ]
        if values:
            found[metric["name"].removeprefix("/tensorstore/")] = sum(values)
    return found


class ArrayWriter:
    """Writes one process's arrays of one item; nothing is durable before ``finish``.

    Args:
        item: location of the item.
        process: index of this process.
        process_count: where one process writes alone, its database is the item's own, and only
            the data files lie where those of process 0 always do: there is nothing to merge.
        context: of the save.
        target_data_file_bytes: several files are written at once when the data exceeds it.
        max_host_bytes: a transaction holds its values in memory until it is committed, so it is
            cut at this size.
    """

    def __init__(
        self,
        item: Location,
        process: int,
        process_count: int,
        context: Any,
        *,
        target_data_file_bytes: int,
        max_host_bytes: int,
    ) -> None:
        folder = f"ocdbt.process_{process}"
        alone = process_count == 1
        self._spec = database_spec(
            item if alone else item / folder, target_data_file_bytes=target_data_file_bytes
        )
        if alone:
            self._spec["value_data_prefix"] = f"{folder}/d/"
        self._location = item
        self._context = context
        self._limit_bytes = max_host_bytes
        self._first = process == 0
        self._store: Any = ts.KvStore.open(self._spec, context=context).result()
        self._held_bytes = 0
        self._committing: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._transaction: Any = ts.Transaction(atomic=True)
        self._keys: Any = self._store.with_transaction(self._transaction)
        self._writes: list[Any] = []

    def take_over(self, child: str, runs: Sequence[KeyRun]) -> None:
        """Queues keys of a database in a directory below this one: their index entries, no data.

        Args:
            child: the directory, relative to this database.
            runs: first and last key of each run of keys.
        """
        doing = f"taking over {child}"
        spec = database_spec(self._location / child)
        source = settled(ts.KvStore.open(spec, context=self._context), doing)
        for first, last in runs:
            taken = ts.KvStore.KeyRange(first, last + b"\0")
            settled(source.experimental_copy_range_to(self._keys, taken), doing)

    def put(self, arrays: Sequence[ArrayToWrite]) -> dict[str, list[int]]:
        """Starts writing arrays, whose values must not change until ``finish``.

        Takes the values of small arrays out of their ``pieces``: TensorStore has copies of them.

        Returns:
            The checksums of their chunks, by key.
        """
        checksums: dict[str, list[int]] = {}
        large: list[ArrayToWrite] = []
        copied: list[list[Piece]] = []
        known: dict[Any, tuple[bytes, str | None]] = {}  # by what hashes faster than a spec
        ahead = self._going_ahead(arrays)
        for position, array in enumerate(arrays):
            if position == ahead:
                self.start()
                self._begin()
            name, spec, chunk, pieces, size_bytes, codec, _ = array
            layout = known.get((id(spec), chunk, codec))
            if layout is None:
                layout = known[id(spec), chunk, codec] = layout_of(*array.stored)
            metadata, only_key = layout
            prefix = f"{name}/" if name else ""
            if self._first:
                # the metadata is the same on all processes
                self._keys[f"{prefix}zarr.json"] = metadata
            if size_bytes > SMALL_LEAF_BYTES or codec is not None:
                self._put_large(array)
                large.append(array)
                continue
            if only_key is not None and len(pieces) == 1 and pieces[0][1].shape == chunk:
                chunks = ((prefix + only_key, pieces[0][1]),)
            else:
                chunks = stored_chunks(name, pieces, chunk)
            for key, values in chunks:
                data = values.tobytes()
                # a plain key is cheaper than an opened array (11 us against 110)
                self._make_room(len(data))
                self._keys[key] = data
                checksums[key] = [crc_of(data)]
            copied.append(pieces)
        self.start()
        # to free thousands of values takes a while: TensorStore is busy meanwhile
        for pieces in copied:
            pieces.clear()
        # checksums of what is large are computed while it is being written
        for array in large:
            for key, values in stored_chunks(array.name, array.pieces, array.chunk):
                checksums[key] = checksum_chunk(values)
        return checksums

    def _going_ahead(self, arrays: Sequence[ArrayToWrite]) -> int | None:
        """How many arrays are handed over while the others are queued; None where all wait.

        Where the first commit is slower than the queueing, the second one finds the manifest changed
        and writes its nodes again: on an object store that would be the rule.
        """
        if not self._location.local or len(arrays) < _MANY_ARRAYS:
            return None
        first = int(len(arrays) * _FIRST_SHARE)
        rest_bytes = sum(array.size_bytes for array in arrays[first:])
        return first if rest_bytes >= _LEAST_REST_BYTES else None

    def _put_large(self, array: ArrayToWrite) -> None:
        """Queues regions of an array with their values, which are referred to and not copied.

        What is compressed is held in memory until its transaction is committed.
        """
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
            pieces = _by_chunks(pieces, array.chunk)
        for region, values in pieces:
            self._make_room(values.nbytes)
            # the caller keeps the values unchanged until finish(), so no copy is needed
            part = store.with_transaction(self._transaction)[region_slices(region)]
            self._writes.append(part.write(values, can_reference_source_data_indefinitely=True))

    def _make_room(self, size_bytes: int) -> None:
        if self._held_bytes and self._held_bytes + size_bytes > self._limit_bytes:
            self.start()
            self.finish()
            self._begin()
            self._held_bytes = 0
        self._held_bytes += size_bytes

    def start(self) -> None:
        """Starts writing what was queued; the caller may compute meanwhile."""
        for write in self._writes:
            settled(write.copy, "writing arrays")
        self._committing.append(self._transaction.commit_async())

    def finish(self, watch: Callable[[], None] | None = None) -> None:
        """Waits until everything started is in the database, and durable if the context is.

        Args:
            watch: called now and then meanwhile.
        """
        for committing in self._committing:
            while watch is not None and not committing.done():
                with contextlib.suppress(TimeoutError):
                    committing.result(timeout=_WATCH_SECS)
                watch()
            settled(committing, "writing arrays")
        self._committing.clear()

    def abort(self) -> None:
        """Drops what was queued, and returns when nothing is being written any more."""
        self._transaction.abort()
        for future in [*(write.copy for write in self._writes), *self._committing]:
            future.exception()


def _by_chunks(pieces: Iterable[Piece], chunk: tuple[int, ...]) -> Iterator[Piece]:
    """The pieces cut at the borders of chunks."""
    for region, values in pieces:
        for part in chunk_parts(region, chunk):
            cut = tuple(
                (begin + start, begin + stop)
                for (begin, _), (start, stop) in zip(region, part.in_region, strict=True)
            )
            yield cut, values[region_slices(part.in_region)]


def settled(future: Any, doing: str) -> Any:
    """The value of TensorStore's future, once it is there.

    What a signal handler raises meanwhile comes out as it is, whatever its class.

    Raises:
        OSError, CheckpointError: the future's own failure.
    """
    error = future.exception()
    if error is not None:
        raise failure(error, doing) from error
    return future.result()
