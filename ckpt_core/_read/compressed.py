"""Decodes compressed chunks, and refuses those that would decode to more bytes than recorded."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._layout.chunks import chunk_of_key
from ckpt_core._read.wants import Array
from ckpt_core._saved import NativeCheckpoint, NativeItem, naming
from ckpt_core._storage import (
    BLOSC_HEADER_BYTES,
    INDEX_FILE,
    Extent,
    ForeignArray,
    Location,
    StoreContext,
    held_in_memory,
    most_chunk_bytes,
    open_array,
    read_region,
    refuse_blosc,
    refuse_file,
    refuse_without_memory,
)

_NOWHERE = Extent("", 0, 0)


class Decoder:
    """Decodes chunks of an item through TensorStore; ``index`` is that of the item's database."""

    def __init__(
        self,
        checkpoint: NativeCheckpoint,
        item: NativeItem,
        index: Mapping[str, tuple[str, int, int, bytes]],
        context: StoreContext,
    ) -> None:
        self._checkpoint = checkpoint
        self._item = item
        self._index = index
        self._context = context
        context()  # made here, on one thread
        self._location = checkpoint.location / item.directory
        # leaf and array: the chunks of a leaf are read one after the other
        self._last: tuple[int, ForeignArray] | None = None

    def decode(self, leaf: int, key: str, head: Callable[[int], bytes], out: Array) -> None:
        """TensorStore decodes a compressed chunk into ``out``; ``head`` returns its first n stored bytes."""
        with naming(self._checkpoint, self._item.paths[leaf]):
            array = self._opened(leaf, key, head)
        shape = self._item.specs[leaf].stored_shape
        region = tuple(
            (position * step, min((position + 1) * step, size))
            for position, step, size in zip(chunk_of_key(key)[1], out.shape, shape, strict=True)
        )
        out[...] = 0
        part = out[(*(slice(0, stop - start) for start, stop in region), ...)]
        read_region(array, region, self._item.name_of(leaf), part)

    def _opened(self, leaf: int, key: str, head: Callable[[int], bytes]) -> ForeignArray:
        """The TensorStore array of a leaf, through which one of its chunks can be decoded. Raises CheckpointCorrupt if zarr.json
        does not describe the array of the record, or if the chunk claims to decode to more bytes: TensorStore allocates those
        first. Raises MemoryError if there is too little memory for one.
        """
        item, index = self._item, self._index
        name, spec, chunk = item.name_of(leaf), item.specs[leaf], item.chunks[leaf]
        # that no entry refers to a file outside the item was checked when the index was decoded
        file, _, size_bytes, _ = index.get(f"{name}/zarr.json" if name else "zarr.json", _NOWHERE)
        if size_bytes > most_bytes("zarr.json"):
            raise CheckpointCorrupt(f"impossible zarr.json of {size_bytes} bytes", leaf=name)
        if file:  # TensorStore would wait for a pipe
            refuse_file(self._location, file, sys.maxsize)
        chunk_bytes = math.prod(chunk) * spec.numpy_dtype.itemsize
        if chunk_bytes > most_chunk_bytes(Extent(*index[key]).size_bytes):
            raise CheckpointCorrupt(f"impossible chunk of {chunk_bytes} bytes in {key}", leaf=name)
        refuse_without_memory(name, chunk_bytes)
        if (item.codecs[leaf] or "").startswith("blosc"):
            refuse_blosc(head(BLOSC_HEADER_BYTES), chunk_bytes, name)
        last = self._last
        if last is not None and last[0] == leaf:
            return last[1]
        array = open_array(
            self._location,
            name,
            self._context,
            limit_bytes=chunk_bytes,
            cached=False,
            manifest=self._manifest,
        )
        layout = tuple(array.store.chunk_layout.write_chunk.shape or ())
        if array.shape != spec.stored_shape or layout != chunk:
            raise CheckpointCorrupt(
                f"zarr.json says shape {array.shape} in chunks of {layout}, the record "
                f"{spec.stored_shape} in chunks of {chunk}",
                leaf=name,
            )
        self._last = leaf, array
        return array

    @functools.cached_property
    def _manifest(self) -> Location | None:
        """Where TensorStore finds the database's manifest, if not in the item."""
        data = self._checkpoint.record.small_files.get(self._item.file(INDEX_FILE))
        if data is None:
            return None
        return held_in_memory(self._location, INDEX_FILE, data, self._context)
