"""Opens a compressed array, and refuses chunks that would decode to more bytes than recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.limits import most_bytes
from ckpt_core._load.checkpoint import NativeItem
from ckpt_core._storage import (
    BLOSC_HEADER_BYTES,
    ForeignArray,
    Location,
    most_chunk_bytes,
    open_array,
    refuse_blosc,
    refuse_without_memory,
)


def open_compressed(
    location: Location,
    item: NativeItem,
    leaf: int,
    key: str,
    index: Any,
    head: Callable[[int], bytes],
    context: Any,
    manifest: Location | None,
) -> ForeignArray:
    """The TensorStore array of a leaf, through which one of its chunks can be decoded.

    Args:
        location: location of the item.
        item: the saved item.
        leaf: position of the leaf.
        key: key of the chunk in the database.
        index: index of the database.
        head: returns the first n stored bytes of the chunk.
        context: TensorStore context of the load.
        manifest: where the database's manifest is, if not in the item.

    Raises:
        CheckpointCorrupt: zarr.json does not describe the array of the record, or the chunk claims
            to decode to more bytes than the record allows. That is checked here because TensorStore
            allocates the claimed size before it decodes.
        MemoryError: this process has too little memory to decode one.
    """
    name, spec, chunk = item.name_of(leaf), item.specs[leaf], item.chunks[leaf]
    # index.get raises if the entry refers to a file outside the item
    described = index.get(f"{name}/zarr.json" if name else "zarr.json")
    if described is not None and described.size_bytes > most_bytes("zarr.json"):
        raise CheckpointCorrupt(f"impossible zarr.json of {described.size_bytes} bytes", leaf=name)
    chunk_bytes = math.prod(chunk) * spec.numpy_dtype.itemsize
    if chunk_bytes > most_chunk_bytes(index[key].size_bytes):
        raise CheckpointCorrupt(f"impossible chunk of {chunk_bytes} bytes in {key}", leaf=name)
    refuse_without_memory(name, chunk_bytes)
    if (item.codecs[leaf] or "").startswith("blosc"):
        refuse_blosc(head(BLOSC_HEADER_BYTES), chunk_bytes, name)
    array = open_array(
        location, name, context, limit_bytes=chunk_bytes, cached=False, manifest=manifest
    )
    layout = tuple(array.store.chunk_layout.write_chunk.shape or ())
    if array.shape != spec.stored_shape or layout != chunk:
        raise CheckpointCorrupt(
            f"zarr.json says shape {array.shape} in chunks of {layout}, the record "
            f"{spec.stored_shape} in chunks of {chunk}",
            leaf=name,
        )
    return array
