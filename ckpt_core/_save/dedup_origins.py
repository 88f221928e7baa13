"""Decides which data files of the last step a new step shares by hard links.

The data that one step wrote is an *origin*: data files, and an index (OCDBT's manifest and nodes)
that tells where each key is in them. If a later step needs at least 4/5 of an origin's bytes, it
links the origin's index and data files into a child database, ``<item>/ocdbt.linked/<n>``, and
copies the index entries of the keys that are still valid into its own index. The origin is linked
from step to step, always at that depth. Once a step needs less than 4/5 of it, the step writes the
rest anew, so that unneeded bytes do not accumulate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import FileRecord
from ckpt_core._options import MIB
from ckpt_core._storage import Extent, KeyRun, Location, StoreContext, read_index

LINKED_DIRECTORY = "ocdbt.linked"
_OWN = ""
"""The origin of the data that the last step wrote itself."""

LEAST_FILE_BYTES = 1 * MIB
"""Smaller files are written anew, which costs no more; a damaged one then damages one step only."""

_MOST_ORIGINS = 8
"""An item links at most this many origins, as each adds a database to open; the data of those from
which it needs the fewest bytes is written anew."""


@dataclass(frozen=True)
class LinkPlan:
    """Which files to link, and which keys the new database takes over."""

    links: dict[str, str]  # old file name -> new one, both relative to the item
    runs: dict[str, list[KeyRun]]  # child database -> ranges of keys to take over
    bare: frozenset[str]  # no linked file has their ``zarr.json``, so that it must be written
    files: dict[str, FileRecord]  # digests of linked files that are still valid, by new name
    size_bytes: int  # of all linked files


class Origins:
    """The origins in one item of the last step; CheckpointCorrupt if its index is missing or damaged. ``files`` are by name relative to the item."""

    def __init__(
        self, item: Location, files: Mapping[str, FileRecord], context: StoreContext
    ) -> None:
        self._item = item
        self._files = files
        self._context = context
        self._index = read_index(item, context)
        nodes = sorted(self._index.files)
        self._sizes = {name: record.size_bytes for name, record in files.items()}
        self._indices: dict[str, list[str]] = {}
        for name in files:
            origin = origin_of(name)
            inside = _inside(origin, name)
            if origin and (inside == "manifest.ocdbt" or inside.startswith("d/")):
                self._indices.setdefault(origin, []).append(name)
        # the step's own index can be linked only if no node of it is in an older origin
        if not any(map(origin_of, nodes)):
            self._indices[_OWN] = ["manifest.ocdbt", *nodes]

    def worth_linking(self, keys: Mapping[str, list[str]]) -> list[str]:
        """Names of the arrays to link instead of writing their files; ``keys`` has the keys of each array's chunks."""
        extents = {
            name: [self._index[key] for key in its_keys]
            for name, its_keys in keys.items()
            if all(key in self._index for key in its_keys)
        }
        metadata = {name: self._index.get(metadata_key(name)) for name in extents}
        overheads = {
            origin: sum(self._sizes.get(name, 0) for name in names)
            for origin, names in self._indices.items()
        }
        return worth_linking(extents, metadata, self._sizes, overheads)

    def extent(self, key: str) -> Extent:
        """File, offset and size of the value of a key."""
        return self._index[key]

    def plan(self, keys: Mapping[str, list[str]]) -> LinkPlan:
        """The links that bring the chunks of these arrays into a new item; ``keys`` has the keys of each
        array's chunks. CheckpointCorrupt if an origin's index does not hold a key that the item's index has.
        """
        kept = {key for its_keys in keys.values() for key in its_keys}
        files = {self._index[key].file for key in kept}
        described = {
            name: key
            for name in keys
            if (key := metadata_key(name)) in self._index and self._index[key].file in files
        }
        kept.update(described.values())
        by_origin: dict[str, set[str]] = {}
        for key in kept:
            by_origin.setdefault(origin_of(self._index[key].file), set()).add(key)
        names = (f"{LINKED_DIRECTORY}/{number}" for number in range(len(by_origin) + 1))
        free = next(name for name in names if name not in by_origin)
        links: dict[str, str] = {}
        runs: dict[str, list[KeyRun]] = {}
        for origin, its_keys in by_origin.items():
            new = origin or free
            runs[new] = self._runs(origin, its_keys)
            for name in {*self._indices[origin], *(self._index[key].file for key in its_keys)}:
                links[name] = f"{new}/{_inside(origin, name)}"
        size_bytes = sum(self._sizes[name] for name in links)
        bare = frozenset(keys.keys() - described.keys())
        return LinkPlan(links, runs, bare, self._digests(links, kept), size_bytes)

    def _runs(self, origin: str, keys: Collection[str]) -> list[KeyRun]:
        """The keys as ranges (first, last) that are consecutive in the index of their origin.
        That index may hold more keys, of arrays that changed since: a range ends before them.
        """
        index = read_index(self._item / origin, self._context) if origin else self._index
        ordered = sorted((key.encode(errors="surrogateescape"), key) for key in index)
        runs: list[KeyRun] = []
        open_run, found = False, 0
        for encoded, key in ordered:
            if key not in keys:
                open_run = False
                continue
            place, there = self._index[key], index[key]
            if (_inside(origin, place.file), place.offset) != (there.file, there.offset):
                raise CheckpointCorrupt(
                    f"{self._item.path}: {origin} does not hold {key}", leaf=key
                )
            runs[-1:] = [(runs[-1][0], encoded)] if open_run else [*runs[-1:], (encoded, encoded)]
            open_run, found = True, found + 1
        if found < len(keys):
            raise CheckpointCorrupt(f"{self._item.path}: {origin} lacks {len(keys) - found} keys")
        return runs

    def _digests(self, links: Mapping[str, str], kept: Collection[str]) -> dict[str, FileRecord]:
        """The digests of linked files that are still valid, by new name. A digest of a whole file always is;
        one of the bytes that no block checksum covers is valid only if all chunks in the file are still in use.
        """
        lost = {extent.file for key, extent in self._index.items() if key not in kept}
        return {
            new: self._files[name]
            for name, new in links.items()
            if name in self._files and not (self._files[name].data and name in lost)
        }


def origin_of(file: str) -> str:
    """Directory of the origin that a file belongs to; empty if the step wrote the file itself."""
    parts = file.split("/", 2)
    return "/".join(parts[:2]) if parts[0] == LINKED_DIRECTORY else _OWN


def _inside(origin: str, file: str) -> str:
    """The file's path relative to its origin."""
    return file[len(origin) + 1 :] if origin else file


def metadata_key(array: str) -> str:
    """The key of an array's ``zarr.json``."""
    return f"{array}/zarr.json" if array else "zarr.json"


def worth_linking(
    extents: Mapping[str, list[Extent]],
    metadata: Mapping[str, Extent | None],
    sizes: Mapping[str, int],
    overheads: Mapping[str, int],
) -> list[str]:
    """Names of the arrays with files of at least 1 MiB that are needed to 4/5 or more, counting the chunks (``extents``) and the
    ``zarr.json`` (``metadata``) of each array. The same must hold for the origins of the files, with their indexes (``overheads``,
    in bytes). Dropping one array may make the rest of a file not worth linking, so this repeats until nothing changes.
    """
    chosen: dict[str, set[str]] = {}
    for name, its_extents in extents.items():
        files = {extent.file for extent in its_extents}
        origins = set(map(origin_of, files))
        # values inside the index (up to 100 bytes) have no file to link
        if "" not in files and len(origins) == 1 and origins <= overheads.keys():
            chosen[name] = files
    while True:
        live = _live_bytes(chosen, extents, metadata)
        poor = {
            file
            for file, live_bytes in live.items()
            if sizes.get(file, 0) < LEAST_FILE_BYTES or _mostly_dead(live_bytes, sizes[file])
        }
        poor = poor or _of_poor_origins(live, sizes, overheads)
        if not poor:
            return list(chosen)
        chosen = {name: files for name, files in chosen.items() if not files & poor}


def _live_bytes(
    chosen: Mapping[str, set[str]],
    extents: Mapping[str, list[Extent]],
    metadata: Mapping[str, Extent | None],
) -> Counter[str]:
    """For each file that holds chunks of chosen arrays, the number of its bytes that are needed."""
    live: Counter[str] = Counter()
    for name in chosen:
        for extent in extents[name]:
            live[extent.file] += extent.size_bytes
    # arrays that are stored alike may have one zarr.json
    for described in {metadata[name] for name in chosen}:
        if described is not None and described.file in live:
            live[described.file] += described.size_bytes
    return live


def _of_poor_origins(
    live: Mapping[str, int], sizes: Mapping[str, int], overheads: Mapping[str, int]
) -> set[str]:
    """Files of origins not worth linking: those needed to less than 4/5, with their index, and all but the 8 that give the most bytes."""
    used: Counter[str] = Counter()
    size: Counter[str] = Counter(overheads)
    for file, live_bytes in live.items():
        used[origin_of(file)] += live_bytes
        size[origin_of(file)] += sizes[file]
    poor = {origin for origin in used if _mostly_dead(used[origin], size[origin])}
    poor.update(origin for origin, _ in used.most_common()[_MOST_ORIGINS:])
    return {file for file in live if origin_of(file) in poor}


def _mostly_dead(live_bytes: int, size_bytes: int) -> bool:
    """Whether less than 4/5 of the bytes are needed."""
    return 5 * live_bytes < 4 * size_bytes
