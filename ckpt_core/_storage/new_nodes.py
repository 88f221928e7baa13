"""The files of an OCDBT database of many small values, encoded at once. Pure.

TensorStore takes 5 us to queue a value, and builds the index of a transaction on one thread; here both are columns of
numpy. The format is that of ``database``, which decodes it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import crc32c
import numpy as np
import zstandard

from ckpt_core._layout.writers import INLINE_BYTES
from ckpt_core._storage.database import FRAME_BYTES, MANIFEST_MAGIC, NODE_MAGIC
from ckpt_core._storage.location import NODE_BYTES

ALIGNMENT_BYTES = 64
"""Values in data files begin at a multiple of it, so that they can be mapped."""
_ENTRY_BYTES = 12
"""What an entry of a node takes about besides its key and its inline value."""
_ZSTD = 1
_ARITY_LOG2 = 4

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Placed:
    """Where values stand: in data files, or inline."""

    values: Sequence[bytes]
    sizes_bytes: _Numbers
    files: _Numbers  # for each value the position of its data file; -1: inline
    offsets: _Numbers  # in that file
    sizes_of_files: tuple[int, ...]

    def content(self, file: int) -> bytes:
        """The bytes of a data file."""
        inside = np.flatnonzero(self.files == file).tolist()
        values = self.values
        if not (self.sizes_bytes[inside] % ALIGNMENT_BYTES).any():
            return b"".join([values[position] for position in inside])
        padded = (-(-self.sizes_bytes[inside] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES).tolist()
        return b"".join(
            [
                values[position].ljust(size, b"\0")
                for position, size in zip(inside, padded, strict=True)
            ]
        )


def place(values: Sequence[bytes], most_file_bytes: int) -> Placed:
    """Places values in data files of about ``most_file_bytes``, one after the other; small ones inline."""
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    padded = np.where(sizes > INLINE_BYTES, -(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, 0)
    starts = np.cumsum(padded) - padded
    outside = padded > 0
    numbers, files = np.unique(starts[outside] // most_file_bytes, return_inverse=True)
    first = np.searchsorted(files, np.arange(len(numbers)))
    begins = starts[outside][first]
    ends = [*begins[1:].tolist(), int(padded.sum())]
    of_value, offsets = np.full(len(values), -1), np.zeros(len(values), np.int64)
    of_value[outside] = files
    offsets[outside] = starts[outside] - begins[files]
    return Placed(
        values,
        sizes,
        of_value,
        offsets,
        tuple((np.array(ends) - begins).tolist() if len(begins) else ()),
    )


class Node(NamedTuple):
    """An encoded node: its first key, where it stands in the file of nodes, and what is below it."""

    first: bytes
    offset: int
    size_bytes: int
    keys: int
    nodes_bytes: int
    values_bytes: int


def encode_index(
    keys: Sequence[bytes],
    which: Sequence[int],
    placed: Placed,
    paths: Sequence[str],
    node_path: str,
    uuid: bytes,
    unix_ns: int,
) -> tuple[bytes, bytes]:
    """The nodes of an index, and the manifest that leads to them. The keys, at least one, are in any order, and no two are equal; ``which``
    has for each the position of its value. Paths are relative to the database, which TensorStore knows by the 16 random bytes of ``uuid``.
    """
    order = sorted(range(len(keys)), key=keys.__getitem__)
    keys = [keys[position] for position in order]
    chosen = np.array(which, np.int64)[order]
    sizes, files = placed.sizes_bytes[chosen], placed.files[chosen]
    offsets, inline = placed.offsets[chosen], files < 0
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    names = [path.encode(errors="surrogateescape") for path in paths]
    stored, level = bytearray(), list[Node]()
    for part in _parts(lengths + np.where(inline, sizes, 0) + _ENTRY_BYTES):
        there = ~inline[part]
        used, files_in_node = np.unique(files[part][there], return_inverse=True)
        values = [placed.values[position] for position in chosen[part][~there].tolist()]
        payload = b"".join(
            [
                b"\0",
                _table([names[file] for file in used.tolist()]),
                *_keys(keys[part], lengths[part]),
                _numbers(sizes[part]),
                there.astype(np.uint8).tobytes(),
                _numbers(files_in_node),
                _numbers(offsets[part][there]),
                *values,
            ]
        )
        framed = _framed(NODE_MAGIC, payload)
        values_bytes = int(sizes[part][there].sum())
        node = Node(keys[part][0], len(stored), len(framed), len(there), len(framed), values_bytes)
        level.append(node)
        stored += framed
    table, height = _table([node_path.encode(errors="surrogateescape")]), 0
    while len(level) > 1:
        height += 1
        level = _parents(level, height, table, stored)
    (root,) = level
    manifest = b"".join(
        [
            uuid,
            _numbers([0, INLINE_BYTES, NODE_BYTES, _ARITY_LOG2, _ZSTD]),
            bytes(4),  # the level of zstd
            table,
            b"\1\1",  # one version, of generation 1
            bytes([height]),
            *_references([root]),
            struct.pack("<Q", unix_ns),
            b"\0",  # no nodes of older versions
        ]
    )
    return bytes(stored), _framed(MANIFEST_MAGIC, manifest)


def _parents(children: list[Node], height: int, table: bytes, stored: bytearray) -> list[Node]:
    """Appends the nodes above these to what is stored; returns them."""
    lengths = np.fromiter((len(child.first) for child in children), np.int64, len(children))
    found: list[Node] = []
    for part in _parts(lengths + 2 * _ENTRY_BYTES):
        below = children[part]
        payload = b"".join(
            [
                bytes([height]),
                table,
                *_keys([child.first for child in below], lengths[part], bytes(len(below))),
                *_references(below),
            ]
        )
        framed = _framed(NODE_MAGIC, payload)
        found.append(
            Node(
                below[0].first,
                len(stored),
                len(framed),
                sum(child.keys for child in below),
                sum(child.nodes_bytes for child in below) + len(framed),
                sum(child.values_bytes for child in below),
            )
        )
        stored += framed
    return found


def _parts(costs: _Numbers) -> list[slice]:
    """Cuts entries that take so many bytes into nodes of about ``NODE_BYTES``; at least one each."""
    numbers = (np.cumsum(costs) - costs) // NODE_BYTES
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(costs)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def _table(paths: Sequence[bytes]) -> bytes:
    """The table of the files to which a node refers; all relative to the database."""
    if not paths:
        return b"\0"
    lengths = np.fromiter(map(len, paths), np.int64, len(paths))
    return b"".join([*_keys(paths, lengths, bytes(len(paths)))])


def _keys(keys: Sequence[bytes], lengths: _Numbers, between: bytes = b"") -> tuple[bytes, ...]:
    """Number of keys, what each shares with the one before, and the rest of each; ``between`` the lengths and those."""
    table = np.array(keys, f"S{max(1, int(lengths.max()))}").view(np.uint8).reshape(len(keys), -1)
    shared = np.zeros(len(keys), np.int64)
    # of keys that differ only in zeros at the end, the padding would count as shared
    shared[1:] = np.minimum(
        (table[1:] != table[:-1]).argmax(axis=1), np.minimum(lengths[1:], lengths[:-1])
    )
    columns = np.arange(table.shape[1])
    rest = table[(columns >= shared[:, None]) & (columns < lengths[:, None])].tobytes()
    return _numbers([len(keys)]), _numbers(shared[1:]), _numbers(lengths - shared), between, rest


def _references(nodes: Sequence[Node]) -> tuple[bytes, ...]:
    """Columns of file, offset and size of nodes, and of what is below each."""
    columns = zip(*(node[1:] for node in nodes), strict=True)
    return (bytes(len(nodes)), *map(_numbers, columns))


def _numbers(values: Sequence[int] | _Numbers) -> bytes:
    """Unsigned numbers in LEB128: 7 bits a byte, the low ones first."""
    numbers = np.asarray(values, np.uint64)
    most = int(numbers.max(initial=0))
    if most < 128:
        return numbers.astype(np.uint8).tobytes()
    shifts = 7 * np.arange(-(-most.bit_length() // 7), dtype=np.uint64)
    shifted = numbers[:, None] >> shifts
    more = shifted > 127
    groups = (shifted & np.uint64(127)).astype(np.uint8) | (more.astype(np.uint8) << 7)
    kept = np.ones_like(more)
    kept[:, 1:] = more[:, :-1]
    return groups[kept].tobytes()


def _framed(magic: int, payload: bytes) -> bytes:
    """A manifest or node as stored: compressed, with its length and checksum."""
    content = zstandard.compress(payload)
    head = magic.to_bytes(4, "big") + struct.pack("<QBB", len(content) + FRAME_BYTES, 0, _ZSTD)
    return head + content + struct.pack("<I", crc32c.crc32c(head + content))
