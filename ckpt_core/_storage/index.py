"""Reads the index of an OCDBT database: a B+tree from keys to file ranges."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.limits import most_bytes
from ckpt_core._options import MIB
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.bounds import refuse_file
from ckpt_core._storage.btree import (
    MOST_KEY_BYTES,
    Extent,
    Inner,
    Leaf,
    NodeRef,
    Numbered,
    decode_manifest,
    decode_node,
)
from ckpt_core._storage.failures import unreadable
from ckpt_core._storage.keys import range_of
from ckpt_core._storage.location import INDEX_FILE, Location

_NODES_AT_ONCE = 64
_MOST_NODE_BYTES = 128 * MIB
"""Maximum stored size of a node. Ours have about 64 KiB decoded; Orbax configures up to 100 MB."""
_MOST_BYTES_AT_ONCE = 4 * MIB
_MOST_KEYS = 2**21
"""Maximum number of keys where no record says how many there can be."""
_MOST_KEYS_BYTES = 256 * MIB
"""Maximum size of all keys together: a node has what they begin with only once."""
_FEW_KEYS = 2**16
"""Number of keys up to which ``most_keys`` is not called, since it may be slow."""


class Index(dict[str, Extent]):
    """Key -> place of its value, for a database.

    Attributes:
        files: files that contain the index, without the manifest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()


def read_index(
    item: Location,
    context: Any,
    names: Iterable[str] | None = None,
    check: Callable[[Iterable[str]], object] = lambda _: None,
    most_keys: Callable[[], int] = lambda: _MOST_KEYS,
    manifest: bytes | None = None,
) -> Index:
    """Reads the index of the database at ``item``; blocks.

    Args:
        item: location of the database.
        context: TensorStore context of the load or save.
        names: names of the wanted arrays: subtrees without them are not read. None for all.
        check: called with the index files before they are read; raises to reject one.
        most_keys: returns the maximum number of keys that the database can have.
        manifest: the content of the database's manifest, if the caller has read it.

    Raises:
        CheckpointCorrupt: the index is missing or damaged.
    """
    if manifest is None:
        refuse_file(item, INDEX_FILE, most_bytes(INDEX_FILE))
    try:
        base: Any = ts.KvStore.open(item.spec(), context=context).result()
        if manifest is None:
            manifest = _value(base.read(INDEX_FILE).result(), INDEX_FILE)
        try:
            root = decode_manifest(manifest)
        except Numbered:
            root = decode_manifest(_newest_manifest(item, base))
        found = Index()
        if root is not None:
            # asked for at every node, and looks at every leaf
            most = functools.cache(most_keys)
            _collect(base, root, found, _key_ranges(names), check, most)
        return found
    except CheckpointCorrupt:
        raise
    except _UNREADABLE as error:
        raise _unreadable(item, error) from error


def _newest_manifest(item: Location, base: Any) -> bytes:
    """The manifest with the highest number; none of Orbax' or ours has numbers."""
    names = base.list(ts.KvStore.KeyRange("manifest.0", "manifest.g")).result()
    if not names:
        raise ValueError("there is no numbered manifest")
    newest = max(names).decode(errors="surrogateescape")
    refuse_file(item, newest, most_bytes(INDEX_FILE))
    return _value(base.read(newest).result(), newest)


_UNREADABLE = (ValueError, TypeError, NotImplementedError, OverflowError)
"""What TensorStore and our decoding raise for damaged bytes; RecursionError is a RuntimeError and says nothing of them."""


def _unreadable(item: Location, error: Exception) -> Exception:
    doing = f"{item.path}: the index of the array database cannot be read"
    return unreadable(error, doing, file=INDEX_FILE)


class _Below(NamedTuple):
    """A node to visit: where it is, the prefix of its keys, the first key after them (None: no end)."""

    node: NodeRef
    prefix: bytes
    stop: bytes | None


KeyRange = tuple[bytes, bytes | None]
"""First key, and first key after the range (None for no end)."""


def _key_ranges(names: Iterable[str] | None) -> list[KeyRange]:
    """Disjoint ascending ranges that contain all keys of these arrays."""
    if names is None:
        return [(b"", None)]
    encoded = {name.encode(errors="surrogateescape") for name in names}
    if b"" in encoded:  # a bare array has an empty name, so its keys have no prefix
        return [(b"", None)]
    ranges: list[KeyRange] = []
    for start in sorted(name + b"/" for name in encoded):  # "w-ema/" comes before "w/"
        stop = start[:-1] + b"0"  # "0" is the ASCII character after "/"
        if not ranges or ranges[-1][1] is None or start >= ranges[-1][1]:
            ranges.append((start, stop))
    return ranges


def _overlaps_any(ranges: list[KeyRange], start: bytes, stop: bytes | None) -> bool:
    """Whether any of the ranges has keys in ``[start, stop)``."""
    after = bisect.bisect_right(ranges, start, key=lambda entry: entry[0])
    if after and (ranges[after - 1][1] is None or ranges[after - 1][1] > start):  # pyright: ignore
        return True
    return after < len(ranges) and (stop is None or ranges[after][0] < stop)


def _batches(level: list[_Below]) -> Iterator[list[_Below]]:
    """Splits nodes into batches to read at once, which bounds the memory that they take."""
    batch: list[_Below] = []
    size_bytes = 0
    for below in level:
        node_bytes = below.node.size_bytes
        if node_bytes > _MOST_NODE_BYTES:
            raise ValueError(f"impossible node of {node_bytes} bytes")
        if batch and (
            len(batch) == _NODES_AT_ONCE or size_bytes + node_bytes > _MOST_BYTES_AT_ONCE
        ):
            yield batch
            batch, size_bytes = [], 0
        batch.append(below)
        size_bytes += node_bytes
    if batch:
        yield batch


def _collect(
    base: Any,
    root: NodeRef,
    found: Index,
    ranges: list[KeyRange],
    check: Callable[[Iterable[str]], object],
    most_keys: Callable[[], int],
) -> None:
    """Walks the B+tree level by level, only into nodes that may have keys in ``ranges``."""
    level = [_Below(root, b"", None)]
    visited = {root}
    keys_bytes = 0
    while level:
        below_level: list[_Below] = []
        for batch in _batches(level):
            nodes = [below.node for below in batch]
            files = {node.file for node in nodes}
            check(files - found.files)
            found.files |= files
            for below, data in zip(batch, _read_nodes(base, nodes), strict=True):
                content = decode_node(data, below.node.base)
                if isinstance(content, Leaf):
                    keys_bytes += len(content.keys) * len(below.prefix) + sum(
                        map(len, content.keys)
                    )
                    if keys_bytes > _MOST_KEYS_BYTES:
                        raise ValueError(f"its keys take more than {_MOST_KEYS_BYTES} bytes")
                    found.update(_under(below.prefix, content))
                    if len(found) > _FEW_KEYS and len(found) > most_keys():
                        raise ValueError(f"more than the {most_keys()} keys that there can be")
                else:
                    below_level += _children(content, below, ranges)
        level = below_level
        before = len(visited)
        visited.update(below.node for below in level)
        if len(visited) < before + len(level):
            raise ValueError("the index refers to a node twice")


def _under(prefix: bytes, leaf: Leaf) -> Iterator[tuple[str, Extent]]:
    """The entries of a leaf, whose keys all begin with ``prefix``."""
    if len(prefix) + max(map(len, leaf.keys)) > MOST_KEY_BYTES:
        raise ValueError("a key that is too long")
    keys = [(prefix + key).decode(errors="surrogateescape") for key in leaf.keys]
    return zip(keys, leaf.extents, strict=True)


def _read_nodes(base: Any, nodes: list[NodeRef]) -> Iterator[bytes]:
    """The stored bytes of nodes, read in parallel."""
    reading = [
        base.read(node.file, byte_range=slice(node.offset, node.offset + node.size_bytes))
        for node in nodes
    ]
    for node, future in zip(nodes, reading, strict=True):
        data = range_of(base, node.file, future, node.offset, node.offset + node.size_bytes)
        if data is None:
            raise ValueError(f"{node.file} is missing")
        if len(data) < node.size_bytes:
            stop = node.offset + node.size_bytes
            raise ValueError(f"Requested byte range [{node.offset}, {stop}) is not in {node.file}")
        yield data


def _value(found: Any, file: str) -> bytes:
    if found.state != "value":
        raise ValueError(f"{file} is missing")
    return found.value


def _children(node: Inner, below: _Below, ranges: list[KeyRange]) -> Iterator[_Below]:
    """The children of an inner node that may have keys in ``ranges``."""
    starts = [below.prefix + key for key in node.keys]
    stops = [*starts[1:], below.stop]
    for child, length, start, stop in zip(
        node.children, node.prefix_lengths, starts, stops, strict=True
    ):
        if _overlaps_any(ranges, start, stop):
            yield _Below(child, start[: len(below.prefix) + length], stop)
