"""Arrays into the OCDBT database of one process, and the merge of all processes' databases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from ckpt_core._format.checksums import whole_chunk
from ckpt_core._plan import Region, chunk_key, chunk_parts, region_slices
from ckpt_core._storage.context import Location, database_spec, system_error

SMALL_LEAF_BYTES = 256 * 1024
"""Below this, a chunk written as a plain key is cheaper than an opened array (11 us against 110)."""

Piece = tuple[Region, np.ndarray[Any, Any]]


def zarr_metadata(dtype: str, shape: Sequence[int], chunk: Sequence[int], zstd_level: int | None) -> dict[str, Any]:
    """``zarr.json`` of an array (zarr-specs, core v3)."""
    codecs: list[dict[str, Any]] = [{"name": "bytes"}]
    if np.dtype(_numpy_name(dtype)).itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if zstd_level is not None:
        codecs.append({"name": "zstd", "configuration": {"level": zstd_level}})
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


def _numpy_name(dtype: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, dtype, dtype)


def _fill_value(dtype: str) -> Any:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if dtype.startswith(("int", "uint")) else 0.0


class ArrayWriter:
    """Writes one process's arrays of one item; nothing is durable before ``finish``.

    Args:
        item: location of the item.
        process: index of this process.
        context: of the save.
        target_data_file_bytes: several files are written at once when the data exceeds it.
        max_host_bytes: a transaction holds its values in memory until it is committed, so it is
            cut at this size.
    """

    def __init__(
        self,
        item: Location,
        process: int,
        context: Any,
        *,
        target_data_file_bytes: int,
        max_host_bytes: int,
        zstd_level: int | None = None,
    ) -> None:
        self._spec = database_spec(
            item / f"ocdbt.process_{process}", target_data_file_bytes=target_data_file_bytes
        )
        self._context = context
        self._limit_bytes = max_host_bytes
        self._zstd_level = zstd_level
        self._metadata: dict[Any, bytes] = {}
        self._store: Any = ts.KvStore.open(self._spec, context=context).result()
        self._begin()

    def _begin(self) -> None:
        self._transaction: Any = ts.Transaction(atomic=True)
        self._keys: Any = self._store.with_transaction(self._transaction)
        self._held_bytes = 0
        self._writes: list[Any] = []

    def put(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        chunk: Sequence[int],
        pieces: Sequence[Piece],
        *,
        describe: bool = True,
    ) -> None:
        """Queues the pieces of an array that this process writes.

        Args:
            name: of the array.
            dtype: stored dtype.
            shape: of the whole array.
            chunk: chunk grid.
            pieces: regions and their values, which must not change until ``finish``.
            describe: whether this process also writes the array's metadata.
        """
        prefix = f"{name}/" if name else ""
        key = (dtype, tuple(shape), tuple(chunk))
        if describe:
            self._keys.write(prefix + "zarr.json", self._zarr_json(*key))
        for region, array in pieces:
            if self._held_bytes and self._held_bytes + array.nbytes > self._limit_bytes:
                self._flush()
            self._held_bytes += array.nbytes
            if array.nbytes <= SMALL_LEAF_BYTES and self._zstd_level is None:
                self._put_keys(prefix, region, array, tuple(chunk))
            else:
                self._put_array(prefix, key, region, array)

    def _zarr_json(self, dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
        key = (dtype, shape, chunk)
        found = self._metadata.get(key)
        if found is None:
            found = json.dumps(zarr_metadata(dtype, shape, chunk, self._zstd_level)).encode()
            self._metadata[key] = found
        return found

    def _put_keys(self, prefix: str, region: Region, array: np.ndarray[Any, Any], chunk: tuple[int, ...]) -> None:
        for part in chunk_parts(region, chunk):
            values = array if array.shape == chunk else array[region_slices(part.in_region)]
            stored = whole_chunk(values, part.in_chunk, chunk)
            self._keys.write(prefix + chunk_key(part.index), stored.tobytes())

    def _put_array(self, prefix: str, key: Any, region: Region, array: np.ndarray[Any, Any]) -> None:
        dtype, shape, chunk = key
        store: Any = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**self._spec, "path": prefix},
                "metadata": zarr_metadata(dtype, shape, chunk, self._zstd_level),
                "store_data_equal_to_fill_value": True,
            },
            open=True,
            assume_metadata=True,
            context=self._context,
            transaction=self._transaction,
        ).result()
        # the caller keeps the values unchanged until finish(), so no copy is needed
        write = store[region_slices(region)].write(array, can_reference_source_data_indefinitely=True)
        self._writes.append(write)

    def _flush(self) -> None:
        self.start()
        self._wait()
        self._begin()

    def start(self) -> None:
        """Starts writing what was queued; the caller may compute meanwhile."""
        try:
            for write in self._writes:
                write.copy.result()
            self._committing: Any = self._transaction.commit_async()
        except Exception as error:
            raise system_error(error, "writing arrays") from error

    def _wait(self) -> None:
        try:
            self._committing.result()
        except Exception as error:
            raise system_error(error, "writing arrays") from error

    def finish(self) -> None:
        """Waits until everything started is in the database, and durable if the context is."""
        self._wait()

    def abort(self) -> None:
        """Drops what was queued."""
        self._transaction.abort()


def merge(item: Location, process_count: int, context: Any, *, target_data_file_bytes: int) -> None:
    """Makes the item's database out of those of all processes, without copying any data.

    Must use the context in which this process wrote: TensorStore copies index entries between
    databases only within one context.
    """
    try:
        parent_spec = database_spec(item, target_data_file_bytes=target_data_file_bytes)
        parent: Any = ts.KvStore.open(parent_spec, context=context).result()
        transaction: Any = ts.Transaction(atomic=True)
        target = parent.with_transaction(transaction)
        for process in range(process_count):
            spec = database_spec(
                item / f"ocdbt.process_{process}", target_data_file_bytes=target_data_file_bytes
            )
            child: Any = ts.KvStore.open(spec, context=context).result()
            child.experimental_copy_range_to(target).result()
        transaction.commit_async().result()
    except Exception as error:
        raise system_error(error, "merging the processes' databases") from error
