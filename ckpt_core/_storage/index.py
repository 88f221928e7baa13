"""The index of an OCDBT database: a B+tree, of which only the wanted part is read."""

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
from ckpt_core._storage.writer import Location

_NODES_AT_ONCE = 64
_MOST_NODE_BYTES = 128 * MIB
"""As it is stored: ours have some 64 KiB decoded, and Orbax asks for 100 MB."""
_MOST_BYTES_AT_ONCE = 4 * MIB
_FEW_KEYS = 2**16
"""Up to so many keys nobody counts how many there can be."""


class Extent(NamedTuple):
    """Where the value of a key lies.

    Attributes:
        file: path relative to the item; empty where the value stands in the index itself.
        offset: first byte.
        size_bytes: length.
        value: the value itself, for values in the index.
    """

    file: str
    offset: int
    size_bytes: int
    value: bytes = b""


class Index(Mapping[str, Extent]):
    """Keys of a database with their places, each of which is made out when it is asked for.

    Attributes:
        files: those in which the index stands, besides the manifest.
    """

    def __init__(self, item: Location) -> None:
        self.files: set[str] = set()
        self._item = item
        self._entries: dict[bytes, str | bytes] = {}
        self._made_out: dict[str, Extent] = {}

    def add(self, prefix: bytes, entries: list[dict[str, Any]]) -> None:
        """Takes in the entries of a leaf node, as ``ts.ocdbt.dump`` gives them."""
        for entry in entries:
            value = entry.get("indirect_value")
            self._entries[prefix + entry["key"]] = entry["inline_value"] if value is None else value

    def __getitem__(self, key: str) -> Extent:
        found = self._made_out.get(key)
        if found is None:
            found = self._made_out[key] = self._make_out(key)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        try:  # without the calls that Mapping makes for it: it is asked for every chunk
            return self._made_out.get(key) or self[key]
        except KeyError:
            return default

    def _make_out(self, key: str) -> Extent:
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
    """The keys of the database at ``item`` with their places.

    Args:
        item: where the database lies.
        context: of the load or save.
        names: of the arrays that are wanted: what is certainly of others is not read.
        check: raises where one of these files should not be read.
        most_keys: gives how many keys there can be.

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
"""Where a node lies, the prefix of its keys, the first key after them."""
KeyRange = tuple[bytes, bytes | None]
"""First key, and first key after; None for no end."""


def _key_ranges(names: Iterable[str] | None) -> list[KeyRange]:
    """Disjoint ranges, in order, that hold all keys of these arrays."""
    if names is None:
        return [(b"", None)]
    encoded = {name.encode(errors="surrogateescape") for name in names}
    if b"" in encoded:  # a bare array has no name: its keys may be anywhere
        return [(b"", None)]
    ranges: list[KeyRange] = []
    for start in sorted(name + b"/" for name in encoded):  # "w-ema/" comes before "w/"
        stop = start[:-1] + b"0"  # "0" comes right after "/"
        if not ranges or ranges[-1][1] is None or start >= ranges[-1][1]:
            ranges.append((start, stop))
    return ranges


def _touches(ranges: list[KeyRange], start: bytes, stop: bytes | None) -> bool:
    """Whether any of the ranges has keys in ``[start, stop)``."""
    after = bisect.bisect_right(ranges, start, key=lambda entry: entry[0])
    if after and (ranges[after - 1][1] is None or ranges[after - 1][1] > start):  # pyright: ignore
        return True
    return after < len(ranges) and (stop is None or ranges[after][0] < stop)


def _few_at_once(level: list[Place]) -> Iterator[list[Place]]:
    """Nodes in parts that are read together: TensorStore ends the process where memory ends."""
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
    """Walks the B+tree level by level, the nodes of a level at once, where wanted keys may be."""
    level: list[Place] = [(root, b"", None)]
    visited: set[str] = set()
    while level:
        below: list[Place] = []
        for nodes in _few_at_once(level):
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
    """The nodes below one that may hold wanted keys: place, prefix of their keys, their end."""
    starts = [prefix + entry["key"] for entry in entries]
    for entry, start, end in zip(entries, starts, [*starts[1:], stop], strict=True):
        if _touches(ranges, start, end):
            yield entry["location"], prefix + entry["subtree_common_prefix"], end


def _extent(reference: str) -> Extent:
    """``kind:base:file:offset:length``, as OCDBT prints an indirect reference."""
    file, offset, length = reference.rsplit(":", 2)
    return Extent(_file_of(file), int(offset), int(length))


@functools.lru_cache(1024)
def _file_of(reference: str) -> str:
    """The file that ``kind:base:file`` names, relative to the item."""
    _, base, file = reference.split(":")
    name = base + file if "%" not in reference else urllib.parse.unquote(base + file)
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the index refers to {name!r}, outside the item")
    return name
