"""``<item>/checksums/process_N``: CRC-32C of every block of every chunk that process N wrote.

One JSON object: ``block_bytes``, and ``chunks`` from the key of a chunk in the array database to
the checksums of its blocks in order. Blocks are cut by ``_plan.blocks`` over the decoded bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import crc32c
import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import dump_json, parse_json
from ckpt_core._plan import BLOCK_BYTES, Region, Shape, blocks, keyed_parts, region_slices

CHECKSUM_DIRECTORY = "checksums"


def dump_checksums(chunks: dict[str, list[int]]) -> bytes:
    """The file's bytes."""
    return dump_json({"block_bytes": BLOCK_BYTES, "chunks": chunks})


def load_checksums(data: bytes, file: str) -> tuple[int, dict[str, list[int]]]:
    """Block size and checksums by chunk key.

    Raises:
        CheckpointCorrupt: not such a file.
    """
    value: Any = parse_json(data, file)
    try:
        block_bytes, chunks = value["block_bytes"], value["chunks"]
        if type(block_bytes) is not int or block_bytes < 1 or not isinstance(chunks, dict):
            raise ValueError("fields do not fit")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{file}: not a checksum file: {error}", file=file) from error
    return block_bytes, cast("dict[str, list[int]]", chunks)


def crc_of(data: Any) -> int:
    """CRC-32C (Castagnoli, as in RFC 3720) of a contiguous buffer."""
    return crc32c.crc32c(data)


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array in C order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def whole_chunk(
    values: np.ndarray[Any, Any], in_chunk: Region, chunk: Shape
) -> np.ndarray[Any, Any]:
    """A chunk as it is stored: at the border of an array it is filled up with zeros."""
    if values.shape == chunk:
        return values
    padded = np.zeros(chunk, values.dtype)
    padded[region_slices(in_chunk)] = values
    return padded


def stored_chunks(
    name: str, pieces: Iterable[tuple[Region, np.ndarray[Any, Any]]], chunk: Shape
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Key and values of every chunk of an array's pieces, as they are stored."""
    prefix = f"{name}/" if name else ""
    for region, array in pieces:
        for key, part in keyed_parts(region, chunk):
            values = array if array.shape == chunk else array[region_slices(part.in_region)]
            yield prefix + key, whole_chunk(values, part.in_chunk, chunk)


def checksum_chunk(values: np.ndarray[Any, Any]) -> list[int]:
    """The checksums of the blocks of a chunk."""
    chunk, itemsize = values.shape, values.itemsize
    data = bytes_of(values)
    if data.size <= BLOCK_BYTES:
        return [crc_of(data)]
    return [
        crc_of(data[block.offset_bytes : block.offset_bytes + block.size_bytes])
        for block in blocks(chunk, itemsize)
    ]
