"""``<item>/checksums/process_N``: CRC-32C of every block of every chunk that process N wrote.

One JSON object: ``block_bytes``, and ``chunks``, which maps the key of a chunk in the array
database to the list of its blocks' checksums. ``_layout.chunks.blocks`` cuts the uncompressed bytes
into blocks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import crc32c
import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import dump_json, parse_json
from ckpt_core._layout.chunks import BLOCK_BYTES, blocks, keyed_parts
from ckpt_core._layout.regions import Region, Shape, region_slices

CHECKSUM_DIRECTORY = "checksums"
_DUMPED_AT_ONCE = 256


def dump_checksums(chunks: Mapping[str, Sequence[int]]) -> bytes:
    """The content of a checksum file."""
    # json makes a tuple of each entry of a dict before it begins, which the garbage collector looks after: of many
    # thousand it takes as long as the rest. So a few at a time.
    left = iter(chunks.items())
    pieces: list[bytes] = []
    while some := dict(itertools.islice(left, _DUMPED_AT_ONCE)):
        pieces.append(dump_json(some)[1:-1])
    return b'{"block_bytes":%d,"chunks":{%s}}' % (BLOCK_BYTES, b",".join(pieces))


class Checksums:
    """The block checksums in one file, by chunk key; CheckpointCorrupt if it is no checksum file. With ``few`` they
    are searched for in the text, without parsing all of it, if the text is as ``dump_checksums`` writes it.
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
        """The checksums of a chunk's blocks, in order; None if the file does not have the chunk."""
        if self._text and not self._searches_left:
            self._parse(self._text)
        if not self._text:
            return self._chunks.get(key)
        self._searches_left -= 1
        # Quotes inside a key are escaped, so a quote after a comma or brace begins a key.
        wanted = dump_json(key) + b":["
        start = self._text.find(wanted)
        while start >= 0 and self._text[start - 1] not in b",{":
            start = self._text.find(wanted, start + 1)
        if start < 0:
            return None
        start += len(wanted) - 1
        found: Any = parse_json(self._text[start : self._text.find(b"]", start) + 1], self._file)
        return found

    @property
    def keys(self) -> Iterable[str]:
        """The keys of all chunks in the file."""
        if self._text:
            self._parse(self._text)
        return self._chunks.keys()

    def _bad(self, what: object) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._file}: not a checksum file: {what}", file=self._file)


_SEARCHES = 64
"""Number of text searches that take about as long as parsing the whole file."""
_HEAD = re.compile(rb'\{"block_bytes":([1-9][0-9]{0,15}),"chunks":\{')


crc_of: Callable[..., int] = crc32c.crc32c
"""CRC-32C (Castagnoli, RFC 3720) of a buffer; continues that of earlier bytes, if it is given."""


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array in C order; without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def whole_chunk(
    values: np.ndarray[Any, Any], in_chunk: Region, chunk: Shape
) -> np.ndarray[Any, Any]:
    """A chunk as stored: one that extends beyond the array is padded with zeros. ``in_chunk`` is the region of
    ``values`` in the chunk.
    """
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
    chunk, itemsize = values.shape, values.itemsize
    data = bytes_of(values)
    if data.size <= BLOCK_BYTES:
        return (crc_of(data),)
    return tuple(
        crc_of(data[block.offset_bytes : block.offset_bytes + block.size_bytes])
        for block in blocks(chunk, itemsize)
    )
