"""``<item>/checksums/process_N``, as in docs/format.md: CRC-32C of every block of every chunk that process N wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import crc32c
import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import dump_json, parse_json
from ckpt_core._layout.chunks import BLOCK_BYTES, blocks, keyed_parts
from ckpt_core._layout.regions import Region, Shape, region_slices

CHECKSUM_DIRECTORY = "checksums"


def dump_checksums(chunks: Mapping[str, Sequence[int]]) -> bytes:
    """The content of a checksum file."""
    return dump_json({"block_bytes": BLOCK_BYTES, "chunks": chunks})


def load_checksums(data: bytes, file: str) -> tuple[int, dict[str, list[int]]]:
    """Bytes of a block, and each chunk's block checksums by its key; raises CheckpointCorrupt if ``data`` is anything else."""
    value: Any = parse_json(data, file)
    described: dict[str, Any] = value if isinstance(value, dict) else {}
    block_bytes, chunks = described.get("block_bytes"), described.get("chunks")
    if type(block_bytes) is int and block_bytes > 0 and isinstance(chunks, dict):
        return block_bytes, cast("dict[str, list[int]]", chunks)
    none = type(block_bytes) is int and block_bytes < 1
    what = "blocks of no bytes" if none else "fields do not fit"
    raise CheckpointCorrupt(f"{file}: not a checksum file: {what}", file=file)


crc_of: Callable[..., int] = crc32c.crc32c
"""CRC-32C (Castagnoli, RFC 3720) of a buffer; continues that of earlier bytes, if it is given."""


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array in C order; without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def whole_chunk(
    values: np.ndarray[Any, Any], in_chunk: Region, chunk: Shape
) -> np.ndarray[Any, Any]:
    """A chunk as stored, padded with zeros beyond the array; ``in_chunk`` is the region of ``values`` in it."""
    if values.shape == chunk:
        return values
    padded = np.zeros(chunk, values.dtype)
    padded[region_slices(in_chunk)] = values
    return padded


def stored_chunks(
    name: str, pieces: Iterable[tuple[Region, np.ndarray[Any, Any]]], chunk: Shape
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Key and stored values of every chunk in an array's pieces."""
    prefix = f"{name}/" if name else ""
    for region, array in pieces:
        for key, part in keyed_parts(region, chunk):
            values = array if array.shape == chunk else array[region_slices(part.in_region)]
            yield prefix + key, whole_chunk(values, part.in_chunk, chunk)


def checksum_chunk(values: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """The checksums of a chunk's blocks, in order."""
    data = bytes_of(values)
    if data.size <= BLOCK_BYTES:
        return (crc_of(data),)
    return tuple(
        crc_of(data[block.offset_bytes : block.offset_bytes + block.size_bytes])
        for block in blocks(values.shape, values.itemsize)
    )
