"""The index of an OCDBT database: a B+tree from keys to file ranges, decoded here and walked.

The format is described in https://google.github.io/tensorstore/kvstore/ocdbt/#storage-format. In
TensorStore 0.1.86 ``ocdbt.dump`` never frees what it returns: 1 KB for each leaf in every save and load.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import crc32c
import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.untrusted import decompress, most_bytes
from ckpt_core._options import MIB
from ckpt_core._storage.arrays import refuse_file
from ckpt_core._storage.files import DataFiles
from ckpt_core._storage.location import INDEX_FILE, Location, StoreContext, range_of, ts, unreadable

_MOST_NODE_BYTES = 128 * MIB  # of a node, also decompressed: ours have 64 KiB, Orbax's up to 100 MB
_MOST_ENTRIES = 2**20  # maximum number of entries of a node, as in TensorStore
_MOST_FILES = 2**16  # of data files that a node refers to, and of versions in a manifest
MOST_KEY_BYTES = 2**16 - 1  # maximum length of a key or path, as in TensorStore
MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE
FRAME_BYTES = 4 + 8 + 2 + 4  # magic number, length, version and compression, checksum
_MOST_VARINT_BYTES = 10
_MISSING = 2**64 - 1  # offset and length of the root of a database without keys
_NUMBERED = 1  # kind of a manifest; 0 for a single one, which holds the versions itself
_ELSEWHERE = 1  # kind of a value that is in a data file; 0 for one that is inline
_STATISTICS = 3  # columns after a reference to a node: keys, bytes of nodes and of values below it
_NO_NAMES = frozenset({"", ".", ".."})
"""What no part of the name of a file is: one file has one name, inside the item."""

_File = tuple[str, bytes]  # name of a data file, and its base; see ``NodeRef``


class Extent(NamedTuple):
    """The place of a value."""

    file: str  # relative to the database; empty if the value is inline in the index
    offset: int
    size_bytes: int
    value: bytes = b""  # if it is inline


Place = tuple[str, int, int, bytes]
"""The fields of an ``Extent``, as a plain tuple: there may be a million, which the garbage collector need not look after."""


class NodeRef(NamedTuple):
    """Where a node is."""

    file: str  # relative to the database
    base: bytes  # directory that the files named in the node are relative to
    offset: int
    size_bytes: int  # as stored


class Leaf(NamedTuple):
    """A node that holds values."""

    height = 0
    keys: list[bytes]  # ascending; without the prefix that the parent node gives
    places: list[Place]  # of their values


class Inner(NamedTuple):
    """A node that holds nodes."""

    height: int  # 1 if the nodes below it are leaves, and so on
    keys: list[bytes]  # first of each child; as in ``Leaf``
    prefix_lengths: list[int]  # bytes of these keys that the child's keys begin with, and omit
    children: list[NodeRef]


class Numbered(ValueError):
    """The versions are not in this manifest, but in files ``manifest.<16 hexadecimal digits>``."""


def decode_manifest(data: bytes) -> NodeRef | None:
    """The root of the newest version in a manifest, None if that has no keys; Numbered, or ValueError if it is damaged."""
    fields = _decoded(data, MANIFEST_MAGIC)
    fields.take(16)  # by which TensorStore knows the database
    kind, _, _ = fields.numbers(3)
    if kind == _NUMBERED:
        raise Numbered
    if kind != 0:
        raise ValueError(f"the manifest is of kind {kind}, which is not known")
    fields.take(1)
    if fields.numbers(1) != [0]:
        fields.take(4)  # the level of zstd
    files = _data_files(fields, b"")
    (count,) = fields.numbers(1)
    if not 0 < count <= _MOST_FILES:
        raise ValueError(f"the manifest lists {count} versions")
    generations = fields.numbers(count)
    fields.take(len(generations))
    roots = _references(fields, files, len(generations))
    return roots[generations.index(max(generations))]


def decode_node(data: bytes, base: bytes) -> Leaf | Inner:
    """The content of a node; see ``NodeRef`` for ``base``. ValueError if it is damaged."""
    fields = _decoded(data, NODE_MAGIC)
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
        node = Leaf(keys, _places(fields, files, count))
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
        if length > len(path) or (name and not _NO_NAMES.isdisjoint(name.split("/"))):
            raise ValueError(f"the index refers to {name!r}, outside the item or no name of a file")
        found.append((name, base + path[:length]))
    return found


def _joined(fields: _Fields, shared: list[int], added: list[int]) -> list[bytes]:
    """Byte strings that are stored without what they share with the one before."""
    if sum(shared) + sum(added) > _MOST_NODE_BYTES:
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


def _places(fields: _Fields, files: list[_File], count: int) -> list[Place]:
    """Where the values of a leaf are."""
    sizes_bytes, kinds = fields.numbers(count), fields.take(count)
    if max(kinds) > _ELSEWHERE:
        raise ValueError(f"a value of kind {max(kinds)}")
    elsewhere = kinds.count(_ELSEWHERE)
    names = [name for name, _ in _chosen(files, fields.numbers(elsewhere))]
    offsets = fields.numbers(elsewhere)
    if elsewhere == count:
        return list(zip(names, offsets, sizes_bytes, itertools.repeat(b"")))
    sizes = [size for size, kind in zip(sizes_bytes, kinds, strict=True) if not kind]
    within = zip(itertools.repeat(""), itertools.repeat(0), sizes, fields.texts(sizes))
    sizes = [size for size, kind in zip(sizes_bytes, kinds, strict=True) if kind]
    outside = zip(names, offsets, sizes, itertools.repeat(b""))
    return [next(outside if kind else within) for kind in kinds]


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
        rest_bits = rest[last[lengths == _MOST_VARINT_BYTES]].max(initial=0)
        if most > _MOST_VARINT_BYTES or rest_bits > 1:
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
    if len(data) < FRAME_BYTES or int.from_bytes(data[4:12], "little") != len(data):
        raise ValueError("its length is not the one that it gives")
    if int.from_bytes(data[-4:], "little") != crc32c.crc32c(data[:-4]):
        raise ValueError("its checksum is wrong")
    version, compression = data[12], data[13]
    if version != 0 or compression > 1:
        raise ValueError(f"version {version} with compression {compression} is not known")
    content = data[14:-4]
    return _Fields(decompress(content, _MOST_NODE_BYTES) if compression else content)


_NODES_AT_ONCE = 64
_MOST_BYTES_AT_ONCE = 4 * MIB
_MOST_KEYS = 2**21  # maximum number of keys where no record says how many there can be
_MOST_KEYS_BYTES = 256 * MIB  # of all keys together: a node has what they begin with only once
_FEW_KEYS = 2**16  # number of keys up to which ``most_keys`` is not called, since it may be slow


def read_index(
    item: Location,
    context: StoreContext,
    names: Iterable[str] | None = None,
    files: DataFiles | None = None,
    most_keys: Callable[[], int] = lambda: _MOST_KEYS,
    manifest: bytes | None = None,
) -> dict[str, Place]:
    """Key -> place of its value, for the database at ``item``; blocks. Only subtrees with arrays in ``names`` are read (None:
    all). A caller gives the ``files`` and the ``manifest`` that it has. CheckpointCorrupt if the index is missing, damaged,
    or has more than ``most_keys()`` keys; OSError if the system or the store refused.
    """
    if manifest is None:
        refuse_file(item, INDEX_FILE, most_bytes(INDEX_FILE))
    try:
        with contextlib.ExitStack() as stack:
            if item.local:
                files = files or stack.enter_context(contextlib.closing(DataFiles(item)))
                read = functools.partial(_nodes_of_files, files)
                if manifest is None:
                    manifest = files.part(INDEX_FILE)
            else:
                base: Any = ts.KvStore.open(item.spec(), context=context()).result()
                read = functools.partial(_nodes_of_store, base)
                if manifest is None:
                    manifest = _value(base, INDEX_FILE)
            try:
                root = decode_manifest(manifest)
            except Numbered:
                root = decode_manifest(_newest_manifest(item, context))
            found: dict[str, Place] = {}
            if root is not None:
                # asked for at every node, and looks at every leaf
                most = functools.cache(most_keys)
                _collect(read, root, found, _prefixes(names), most)
            return found
    except CheckpointCorrupt:
        raise
    except (OSError, *_UNREADABLE) as error:
        doing = f"{item.path}: the index of the array database cannot be read"
        raise unreadable(error, doing, file=INDEX_FILE) from error


def _newest_manifest(item: Location, context: StoreContext) -> bytes:
    """The manifest with the highest number; none of Orbax' or ours has numbers."""
    base: Any = ts.KvStore.open(item.spec(), context=context()).result()
    names = base.list(ts.KvStore.KeyRange("manifest.0", "manifest.g")).result()
    if not names:
        raise ValueError("there is no numbered manifest")
    newest = max(names).decode(errors="surrogateescape")
    refuse_file(item, newest, most_bytes(INDEX_FILE))
    return _value(base, newest)


_UNREADABLE = (ValueError, TypeError, NotImplementedError, OverflowError)
"""What TensorStore and our decoding raise for damaged bytes."""


class _Below(NamedTuple):
    """A node to visit: where it is, the prefix of its keys, the first key after them (None: no end)."""

    node: NodeRef
    prefix: bytes
    stop: bytes | None


def _prefixes(names: Iterable[str] | None) -> list[bytes]:
    """What the keys of these arrays begin with, ascending; none begins with another one."""
    encoded = {name.encode(errors="surrogateescape") for name in names or ()}
    if names is None or b"" in encoded:  # keys of a bare array have no prefix
        return [b""]
    found: list[bytes] = []
    for prefix in sorted(name + b"/" for name in encoded):  # "w-ema/" comes before "w/"
        if not found or not prefix.startswith(found[-1]):
            found.append(prefix)
    return found


def _may_hold(prefixes: list[bytes], start: bytes, stop: bytes | None) -> bool:
    """Whether a key in ``[start, stop)`` may begin with any of the prefixes."""
    after = bisect.bisect_right(prefixes, start)
    if after and start.startswith(prefixes[after - 1]):
        return True
    return after < len(prefixes) and (stop is None or prefixes[after] < stop)


def _collect(
    read: Callable[[list[NodeRef]], Iterable[bytes]],
    root: NodeRef,
    found: dict[str, Place],
    prefixes: list[bytes],
    most_keys: Callable[[], int],
) -> None:
    """Walks the B+tree level by level, only into nodes that may have keys with these ``prefixes``."""
    level = [_Below(root, b"", None)]
    visited = {root}
    height: int | None = None
    keys_bytes = 0
    while level:
        below_level: list[_Below] = []
        nodes = [below.node for below in level]
        if (largest := max(node.size_bytes for node in nodes)) > _MOST_NODE_BYTES:
            raise ValueError(f"impossible node of {largest} bytes")
        for below, data in zip(level, read(nodes), strict=True):
            if len(data) < below.node.size_bytes:
                raise _too_short(below.node)
            content = decode_node(data, below.node.base)
            if height not in (None, content.height):
                raise ValueError(f"a node of height {content.height} where {height} is expected")
            height = content.height
            lengths = [len(below.prefix) + len(key) for key in content.keys]
            if max(lengths) > MOST_KEY_BYTES:
                raise ValueError("a key that is too long")
            keys_bytes += sum(lengths)
            if keys_bytes > _MOST_KEYS_BYTES:  # before any of them is made
                raise ValueError(f"its keys take more than {_MOST_KEYS_BYTES} bytes")
            if isinstance(content, Leaf):
                keys = [below.prefix + key for key in content.keys]
                names = [key.decode(errors="surrogateescape") for key in keys]
                found.update(zip(names, content.places, strict=True))
            else:
                below_level += _children(content, below, prefixes)
            # there is a key, or more, below each node
            count = max(len(found), len(below_level))
            if count > _FEW_KEYS and count > most_keys():
                raise ValueError(f"more than the {most_keys()} keys that there can be")
        level, height = below_level, (height or 0) - 1
        before = len(visited)
        visited.update(below.node for below in level)
        if len(visited) < before + len(level):
            raise ValueError("the index refers to a node twice")


def _nodes_of_files(files: DataFiles, nodes: list[NodeRef]) -> Iterator[bytes]:
    """Reads nodes from a file system, one after the other."""
    for node in nodes:
        if node.offset + node.size_bytes > sys.maxsize:
            raise _too_short(node)
        yield files.part(node.file, node.offset, node.size_bytes)


def _nodes_of_store(base: Any, nodes: list[NodeRef]) -> Iterator[bytes]:
    """Reads nodes from a store, as many at once as take little memory."""
    while nodes:
        ends = itertools.accumulate(node.size_bytes for node in nodes[:_NODES_AT_ONCE])
        batch = nodes[: max(1, sum(end <= _MOST_BYTES_AT_ONCE for end in ends))]
        nodes = nodes[len(batch) :]
        reading = [
            base.read(node.file, byte_range=slice(node.offset, node.offset + node.size_bytes))
            for node in batch
        ]
        for node, future in zip(batch, reading, strict=True):
            data = range_of(base, node.file, future, node.offset, node.offset + node.size_bytes)
            if data is None:
                raise ValueError(f"{node.file} is missing")
            yield data


def _too_short(node: NodeRef) -> ValueError:
    stop = node.offset + node.size_bytes
    return ValueError(f"Requested byte range [{node.offset}, {stop}) is not in {node.file}")


def _value(base: Any, file: str) -> bytes:
    data = range_of(base, file, base.read(file), 0, sys.maxsize)
    if data is None:
        raise ValueError(f"{file} is missing")
    return data


def _children(node: Inner, below: _Below, prefixes: list[bytes]) -> Iterator[_Below]:
    """The children of an inner node that may have keys with these ``prefixes``."""
    starts = [below.prefix + key for key in node.keys]
    stops = [*starts[1:], below.stop]
    columns = node.children, node.prefix_lengths, starts, stops
    for child, length, start, stop in zip(*columns, strict=True):
        if _may_hold(prefixes, start, stop):
            yield _Below(child, start[: len(below.prefix) + length], stop)
