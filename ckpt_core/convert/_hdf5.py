"""HDF5 inside of a zip archive; and what of it the library itself would not survive, found before it is opened."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from typing import IO, Any, cast

from ckpt_core._errors import CheckpointCorrupt

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_HEAP = b"GCOL\x01"
_HEAD_BYTES = 16
"""Of a heap, and of each object in it; both say after 8 bytes how long they are."""
_LEAST_HEAP_BYTES = 4096
_MOST_OBJECTS = 2_000_000
_LENGTHS_AT = {0: 14, 1: 14, 2: 10, 3: 10}
"""Version of the superblock -> where it says how many bytes a length has."""


def refuse_endless_heaps(path: str, begin: int = 0) -> None:
    """Raises CheckpointCorrupt for a file in which the HDF5 library would loop for ever, deaf to Ctrl-C. HDF5 2.0 walks
    through the objects of a global heap by the lengths stored in them, and notices neither a length of 0 nor one that
    leads back. ``begin``: where in the file HDF5 begins.
    """
    with open(path, "rb") as stream:
        if stream.seek(0, 2) <= begin + _HEAD_BYTES:
            return  # which the library reports
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            head = data[begin : begin + _HEAD_BYTES]
            lengths_at = _LENGTHS_AT.get(head[len(SIGNATURE)])
            if not head.startswith(SIGNATURE) or lengths_at is None or head[lengths_at] != 8:
                raise CheckpointCorrupt(
                    f"{path}: damaged, or no HDF5 as its libraries write it", file=path
                )
            left, at = _MOST_OBJECTS, data.find(_HEAP, begin)
            while at >= 0:
                left = _walked(data, at, left)
                if left < 0:
                    raise CheckpointCorrupt(
                        f"{path}: damaged: the heap at byte {at} has objects of impossible lengths",
                        file=path,
                    )
                at = data.find(_HEAP, at + 1)


def _walked(data: mmap.mmap, at: int, left: int) -> int:
    """What is left of a number of objects after those of the heap at a position; negative if it has no end."""
    if at + _HEAD_BYTES > len(data):
        return left
    (size,) = struct.unpack_from("<Q", data, at + 8)
    if not _LEAST_HEAP_BYTES <= size <= len(data) - at:
        return left  # no heap, or one that the library refuses
    offset = _HEAD_BYTES
    while offset + _HEAD_BYTES <= size and left >= 0:
        index, length = struct.unpack_from("<H6xQ", data, at + offset)
        taken = length if index == 0 else _HEAD_BYTES + -(-length // 8) * 8
        if taken < _HEAD_BYTES or offset + taken > size:
            return -1
        offset, left = offset + taken, left - 1
    return left


def data_offset(stream: IO[bytes], member: zipfile.ZipInfo, where: str) -> int:
    """The position at which the bytes of an uncompressed member begin."""
    stream.seek(member.header_offset)
    head = stream.read(30)
    if len(head) < 30 or head[:4] != b"PK\3\4" or member.compress_type != zipfile.ZIP_STORED:
        raise CheckpointCorrupt(
            f"{where}: {member.filename!r} is damaged, or compressed", file=where
        )
    names, extra = struct.unpack("<HH", head[26:])
    return member.header_offset + 30 + names + extra


class Window(io.RawIOBase):
    """``count`` bytes of a file from ``begin`` on, as a file of its own."""

    def __init__(self, stream: IO[bytes], begin: int, count: int) -> None:
        self._stream, self._begin, self._count, self._at = stream, begin, count, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = offset + (0, self._at, self._count)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._count - self._at)]
        self._stream.seek(self._begin + self._at)
        done: int = cast(Any, self._stream).readinto(view)
        self._at += done
        return done
