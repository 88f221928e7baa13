"""Zip archives: members that are read and written as streams."""

from __future__ import annotations

import contextlib
import errno
import io
import struct
import traceback
import zipfile
from collections.abc import Generator, Iterable, Iterator
from typing import IO, Any, cast

from ckpt_core._errors import CheckpointCorrupt, CheckpointError

_ALIGNMENT = 64
_MOST_DIRECTORY_BYTES = 64 * 2**20
"""Maximum size of the list of members, of which zipfile makes about ten times as much."""
_TAIL_BYTES = 22 + 2**16 + 76
"""Where the size of that list stands: at the end, before a comment."""
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Of the other methods zipfile unpacks without a limit what few bytes hold: 2 KB of bzip2 are 2 GB."""
_LARGE_BYTES = 2**31 - 2**20
_SECOND_OF_1980 = (1980, 1, 1, 0, 0, 0)


@contextlib.contextmanager
def opened_zip(file: str | IO[bytes] | io.RawIOBase, where: str) -> Generator[zipfile.ZipFile]:
    """An archive, for reading; what is wrong with it is raised as damage."""
    try:
        with _stream(file) as stream:
            _refuse_long_directory(stream, where)
            with zipfile.ZipFile(stream) as archive:
                _refuse_members(archive.infolist(), where)
                yield archive
    except (CheckpointError, MemoryError, RecursionError):
        raise
    except Exception as error:  # a forged archive makes zipfile raise anything
        if not _is_of_zipfile(error):  # of what the caller does with the archive
            raise
        if (
            isinstance(error, OSError) and error.errno != errno.EINVAL
        ):  # a negative position is damage
            raise
        what = "cannot be unpacked" if isinstance(error, RuntimeError) else "damaged or cut short"
        raise CheckpointCorrupt(f"{where}: {what}: {error}", file=where) from error


def _stream(file: str | IO[bytes] | io.RawIOBase) -> contextlib.AbstractContextManager[Any]:
    return open(file, "rb") if isinstance(file, str) else contextlib.nullcontext(file)


def _refuse_long_directory(stream: Any, where: str) -> None:
    """Raises CheckpointCorrupt if the list of members is longer than of any checkpoint."""
    stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
    tail = stream.read(_TAIL_BYTES)
    said = [size for (size,) in _fields(tail, b"PK\6\6", 40, "<Q")]
    said += [size for (size,) in _fields(tail, b"PK\5\6", 12, "<I") if not said or size < 2**32 - 1]
    if max(said, default=0) > _MOST_DIRECTORY_BYTES:
        raise CheckpointCorrupt(
            f"{where}: it says that the names of its members take {max(said)} bytes, and at most "
            f"{_MOST_DIRECTORY_BYTES} are taken: it is damaged, or no checkpoint",
            file=where,
        )


def _fields(tail: bytes, mark: bytes, offset: int, form: str) -> Iterator[tuple[int, ...]]:
    """What stands at an offset after each mark."""
    at = tail.find(mark)
    while at >= 0:
        if at + offset + struct.calcsize(form) <= len(tail):
            yield struct.unpack_from(form, tail, at + offset)
        at = tail.find(mark, at + 1)


def _refuse_members(members: Iterable[zipfile.ZipInfo], where: str) -> None:
    seen = set[str]()
    for member in members:
        if member.filename in seen:
            raise CheckpointCorrupt(f"{where}: {member.filename!r} stands in it twice", file=where)
        seen.add(member.filename)
        if member.compress_type not in _BOUNDED:
            raise CheckpointError(
                f"{where}: {member.filename!r} is compressed by method {member.compress_type}, which says nothing of "
                "how much it becomes: make the archive anew without compression, or with deflate"
            )


def _is_of_zipfile(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("zipfile") for frame, _ in frames)


def most_member_bytes(member: zipfile.ZipInfo) -> int:
    """What a member can hold by its size in the archive; what it says of itself may be wrong."""
    if member.compress_type == zipfile.ZIP_STORED:
        return min(member.file_size, member.compress_size)
    return min(member.file_size, 1100 * member.compress_size + 1024)


def data_offset(stream: IO[bytes], member: zipfile.ZipInfo, where: str) -> int:
    """The position at which the bytes of an uncompressed member begin."""
    stream.seek(max(0, member.header_offset))
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


class _Sink(io.RawIOBase):
    """Takes what a zip writer writes, until it is fetched; cannot seek."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        self.position += len(data)
        return len(data)

    def tell(self) -> int:
        raise OSError("a stream")  # so that zipfile counts by itself

    def taken(self) -> Iterator[bytes]:
        pieces, self._pieces = self._pieces, []
        yield from pieces


def zip_pieces(members: Iterable[tuple[str, int, Iterable[Any]]]) -> Generator[bytes]:
    """An archive of uncompressed members (name, bytes, content) as a stream; contents begin at multiples of 64 bytes, to be memory-mapped."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, size, pieces in members:
            member = zipfile.ZipInfo(name, _SECOND_OF_1980)
            member.file_size = size
            large = size > _LARGE_BYTES
            head = sink.position + 30 + len(name.encode()) + 4 + (20 if large else 0)
            padding = -head % _ALIGNMENT
            member.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
            with archive.open(member, "w", force_zip64=large) as stream:
                yield from sink.taken()
                for piece in pieces:
                    stream.write(piece)
                    yield from sink.taken()
            yield from sink.taken()
    yield from sink.taken()
