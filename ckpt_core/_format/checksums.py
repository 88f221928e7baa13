"""``<item>/checksums/process_N``: CRC-32C of every block of every chunk that process N wrote.

One JSON object: ``block_bytes``, and ``chunks`` from the key of a chunk in the array database to
the checksums of its blocks in order. Blocks are cut by ``_layout.chunks.blocks`` over the decoded bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import crc32c
import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import dump_json, parse_json
from ckpt_core._layout.chunks import BLOCK_BYTES, blocks, keyed_parts
from ckpt_core._layout.regions import Region, Shape, region_slices

CHECKSUM_DIRECTORY = "checksums"


def dump_checksums(chunks: dict[str, list[int]]) -> bytes:
    """The file's bytes."""
    return dump_json({"block_bytes": BLOCK_BYTES, "chunks": chunks})


class Checksums:
    """The checksums of blocks, by chunk key, that one file holds.

    Args:
        data: of the file.
        file: its name, for messages.
        few: whether few chunks will be asked for: they are then found in the text, as what
            ``dump_checksums`` wrote, without making values of all of it.

    Attributes:
        block_bytes: about how much a block covers.

    Raises:
        CheckpointCorrupt: not such a file.
    """

    def __init__(self, data: bytes, file: str, *, few: bool = False) -> None:
        self._file = file
        self._searches_left = _SEARCHES
        head = _HEAD.match(data) if few else None
        if head is not None:
            self.block_bytes = int(head[1])
            self._text = data
            return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._text = b""
        value: Any = parse_json(data, self._file)
        try:
            self.block_bytes, chunks = value["block_bytes"], value["chunks"]
            if type(self.block_bytes) is not int or not isinstance(chunks, dict):
                raise ValueError("fields do not fit")
        except (KeyError, TypeError, ValueError) as error:
            raise self._bad(error) from error
        if self.block_bytes < 1:
            raise self._bad("blocks of no bytes")
        self._chunks = cast("dict[str, list[int]]", chunks)

    def get(self, key: str) -> list[int] | None:
        """The checksums of a chunk's blocks in order, or None where the file has none."""
        if self._text and not self._searches_left:
            self._parse(self._text)
        if not self._text:
            return self._chunks.get(key)
        self._searches_left -= 1
        # a quote inside of a key is escaped, so one after a comma or a brace begins a key
        wanted = dump_json(key) + b":["
        start = self._text.find(wanted)
        while start >= 0 and self._text[start - 1] not in b",{":
            start = self._text.find(wanted, start + 1)
        if start < 0:
            return None
        start += len(wanted) - 1
        found: Any = parse_json(self._text[start : self._text.find(b"]", start) + 1], self._file)
        return found

    def _bad(self, what: object) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._file}: not a checksum file: {what}", file=self._file)


_SEARCHES = 64
"""So many in the text take about as long as making values of all of it."""
_HEAD = re.compile(rb'\{"block_bytes":([1-9][0-9]{0,15}),"chunks":\{')


def crc_of(data: Any, before: int = 0) -> int:
    """CRC-32C (Castagnoli, as in RFC 3720) of a contiguous buffer, or of what came before and it."""
    return crc32c.crc32c(data, before)


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
