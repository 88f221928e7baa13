"""The index of an OCDBT database, which ``database`` decodes: nodes and manifest, encoded from columns of numpy. Pure."""

from __future__ import annotations

import itertools
import json
import secrets
import struct
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import crc32c
import numpy as np
import zstandard

from ckpt_core._format.packed import pack, unpack
from ckpt_core._layout.chunks import INLINE_BYTES
from ckpt_core._storage.database import FRAME_BYTES, MANIFEST_MAGIC, NODE_MAGIC

NODE_BYTES = 64 * 1024  # about 600 keys: small, so that partial loads read few nodes
_ENTRY_BYTES = 12  # what an entry of a node takes about besides its key and its inline value
_ZSTD = 1
_ARITY_LOG2 = 4
_MOST_ROWS_BYTES = 2**32

_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_Node = tuple[int, int, int, int, int]
"""Offset and size of a node in the file of nodes; how many keys, bytes of nodes and bytes of values are in and below it."""


@dataclass
class Rows:
    """What an index says. Several keys may have one value. No tuples, for the garbage collector's sake: there may be a million."""

    keys: list[str] = field(default_factory=list[str])
    which: list[int] = field(default_factory=list[int])  # for each key the position of its value
    inline: list[bytes] = field(default_factory=list[bytes])  # of each value; empty if in a file
    # of each value three numbers: position of its file in ``paths`` or -1, offset there, bytes
    places: array[int] = field(default_factory=lambda: array("q"))
    paths: list[str] = field(default_factory=list[str])  # relative to the database

    def dump(self) -> bytes:
        """The rows as a file of their own, for the process that makes the index of all."""
        texts = json.dumps([self.keys, self.paths, self.which]).encode()
        places, inline = np.array(self.places, "<i8").tobytes(), b"".join(self.inline)
        return pack({"texts": texts, "places": places, "inline": inline})


def joined(dumped: Iterable[bytes]) -> Rows:
    """All rows of these dumps."""
    rows = Rows()
    for data in dumped:
        part = unpack(data, _MOST_ROWS_BYTES)
        keys, paths, which = json.loads(part["texts"])
        rows.keys += keys
        rows.which += [len(rows.inline) + position for position in which]
        places = np.frombuffer(part["places"], "<i8").reshape(-1, 3).copy()
        inside = places[:, 0] < 0
        ends = np.cumsum(np.where(inside, places[:, 2], 0)).tolist()
        rows.inline += [part["inline"][a:b] for a, b in itertools.pairwise([0, *ends])]
        places[~inside, 0] += len(rows.paths)
        rows.places.extend(places.ravel().tolist())
        rows.paths += paths
    return rows


def encode_index(rows: Rows, node_path: str, below: str = "") -> tuple[bytes, bytes]:
    """The nodes of an index of at least one key, for a file at ``node_path``, and the manifest that leads to them. No two keys
    are equal. The paths in the rows are relative to ``below``, which is empty or ends with a slash.
    """
    encoded = [key.encode(errors="surrogateescape") for key in rows.keys]
    order = sorted(range(len(encoded)), key=encoded.__getitem__)
    keys = [encoded[position] for position in order]
    chosen = np.array(rows.which, np.int64)[order]
    places = np.array(rows.places, np.int64).reshape(-1, 3)[chosen]
    files, offsets, sizes = (places[:, column] for column in range(3))
    inline = files < 0
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    names = [(below + path).encode(errors="surrogateescape") for path in rows.paths]
    stored, firsts, level = bytearray(), list[bytes](), list[_Node]()
    for part in _parts(lengths + np.where(inline, sizes, 0) + _ENTRY_BYTES):
        there = ~inline[part]
        used, files_in_node = np.unique(files[part][there], return_inverse=True)
        values = [rows.inline[position] for position in chosen[part][~there].tolist()]
        payload = b"".join(
            [
                b"\0",
                _table([names[file] for file in used.tolist()]),
                *_keys(keys[part]),
                _numbers(sizes[part]),
                there.astype(np.uint8).tobytes(),
                _numbers(files_in_node),
                _numbers(offsets[part][there]),
                *values,
            ]
        )
        framed = _framed(NODE_MAGIC, payload)
        values_bytes = int(sizes[part][there].sum())
        firsts.append(keys[part.start])
        level.append((len(stored), len(framed), len(there), len(framed), values_bytes))
        stored += framed
    table, height = _table([node_path.encode(errors="surrogateescape")]), 0
    while len(level) > 1:
        height += 1
        firsts, level = _parents(firsts, level, height, table, stored)
    manifest = b"".join(
        [
            secrets.token_bytes(16),  # by which TensorStore knows the database
            _numbers([0, INLINE_BYTES, NODE_BYTES, _ARITY_LOG2, _ZSTD]),
            bytes(4),  # the level of zstd
            table,
            b"\1\1",  # one version, of generation 1
            bytes([height]),
            *_references(level),
            struct.pack("<Q", time.time_ns()),
            b"\0",  # no nodes of older versions
        ]
    )
    return bytes(stored), _framed(MANIFEST_MAGIC, manifest)


def _parents(
    firsts: list[bytes], level: list[_Node], height: int, table: bytes, stored: bytearray
) -> tuple[list[bytes], list[_Node]]:
    """Appends the nodes above these, which begin with the keys ``firsts``, to what is stored; returns theirs."""
    lengths = np.fromiter(map(len, firsts), np.int64, len(firsts))
    parts = _parts(lengths + 2 * _ENTRY_BYTES)
    above: list[_Node] = []
    for part in parts:
        below = level[part]
        keys = _keys(firsts[part], bytes(len(below)))
        payload = b"".join([bytes([height]), table, *keys, *_references(below)])
        framed = _framed(NODE_MAGIC, payload)
        count, nodes_bytes, values_bytes = np.array(below)[:, 2:].sum(axis=0).tolist()
        above.append((len(stored), len(framed), count, nodes_bytes + len(framed), values_bytes))
        stored += framed
    return [firsts[part.start] for part in parts], above


def _parts(costs: _Numbers) -> list[slice]:
    """Cuts entries that take so many bytes into nodes of about ``NODE_BYTES``; at least one each."""
    numbers = (np.cumsum(costs) - costs) // NODE_BYTES
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(costs)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def _table(paths: Sequence[bytes]) -> bytes:
    """The table of the files to which a node refers; all relative to the database."""
    return b"".join(_keys(paths, bytes(len(paths)))) if paths else b"\0"


def _keys(keys: Sequence[bytes], between: bytes = b"") -> tuple[bytes, ...]:
    """Number of keys, what each shares with the one before, and the rest of each; ``between`` the lengths and those."""
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    table = np.array(keys, f"S{max(1, int(lengths.max()))}").view(np.uint8).reshape(len(keys), -1)
    shared = np.zeros(len(keys), np.int64)
    # of keys that differ only in zeros at the end, the padding would count as shared
    shorter = np.minimum(lengths[1:], lengths[:-1])
    shared[1:] = np.minimum((table[1:] != table[:-1]).argmax(axis=1), shorter)
    columns = np.arange(table.shape[1])
    rest = table[(columns >= shared[:, None]) & (columns < lengths[:, None])].tobytes()
    return _numbers([len(keys)]), _numbers(shared[1:]), _numbers(lengths - shared), between, rest


def _references(nodes: Sequence[_Node]) -> tuple[bytes, ...]:
    """Columns of the file of each node, and of what it is."""
    return (bytes(len(nodes)), *map(_numbers, zip(*nodes, strict=True)))


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
