"""Finds leaves that did not change since the last step, and hard-links their data files.

Each step's directory contains links to all files that it needs, so that any other step can be deleted. If less than 4/5 of a
file is needed, its arrays are written anew, so that unneeded bytes do not accumulate; but into other files than what
has changed, so that the next step links them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._background import run_each
from ckpt_core._directory import (
    FileIdentity,
    SourceFile,
    crc32_of,
    identify,
    link_files,
    link_same,
    pieces_of,
)
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.checksums import bytes_of, checksum_chunk, stored_chunks
from ckpt_core._format.record import FileRecord
from ckpt_core._layout.chunks import BLOCK_BYTES, keyed_parts
from ckpt_core._layout.regions import gaps, whole
from ckpt_core._operation import logger
from ckpt_core._options import KIB, MIB
from ckpt_core._save.job import PreparedItem
from ckpt_core._storage import ArrayToWrite, ArrayWriter, DataFiles, Location, Place, Rows

LINKED_DIRECTORY = "ocdbt.linked"
LEAST_FILE_BYTES = 1 * MIB
"""Smaller files are written anew, which costs no more; a damaged one then damages one step only."""
_THREADS = min(4, os.cpu_count() or 1)
_FIRST_LOOK_BYTES = 64 * KIB  # compared first: a changed array usually differs there already


class _SavedItem(NamedTuple):
    """What is remembered of an item with arrays."""

    arrays: dict[str, ArrayToWrite]  # by name, without their pieces
    rows: Rows  # where their values stand
    checksums: dict[str, tuple[int, ...]]  # of the blocks of each chunk, by its key


class _SavedStep(NamedTuple):
    """What a Checkpointer remembers of the last step."""

    path: str
    items: dict[str, _SavedItem]
    identities: dict[str, FileIdentity]  # by path in the step
    files: Mapping[str, FileRecord]  # by path in the step


_Linked = tuple[dict[str, FileRecord], Sequence[ArrayToWrite], Sequence[ArrayToWrite]]
"""The files that were linked, by path in the checkpoint; unchanged arrays that are not worth linking, to be written into files of
their own; and the other arrays with what must still be written, at least what describes them."""


class Links:
    """What a Checkpointer remembers of its last step: ``link`` for each item, then ``prepare``, commit, ``committed``."""

    def __init__(self) -> None:
        self._last: _SavedStep | None = None
        self._next: _SavedStep | None = None
        self._changing: set[tuple[str, str]] = set()

    def link(self, item: PreparedItem, target: str, writer: ArrayWriter) -> _Linked:
        """Links an item's unchanged arrays into ``target``, and has its ``writer`` take over their chunks."""
        try:
            if self._last is not None and item.name in self._last.items:
                linker = _ItemLinker(self._last, item, self._changing)
                return linker.link(f"{target}/{item.folder}", writer)
        except (OSError, CheckpointCorrupt) as error:
            logger.debug("%s: everything is written anew: %s", target, error)
        return {}, (), item.arrays

    def link_file(self, name: str, target: str, source: SourceFile) -> FileRecord | None:
        """Links a file of the last step to ``target/name`` if it holds what ``source`` holds; None if not."""
        last = self._last
        if last is None or (known := last.identities.get(name)) is None:
            return None
        if not LEAST_FILE_BYTES <= known.size_bytes == source.size_bytes:
            return None
        old, new = f"{last.path}/{name}", f"{target}/{name}"
        return last.files[name] if link_same(old, new, known, pieces_of(source)) else None

    def prepare(
        self,
        path: str,
        written_at: str,
        items: Iterable[PreparedItem],
        writers: Mapping[str, ArrayWriter],
        files: Mapping[str, FileRecord],
    ) -> None:
        """Remembers a step that is in the temporary directory ``written_at`` and is about to be committed to ``path``."""
        saved: dict[str, _SavedItem] = {}
        for item in items:
            if (writer := writers.get(item.name)) is not None:
                arrays = {array.name: array for array in item.arrays}
                saved[item.name] = _SavedItem(arrays, writer.rows, writer.checksums)
        self._next = _SavedStep(path, saved, identify(written_at, files), files)

    def forget(self) -> None:
        """Called when damage was found in a step: the next save links nothing and writes all."""
        self._last = None

    def committed(self) -> None:
        """The step passed to ``prepare`` is committed: it becomes the last step."""
        self._last, self._next = self._next, None


class _ItemLinker:
    """Links the arrays of one item that did not change; those that did, no later save compares (``changing``)."""

    def __init__(
        self, last: _SavedStep, item: PreparedItem, changing: set[tuple[str, str]]
    ) -> None:
        self._last = last
        self._saved, self._rows, self._checksums = last.items[item.name]
        self._item = item
        self._changing = changing
        self._folder = f"{last.path}/{item.folder}"

    @functools.cached_property
    def _places(self) -> dict[str, Place]:
        """Key of each chunk in a file -> where it stands."""
        rows, found = self._rows, dict[str, Place]()
        for key, position in zip(rows.keys, rows.which, strict=True):
            file, offset, size_bytes = rows.places[3 * position : 3 * position + 3]
            if file >= 0 and key in self._checksums:
                found[key] = rows.paths[file], offset, size_bytes
        return found

    def link(self, target: str, writer: ArrayWriter) -> _Linked:
        """Links unchanged arrays into the item's directory ``target``."""
        candidates = {array.name: array for array in self._item.arrays if self._may_be_same(array)}
        keys = {name: _keys(array) for name, array in candidates.items()}
        keys = {name: its for name, its in keys.items() if all(key in self._places for key in its)}
        compared, same = self._worth_linking(keys), list[str]()
        if compared:
            with contextlib.closing(DataFiles(Location(self._folder, True))) as data:
                arrays = [candidates[name] for name in compared]
                check = functools.partial(self._is_same, data)
                found = run_each(check, arrays, _THREADS, "ckpt-compare")
            same = [name for name, equal in zip(compared, found, strict=True) if equal]
        chosen = self._worth_linking({name: keys[name] for name in same})
        kept = {name for name in keys.keys() - {*compared} if self._is_object(candidates[name])}
        unlinked = kept.union(same).difference(chosen)
        if sum(candidates[name].size_bytes for name in unlinked) < LEAST_FILE_BYTES:
            unlinked = set[str]()
        linked = [key for name in chosen for key in keys[name]]
        files = self._link_files(target, linked, writer) if linked else {}
        described = {name: replace(candidates[name], pieces=(), size_bytes=0) for name in chosen}
        arrays = [described.get(array.name, array) for array in self._item.arrays]
        apart = [array for array in arrays if array.name in unlinked]
        return files, apart, [array for array in arrays if array.name not in unlinked]

    def _worth_linking(self, keys: Mapping[str, Sequence[str]]) -> list[str]:
        """Names of the arrays in files of at least 1 MiB that are needed to 4/5 or more; ``keys`` are those of their
        chunks. Dropping one array may make the rest of a file not worth linking, so this repeats until nothing changes.
        """
        prefix, files = f"{self._item.folder}/", self._last.files
        chosen = {name: [self._places[key] for key in its_keys] for name, its_keys in keys.items()}
        while True:
            live = Counter[str]()
            for path, _, size_bytes in itertools.chain(*chosen.values()):
                live[path] += size_bytes
            sizes = {path: files[prefix + path].size_bytes for path in live}
            poor = {
                path
                for path, size_bytes in sizes.items()
                if size_bytes < LEAST_FILE_BYTES or 5 * live[path] < 4 * size_bytes
            }
            if not poor:
                return list(chosen)
            chosen = {
                name: places
                for name, places in chosen.items()
                if poor.isdisjoint(path for path, _, _ in places)
            }

    def _link_files(
        self, target: str, keys: Sequence[str], writer: ArrayWriter
    ) -> dict[str, FileRecord]:
        """Links the files of these chunks, which ``writer`` takes over."""
        prefix, kept = f"{self._item.folder}/", {*keys}
        live: dict[str, list[tuple[int, int]]] = {}  # of each file
        for key in keys:
            path, offset, size_bytes = self._places[key]
            live.setdefault(path, []).append((offset, size_bytes))
        new = {path: f"{LINKED_DIRECTORY}/d/{os.path.basename(path)}" for path in live}
        dropped = {path for key, (path, _, _) in self._places.items() if key not in kept}
        files: dict[str, FileRecord] = {}
        for path, link in new.items():
            file = self._last.files[prefix + path]
            if file.data and path in dropped:  # its digest also covers what is not needed any more
                outside = gaps(file.size_bytes, live[path])
                file = replace(file, crc32=crc32_of(f"{self._folder}/{path}", outside))
            files[prefix + link] = file
        identities = {path: self._last.identities[prefix + path] for path in new}
        link_files(self._folder, target, new, identities)  # what fails before leaves no link
        places = ((key, self._places[key]) for key in keys)
        writer.take_over({key: (new[path], start, size) for key, (path, start, size) in places})
        writer.checksums |= {key: self._checksums[key] for key in keys}
        return files

    def _may_be_same(self, array: ArrayToWrite) -> bool:
        """Whether it is worth comparing the array's values with those of the last step."""
        saved = self._saved.get(array.name)
        if saved is None or array.size_bytes == 0:
            return False
        if (array.spec, array.chunk, array.codec) != (saved.spec, saved.chunk, saved.codec):
            return False
        return self._is_object(array) or (
            array.codec is None
            and array.size_bytes >= LEAST_FILE_BYTES
            and (self._item.name, array.name) not in self._changing
        )

    def _is_object(self, array: ArrayToWrite) -> bool:
        """Whether it is the same jax array object: weak references to one object are identical."""
        return array.source is not None and array.source is self._saved[array.name].source

    def _is_same(self, data: DataFiles, array: ArrayToWrite) -> bool:
        """Whether the array has the values that the last step saved. The same object is compared by checksums, as on CPU
        it can share memory that the user may write to; another one, as a jitted function passed through, byte by byte
        with the file.
        """
        chunks = stored_chunks(array.name, array.pieces, array.chunk)
        if self._is_object(array):
            return all(checksum_chunk(values) == self._checksums.get(key) for key, values in chunks)
        if all(_equals(self._places[key], bytes_of(values), data) for key, values in chunks):
            return True
        self._changing.add((self._item.name, array.name))
        return False


def _equals(place: Place, values: np.ndarray[Any, Any], data: DataFiles) -> bool:
    """Whether a chunk in a file has exactly these bytes; stops reading at the first difference."""
    path, offset, size_bytes = place
    if size_bytes != values.size:
        return False
    start, step = 0, _FIRST_LOOK_BYTES
    buffer = np.empty(min(BLOCK_BYTES, values.size), np.uint8)
    while start < values.size:
        part = values[start : start + step]
        there = buffer[: part.size]
        if data.read(path, offset + start, there) < part.size:
            return False
        if not np.array_equal(_words(there), _words(part)):
            return False
        start, step = start + step, BLOCK_BYTES
    return True


def _words(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes as 64-bit words if their number allows it: comparing is then 8 times as fast."""
    return data.view(np.uint64) if data.size % 8 == 0 else data


def _keys(array: ArrayToWrite) -> list[str]:
    """The keys of an array's chunks."""
    prefix = f"{array.name}/" if array.name else ""
    parts = keyed_parts(whole(array.spec.stored_shape), array.chunk)
    return [prefix + key for key, _ in parts]
