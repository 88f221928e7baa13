"""Reads the index of an OCDBT database: a B+tree from keys to file ranges."""

from __future__ import annotations

import bisect
import functools
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.limits import most_bytes
from ckpt_core._options import MIB
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.bounds import refuse_file
from ckpt_core._storage.failures import unreadable
from ckpt_core._storage.location import Location

_NODES_AT_ONCE = 64
_MOST_NODE_BYTES = 128 * MIB
"""Maximum stored size of a node. Ours have about 64 KiB decoded; Orbax configures up to 100 MB."""
_MOST_BYTES_AT_ONCE = 4 * MIB
_FEW_KEYS = 2**16
"""Number of keys up to which ``most_keys`` is not called, since it may be slow."""


class Extent(NamedTuple):
    """The place of a key's value.

    Attributes:
        file: data file, relative to the item; empty if the value is inline in the index.
        offset: offset of the first byte.
        size_bytes: size of the value.
        value: the value, if it is inline.
    """

    file: str
    offset: int
    size_bytes: int
    value: bytes = b""


class Index(Mapping[str, Extent]):
    """Key -> place, for a database; each place is parsed when it is first used.

    Attributes:
        files: files that contain the index, without the manifest.
    """

    def __init__(self, item: Location) -> None:
        self.files: set[str] = set()
        self._item = item
        self._entries: dict[bytes, str | bytes] = {}
        self._parsed: dict[str, Extent] = {}

    def add(self, prefix: bytes, entries: list[dict[str, Any]]) -> None:
        """Adds the entries of a leaf node, in the form of ``ts.ocdbt.dump``."""
        for entry in entries:
            value = entry.get("indirect_value")
            self._entries[prefix + entry["key"]] = entry["inline_value"] if value is None else value

    def __getitem__(self, key: str) -> Extent:
        found = self._parsed.get(key)
        if found is None:
            found = self._parsed[key] = self._parse(key)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        try:  # faster than Mapping.get; called for every chunk
            return self._parsed.get(key) or self[key]
        except KeyError:
            return default

    def _parse(self, key: str) -> Extent:
        entry = self._entries[key.encode(errors="surrogateescape")]
        if not isinstance(entry, str):
            return Extent("", 0, len(entry), bytes(entry))
        try:
            return _extent(entry)
        except _UNREADABLE as error:
            raise _unreadable(self._item, error) from error

    def __iter__(self) -> Iterator[str]:
        return (key.decode(errors="surrogateescape") for key in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read_index(
    item: Location,
    context: Any,
    names: Iterable[str] | None = None,
    check: Callable[[Iterable[str]], None] = lambda _: None,
    most_keys: Callable[[], int] = lambda: sys.maxsize,
) -> Index:
    """Reads the index of the database at ``item``; blocks.

    Args:
        item: location of the database.
        context: TensorStore context of the load or save.
        names: names of the wanted arrays: subtrees without them are not read. None for all.
        check: called with the index files before they are read; raises to reject one.
        most_keys: returns the maximum number of keys that the database can have.

    Raises:
        CheckpointCorrupt: the index is missing or damaged.
    """
    refuse_file(item, _MANIFEST, most_bytes(_MANIFEST))
    try:
        base: Any = ts.KvStore.open(item.spec(), context=context).result()
        manifest: Any = ts.ocdbt.dump(base).result()
        newest = max(manifest["versions"], key=lambda version: version["generation_number"])
        found = Index(item)
        if "location" in newest["root"]:
            # asked for at every node, and looks at every leaf
            most = functools.cache(most_keys)
            _collect(base, newest["root"]["location"], found, _key_ranges(names), check, most)
        return found
    except CheckpointCorrupt:
        raise
    except _UNREADABLE as error:
        raise _unreadable(item, error) from error


_UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    RecursionError,
    NotImplementedError,
    OverflowError,
    MemoryError,
)
_MANIFEST = "manifest.ocdbt"


def _unreadable(item: Location, error: Exception) -> Exception:
    doing = f"{item.path}: the index of the array database cannot be read"
    return unreadable(error, doing, file=_MANIFEST)


Place = tuple[str, bytes, bytes | None]
"""Reference to a node, prefix of its keys, first key after them (None for no end)."""
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


def _batches(level: list[Place]) -> Iterator[list[Place]]:
    """Splits nodes into batches to read at once: TensorStore aborts if memory runs out."""
    nodes: list[Place] = []
    size_bytes = 0
    for place in level:
        node = _extent(place[0])
        if node.size_bytes > _MOST_NODE_BYTES:
            raise ValueError(f"impossible node of {node.size_bytes} bytes")
        if nodes and (
            len(nodes) == _NODES_AT_ONCE or size_bytes + node.size_bytes > _MOST_BYTES_AT_ONCE
        ):
            yield nodes
            nodes, size_bytes = [], 0
        nodes.append(place)
        size_bytes += node.size_bytes
    if nodes:
        yield nodes


def _collect(
    base: Any,
    root: str,
    found: Index,
    ranges: list[KeyRange],
    check: Callable[[Iterable[str]], None],
    most_keys: Callable[[], int],
) -> None:
    """Walks the B+tree level by level, only into nodes that may have keys in ``ranges``."""
    level: list[Place] = [(root, b"", None)]
    visited: set[str] = set()
    while level:
        below: list[Place] = []
        for nodes in _batches(level):
            for where, _, _ in nodes:
                if where in visited:
                    raise ValueError("the index refers to itself")
                visited.add(where)
            files = {_extent(where).file for where, _, _ in nodes}
            check(files - found.files)
            found.files |= files
            dumped = [ts.ocdbt.dump(base, where) for where, _, _ in nodes]
            for (_, prefix, stop), node in zip(nodes, dumped, strict=True):
                content: Any = node.result()
                if content["height"] == 0:
                    found.add(prefix, content["entries"])
                    if len(found) > _FEW_KEYS and len(found) > most_keys():
                        raise ValueError(f"more than the {most_keys()} keys that there can be")
                else:
                    below += _children(content["entries"], prefix, stop, ranges)
        level = below


def _children(
    entries: list[dict[str, Any]], prefix: bytes, stop: bytes | None, ranges: list[KeyRange]
) -> Iterator[Place]:
    """The children of an inner node that may have keys in ``ranges``."""
    starts = [prefix + entry["key"] for entry in entries]
    for entry, start, end in zip(entries, starts, [*starts[1:], stop], strict=True):
        if _overlaps_any(ranges, start, end):
            yield entry["location"], prefix + entry["subtree_common_prefix"], end


def _extent(reference: str) -> Extent:
    """The place in a reference ``kind:base:file:offset:length``, as ``ts.ocdbt.dump`` prints it."""
    file, offset, length = reference.rsplit(":", 2)
    return Extent(_file_of(file), int(offset), int(length))


@functools.lru_cache(1024)
def _file_of(reference: str) -> str:
    """The file in ``kind:base:file``, relative to the item."""
    _, base, file = reference.split(":")
    name = base + file if "%" not in reference else urllib.parse.unquote(base + file)
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the index refers to {name!r}, outside the item")
    return name
