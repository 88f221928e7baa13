"""``.msgpack``: trees as ``flax.serialization`` and ``flax.training.checkpoints`` write them. Flax is not needed.

The encoding is that of https://github.com/msgpack/msgpack/blob/master/spec.md; of the extension types of Flax, 1 and 3 are
an array and a scalar of numpy (each again msgpack: shape, name of the dtype, bytes in C order), 2 is a complex number. Arrays
above a GiB stand in several parts. A scanner of our own notes where arrays lie: libraries return their bytes.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Generator
from typing import IO, Any, NamedTuple, cast

import numpy as np

from ckpt_core._errors import CheckpointCorrupt, UnsupportedLeaf
from ckpt_core.convert._source import Array, Slot, Source, array_spec, read_at, source_of

_MOST_VALUES = 4_000_000
_MOST_LEVELS = 100
_MOST_TEXT_BYTES = 2**26
_IN_PARTS = "__msgpack_chunked_array__"
_NUMBERS = {
    **{0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"},
    **{0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"},
}
_CONSTANTS: dict[int, Any] = {0xC0: None, 0xC2: False, 0xC3: True}


class _Bytes(NamedTuple):
    """Where bytes lie in the file; ``code`` is that of an extension."""

    offset: int
    size: int
    code: int | None = None


class _Scanner:
    """Reads values one after the other, and skips the bytes of arrays."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self.stream, self._where = stream, where
        self.end = stream.seek(0, 2)
        self._left = _MOST_VALUES
        stream.seek(0)

    def damaged(self, why: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self._where}: damaged, cut short, or not what flax.serialization writes: {why}",
            file=self._where,
        )

    def bytes(self, count: int) -> bytes:
        found = self.stream.read(count) if count <= _MOST_TEXT_BYTES else b""
        if len(found) < count:
            raise self.damaged(f"{count} bytes are wanted at {self.stream.tell()} of {self.end}")
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def _skipped(self, count: int, code: int | None = None) -> _Bytes:
        offset = self.stream.tell()
        if offset + count > self.end:
            raise self.damaged(f"{count} bytes are wanted at {offset} of {self.end}")
        self.stream.seek(count, 1)
        return _Bytes(offset, count, code)

    def value(self, depth: int = 0) -> Any:
        """The value that begins here."""
        self._left -= 1
        if self._left < 0 or depth > _MOST_LEVELS:
            raise self.damaged("a tree without end")
        head = self.bytes(1)[0]
        if head < 0x80 or head >= 0xE0:
            return head if head < 0x80 else head - 0x100
        if head < 0xA0:
            return (self._map if head < 0x90 else self._list)(head & 0x0F, depth)
        if head < 0xC0:
            return self._text(head & 0x1F)
        if head in _CONSTANTS:
            return _CONSTANTS[head]
        if head in _NUMBERS:
            return self._number(_NUMBERS[head])
        if 0xD4 <= head <= 0xD8:
            return self._extension(1 << (head - 0xD4))
        size = {0: ">B", 1: ">H", 2: ">I"}
        for first, take in ((0xC4, self._skipped), (0xC7, self._extension), (0xD9, self._text)):
            if first <= head < first + 3:
                return take(self._number(size[head - first]))
        if 0xDC <= head <= 0xDF:
            count = self._number(">I" if head & 1 else ">H")
            return (self._list if head < 0xDE else self._map)(count, depth)
        raise self.damaged(f"no value begins with {head:#04x}")

    def _extension(self, count: int) -> _Bytes:
        code = self._number(">b")
        return self._skipped(count, code)

    def _text(self, count: int) -> str:
        return self.bytes(count).decode("utf-8")

    def _list(self, count: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise self.damaged(f"{key!r} is a key")
            if key in found:
                raise self.damaged(f"{key!r} stands in a map twice")
            found[key] = self.value(depth + 1)
        return found


class _File:
    """A file whose arrays are read when they are asked for."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._scanner, self._where = _Scanner(stream, where), where

    def tree(self) -> Any:
        found = self._scanner.value()
        if self._scanner.stream.tell() != self._scanner.end:
            raise self._scanner.damaged("more follows after its tree")
        return self._plain(found, "")

    def _plain(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            named: dict[Any, Any] = value
            if _IN_PARTS in named:
                return self._joined(named, path)
            return {key: self._plain(part, f"{path}/{key}") for key, part in named.items()}
        if isinstance(value, list):
            parts: list[Any] = value
            return [self._plain(part, f"{path}/{n}") for n, part in enumerate(parts)]
        if isinstance(value, _Bytes):
            return self._of_bytes(value, path)
        return value

    def _of_bytes(self, found: _Bytes, path: str) -> Any:
        where = f"{self._where}: {path.removeprefix('/')}"
        scanner = self._scanner
        scanner.stream.seek(found.offset)
        if found.code is None:
            return scanner.bytes(found.size)
        if found.code == 2:
            parts = scanner.value()
            if isinstance(parts, list) and [type(part) for part in parts] == [float, float]:
                return complex(*parts)
        elif found.code in (1, 3):
            return self._slot(scanner.value(), where, found)
        raise UnsupportedLeaf(
            f"{where} is a msgpack extension of type {found.code}, which Flax does not write for values of one process: "
            "a checkpoint holds arrays, numbers and text",
            leaf=path,
            type_name=f"extension {found.code}",
        )

    def _slot(self, parts: Any, where: str, found: _Bytes) -> Slot:
        match parts:
            case [list() as shape, str() as dtype, _Bytes(code=None) as data]:
                spec = array_spec(dtype, cast(list[int], shape), where)
            case _:
                raise self._scanner.damaged(f"{where} is no array")
        if data.size != spec.stored_bytes or self._scanner.stream.tell() != (
            found.offset + found.size
        ):
            raise self._scanner.damaged(f"{where} is {spec} in {data.size} bytes")
        return Slot(spec, (where, [data.offset]))

    def _joined(self, found: dict[Any, Any], path: str) -> Slot:
        """An array in parts, each of which is one of one dimension."""
        where = f"{self._where}: {path.removeprefix('/')}"
        try:
            shape = [found["shape"][str(n)] for n in range(len(found["shape"]))]
            chunks = [found["chunks"][str(n)] for n in range(len(found["chunks"]))]
            slots: list[Slot] = [self._of_bytes(chunk, path) for chunk in chunks]
            spec = array_spec(slots[0].spec.dtype, shape, where)
            (elements,) = (
                sum(sizes) for sizes in zip(*(slot.spec.shape for slot in slots), strict=True)
            )
            same = {slot.spec.dtype for slot in slots} == {spec.dtype}
            places = [slot.place[1][0] for slot in slots]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise self._scanner.damaged(f"{where} is no array in parts: {error!r}") from error
        if not same or elements != math.prod(shape):
            raise self._scanner.damaged(f"{where}: its parts are not one array")
        return Slot(spec, (where, [*zip(places, (slot.spec for slot in slots), strict=True)]))

    def read(self, slot: Slot) -> Array:
        where, places = slot.place
        if len(places) == 1 and isinstance(places[0], int):
            return read_at(self._scanner.stream, places[0], slot.spec, where)
        found = np.empty(math.prod(slot.spec.shape), slot.spec.numpy_dtype)
        begin = 0
        for offset, spec in places:
            part = read_at(self._scanner.stream, offset, spec, where)
            found[begin : begin + part.size] = part
            begin += part.size
        return found.reshape(slot.spec.shape)


@contextlib.contextmanager
def opened(path: str) -> Generator[Source]:
    """What ``flax.serialization.to_bytes`` or ``msgpack_serialize`` wrote into a file."""
    with open(path, "rb") as stream:
        file = _File(stream, path)
        try:
            tree = file.tree()
        except UnicodeDecodeError as error:
            raise CheckpointCorrupt(f"{path}: damaged: {error}", file=path) from error
        yield source_of(tree, file.read)
