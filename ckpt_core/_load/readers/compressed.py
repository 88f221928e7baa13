"""Opening a compressed array, whose chunks must not take more room than the record allows."""

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
)


def open_compressed(
    location: Location,
    item: NativeItem,
    leaf: int,
    key: str,
    index: Any,
    head: Callable[[int], bytes],
    context: Any,
) -> ForeignArray:
    """The array of a leaf, for TensorStore to decode one of its chunks.

    Args:
        location: of the item.
        item, leaf: what was saved.
        key: of the chunk.
        index: of the database.
        head: gives the first so many bytes of the chunk as it is stored.
        context: of the load.

    Raises:
        CheckpointCorrupt: it is not the array that the record describes, or the chunk would decode
            to more than it is: TensorStore makes room before it finds out.
    """
    name, spec, chunk = item.name_of(leaf), item.specs[leaf], item.chunks[leaf]
    described = index.get(f"{name}/zarr.json" if name else "zarr.json")  # refused if outside
    if described is not None and described.size_bytes > most_bytes("zarr.json"):
        raise CheckpointCorrupt(f"impossible zarr.json of {described.size_bytes} bytes", leaf=name)
    chunk_bytes = math.prod(chunk) * spec.numpy_dtype.itemsize
    if chunk_bytes > most_chunk_bytes(index[key].size_bytes):
        raise CheckpointCorrupt(f"impossible chunk of {chunk_bytes} bytes in {key}", leaf=name)
    if (item.codecs[leaf] or "").startswith("blosc"):
        refuse_blosc(head(BLOSC_HEADER_BYTES), chunk_bytes, name)
    array = open_array(location, name, context, cached=False)
    layout = tuple(array.store.chunk_layout.write_chunk.shape or ())
    if array.shape != spec.stored_shape or layout != chunk:
        raise CheckpointCorrupt(
            f"zarr.json says shape {array.shape} in chunks of {layout}, the record "
            f"{spec.stored_shape} in chunks of {chunk}",
            leaf=name,
        )
    return array
