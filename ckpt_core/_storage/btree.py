"""Decodes the manifest and the nodes of an OCDBT database: a B+tree from keys to file ranges.

The format is described in https://google.github.io/tensorstore/kvstore/ocdbt/#storage-format. This is
not left to ``tensorstore.ocdbt.dump``, which in TensorStore 0.1.86 never frees what it returns: 1 KB
for each leaf in every save and load.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import NamedTuple

import crc32c
import numpy as np

from ckpt_core._format.packed import decompress
from ckpt_core._options import MIB

_MOST_DECODED_BYTES = 128 * MIB
"""Maximum size of a node after decompression. Ours have 64 KiB; Orbax configures up to 100 MB."""
_MOST_ENTRIES = 2**20
"""Maximum number of entries of a node, as in TensorStore."""
_MOST_FILES = 2**16
"""Maximum number of data files that a node refers to, and of versions in a manifest."""
MOST_KEY_BYTES = 2**16 - 1
"""Maximum length of a key or path, as in TensorStore."""
_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_FRAME_BYTES = 4 + 8 + 2 + 4
"""Magic number, length, at least one byte each for version and compression, checksum."""
_UUID_BYTES = 16
_ZSTD_LEVEL_BYTES = 4
_MOST_VARINT_BYTES = 10
_MISSING = 2**64 - 1
"""Offset and length of the root of a database without keys."""
_NUMBERED = 1
"""Kind of a manifest; 0 for a single one, which holds the versions itself."""
_ELSEWHERE = 1
"""Kind of a value that is in a data file; 0 for one that is inline."""
_STATISTICS = 3
"""Columns after each reference to a node: keys, bytes of nodes, bytes of values below it."""


_File = tuple[str, bytes]
"""Name of a data file, and its base; see ``NodeRef``."""


class Extent(NamedTuple):
    """The place of a value.

    Attributes:
        file: data file, relative to the database; empty if the value is inline in the index.
        offset: offset of the first byte.
        size_bytes: size of the value.
        value: the value, if it is inline.
    """

    file: str
    offset: int
    size_bytes: int
    value: bytes = b""


class NodeRef(NamedTuple):
    """Where a node is.

    Attributes:
        file: data file, relative to the database.
        base: directory that the files to which the node refers are relative to.
        offset: offset of its first byte.
        size_bytes: its stored size.
    """

    file: str
    base: bytes
    offset: int
    size_bytes: int


class Leaf(NamedTuple):
    """A node that holds values.

    Attributes:
        keys: the keys, without the prefix that the parent node gives; ascending.
        extents: where their values are.
    """

    keys: list[bytes]
    extents: list[Extent]


class Inner(NamedTuple):
    """A node that holds nodes.

    Attributes:
        height: 1 if the nodes below it are leaves, and so on.
        keys: the first key of each child, without the prefix that the parent node gives; ascending.
        prefix_lengths: number of bytes of each of these keys that begin all keys below it, and that
            the child leaves out.
        children: where they are.
    """

    height: int
    keys: list[bytes]
    prefix_lengths: list[int]
    children: list[NodeRef]


class Numbered(ValueError):
    """A manifest that holds no versions: those are in files ``manifest.<16 hexadecimal digits>``."""


def decode_manifest(data: bytes) -> NodeRef | None:
    """The root of the newest version in a manifest; None if that version has no keys.

    Raises:
        Numbered: the versions are in the numbered manifests beside it.
        ValueError: the manifest is damaged.
    """
    fields = _decoded(data, _MANIFEST_MAGIC)
    fields.take(_UUID_BYTES)
    kind, _, _ = fields.numbers(3)
    if kind == _NUMBERED:
        raise Numbered
    if kind != 0:
        raise ValueError(f"the manifest is of kind {kind}, which is not known")
    fields.take(1)
    if fields.numbers(1) != [0]:
        fields.take(_ZSTD_LEVEL_BYTES)
    files = _data_files(fields, b"")
    (count,) = fields.numbers(1)
    if not 0 < count <= _MOST_FILES:
        raise ValueError(f"the manifest lists {count} versions")
    generations = fields.numbers(count)
    fields.take(len(generations))
    roots = _references(fields, files, len(generations))
    return roots[generations.index(max(generations))]


def decode_node(data: bytes, base: bytes) -> Leaf | Inner:
    """The content of a node.

    Args:
        data: its stored bytes.
        base: see ``NodeRef``.

    Raises:
        ValueError: the node is damaged.
    """
    fields = _decoded(data, _NODE_MAGIC)
    (height,) = fields.take(1)
    files = _data_files(fields, base)
    (count,) = fields.numbers(1)
    if not 0 < count <= _MOST_ENTRIES:
        raise ValueError(f"a node of {count} entries")
    shared, added = [0, *fields.numbers(count - 1)], fields.numbers(count)
    prefix_lengths = fields.numbers(count) if height else []
    keys = _joined(fields, shared, added)
    if any(map(operator.ge, keys, keys[1:])):
        raise ValueError("its keys are out of order")
    if height == 0:
        node = Leaf(keys, _extents(fields, files, count))
    else:
        children = [ref for ref in _references(fields, files, count) if ref is not None]
        if len(children) < count or any(map(operator.gt, prefix_lengths, map(len, keys))):
            raise ValueError("a node with impossible children")
        node = Inner(height, keys, prefix_lengths, children)
    fields.end()
    return node


def _data_files(fields: _Fields, base: bytes) -> list[_File]:
    """The table of the files that a manifest or a node refers to."""
    (count,) = fields.numbers(1)
    if count == 0:
        return []
    if count > _MOST_FILES:
        raise ValueError(f"a table of {count} files")
    shared, added = [0, *fields.numbers(count - 1)], fields.numbers(count)
    base_lengths = fields.numbers(count)
    found: list[_File] = []
    for path, length in zip(_joined(fields, shared, added), base_lengths, strict=True):
        name = (base + path).decode(errors="surrogateescape")
        if length > len(path) or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"the index refers to {name!r}, outside the item")
        found.append((name, base + path[:length]))
    return found


def _joined(fields: _Fields, shared: list[int], added: list[int]) -> list[bytes]:
    """Byte strings that are stored without what they share with the one before."""
    if sum(shared) + sum(added) > _MOST_DECODED_BYTES:
        raise ValueError("its keys are too long")
    last = b""
    found: list[bytes] = []
    for length, more in zip(shared, fields.texts(added), strict=True):
        if length > len(last):
            raise ValueError("a key shares more than the one before it has")
        if length + len(more) > MOST_KEY_BYTES:
            raise ValueError(f"a key of {length + len(more)} bytes")
        last = last[:length] + more
        found.append(last)
    return found


def _references(fields: _Fields, files: list[_File], count: int) -> list[NodeRef | None]:
    """References to nodes; None for one that says that there is none."""
    ids, offsets, sizes_bytes = (fields.numbers(count) for _ in range(3))
    fields.numbers(_STATISTICS * count)
    return [
        None if offset == size_bytes == _MISSING else NodeRef(*file, offset, size_bytes)
        for file, offset, size_bytes in zip(_chosen(files, ids), offsets, sizes_bytes, strict=True)
    ]


def _extents(fields: _Fields, files: list[_File], count: int) -> list[Extent]:
    """Where the values of a leaf are."""
    sizes_bytes, kinds = fields.numbers(count), fields.take(count)
    if max(kinds) > _ELSEWHERE:
        raise ValueError(f"a value of kind {max(kinds)}")
    elsewhere = kinds.count(_ELSEWHERE)
    chosen = _chosen(files, fields.numbers(elsewhere))
    offsets = iter(fields.numbers(elsewhere))
    inline = iter(
        fields.texts([size for size, kind in zip(sizes_bytes, kinds, strict=True) if not kind])
    )
    return [
        Extent(next(chosen)[0], next(offsets), size_bytes)
        if kind == _ELSEWHERE
        else Extent("", 0, size_bytes, next(inline))
        for size_bytes, kind in zip(sizes_bytes, kinds, strict=True)
    ]


def _chosen(files: list[_File], ids: list[int]) -> Iterator[_File]:
    if ids and max(ids) >= len(files):
        raise ValueError(f"file {max(ids)} of {len(files)}")
    return map(files.__getitem__, ids)


class _Fields:
    """The fields of a manifest or node, which are read one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._position = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        start, self._position = self._position, self._position + count
        if self._position > len(self._data):
            raise ValueError("it ends too early")
        return self._data[start : self._position]

    def texts(self, lengths: list[int]) -> list[bytes]:
        """The next byte strings, which have these lengths."""
        data = self.take(sum(lengths))
        stops = itertools.accumulate(lengths)
        return [data[stop - length : stop] for length, stop in zip(lengths, stops, strict=True)]

    def numbers(self, count: int) -> list[int]:
        """The next ``count`` unsigned numbers, in LEB128: 7 bits a byte, the low ones first."""
        rest = self._bytes[self._position : self._position + _MOST_VARINT_BYTES * count]
        last = np.flatnonzero(rest < 128)[:count]
        if len(last) < count:
            raise ValueError("it ends too early")
        if count == 0 or last[-1] == count - 1:  # one byte each
            return list(self.take(count))
        self._position += int(last[-1]) + 1
        first = np.concatenate([[0], last[:-1] + 1])
        lengths = last - first + 1
        most = int(lengths.max())
        if most > _MOST_VARINT_BYTES or (
            most == _MOST_VARINT_BYTES and rest[last[lengths == most]].max() > 1
        ):
            raise ValueError("a number of more than 64 bits")
        values = np.zeros(count, np.uint64)
        for position in range(most):
            has = lengths > position
            bits = (rest[first[has] + position] & 127).astype(np.uint64)
            values[has] |= bits << np.uint64(7 * position)
        return values.tolist()

    def end(self) -> None:
        """Raises ValueError if there are more bytes."""
        if self._position != len(self._data):
            raise ValueError(f"{len(self._data) - self._position} bytes too many")


def _decoded(data: bytes, magic: int) -> _Fields:
    """The content of a manifest or node, whose checksum is right."""
    if int.from_bytes(data[:4], "big") != magic:
        raise ValueError(f"it begins with {data[:4].hex() or 'no bytes'}, not with {magic:08x}")
    if len(data) < _FRAME_BYTES or int.from_bytes(data[4:12], "little") != len(data):
        raise ValueError("its length is not the one that it gives")
    if int.from_bytes(data[-4:], "little") != crc32c.crc32c(data[:-4]):
        raise ValueError("its checksum is wrong")
    version, compression = data[12], data[13]
    if version != 0 or compression > 1:
        raise ValueError(f"version {version} with compression {compression} is not known")
    content = data[14:-4]
    return _Fields(decompress(content, _MOST_DECODED_BYTES) if compression else content)
