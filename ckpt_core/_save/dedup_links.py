"""Finds leaves that did not change since the last step, and hard-links their data files.

Each step's directory contains links to all files that it needs, so that any other step can be
deleted. ``dedup_origins`` decides which files are worth linking, and where the links go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._background.threads import run_each
from ckpt_core._directory import (
    FileIdentity,
    SourceFile,
    identify,
    link_files,
    link_same,
    pieces_of,
)
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.checksums import bytes_of, checksum_chunk, stored_chunks
from ckpt_core._format.record import FileRecord
from ckpt_core._layout.chunks import BLOCK_BYTES, keyed_parts
from ckpt_core._layout.regions import whole
from ckpt_core._operation import logger
from ckpt_core._options import KIB
from ckpt_core._save.dedup_origins import LEAST_FILE_BYTES, Origins
from ckpt_core._save.job import PreparedItem
from ckpt_core._storage import ArrayToWrite, DataFiles, Extent, KeyRun, Location, StoreContext
from ckpt_core._tree.leaves import LeafSpec

_THREADS = min(4, os.cpu_count() or 1)
_FIRST_LOOK_BYTES = 64 * KIB
"""Compare this much of a chunk first: a changed array usually differs there already."""


class _SavedArray(NamedTuple):
    """What is remembered of a saved array; ``source`` is a weak reference to it if it is jax's."""

    spec: LeafSpec
    chunk: tuple[int, ...]
    codec: str | None
    source: Any


@dataclass(frozen=True)
class _SavedStep:
    """What a Checkpointer remembers of the last step."""

    path: str
    arrays: dict[str, dict[str, _SavedArray]]  # item -> array name -> array
    checksums: dict[str, dict[str, tuple[int, ...]]]  # item -> chunk key -> checksums of its blocks
    identities: dict[str, FileIdentity]  # by path in the step
    files: Mapping[str, FileRecord]  # by path in the step


@dataclass(frozen=True)
class Linked:
    """The result of linking one item."""

    names: frozenset[str]  # the arrays with linked chunks, which are not written
    bare: frozenset[str]  # those of them that still need their metadata (``zarr.json``) written
    runs: dict[str, list[KeyRun]]  # child database -> keys that the item's database takes over
    checksums: dict[str, tuple[int, ...]]  # of the blocks of the linked chunks, by key
    files: dict[str, FileRecord]  # linked files with valid digests, by path in the checkpoint
    size_bytes: int  # of all linked files

    def to_write(self, arrays: Iterable[ArrayToWrite]) -> list[ArrayToWrite]:
        """The arrays that must still be written; for a ``bare`` one, only its metadata."""
        rest = (
            replace(array, pieces=(), size_bytes=0) if array.name in self.names else array
            for array in arrays
            if array.name not in self.names or array.name in self.bare
        )
        return list(rest)


class Links:
    """What one Checkpointer remembers of the step it committed last: ``link`` is called for each item, then ``prepare``, commit, ``committed``."""

    def __init__(self) -> None:
        self._last: _SavedStep | None = None
        self._next: _SavedStep | None = None
        self._changing: set[tuple[str, str]] = set()

    def link(self, item: PreparedItem, target: str, context: StoreContext) -> Linked | None:
        """Links an item's unchanged arrays into the checkpoint ``target``. None if there are none, or if files cannot be
        linked (another file system; the last step was deleted, replaced or changed): the save then writes everything.
        """
        if self._last is None or item.name not in self._last.arrays:
            return None
        try:
            linker = _ItemLinker(self._last, item, self._changing, context)
            return linker.link(f"{target}/{item.folder}")
        except (OSError, CheckpointCorrupt) as error:
            logger.debug("%s: everything is written anew: %s", target, error)
            return None

    def link_file(self, name: str, target: str, source: SourceFile) -> FileRecord | None:
        """Links a file of the last step to ``target/name`` if it holds what ``source`` holds; None if not."""
        last = self._last
        known = None if last is None else last.identities.get(name)
        if last is None or known is None or known.size_bytes != source.size_bytes:
            return None
        if known.size_bytes < LEAST_FILE_BYTES:
            return None
        pieces = pieces_of(source)
        old, new = f"{last.path}/{name}", f"{target}/{name}"
        return last.files[name] if link_same(old, new, known, pieces) else None

    def prepare(
        self,
        path: str,
        written_at: str,
        items: Iterable[PreparedItem],
        checksums: dict[str, dict[str, tuple[int, ...]]],
        files: Mapping[str, FileRecord],
    ) -> None:
        """Remembers a step that is in the temporary directory ``written_at`` and is about to be committed to ``path``."""
        arrays = {
            item.name: {
                array.name: _SavedArray(array.spec, array.chunk, array.codec, array.source)
                for array in item.arrays
            }
            for item in items
            if item.record.form == "tree"
        }
        self._next = _SavedStep(path, arrays, checksums, identify(written_at, files), files)

    def forget(self) -> None:
        """Called when damage was found in a step: the next save links nothing and writes all."""
        self._last = None

    def committed(self) -> None:
        """The step passed to ``prepare`` is committed: it becomes the last step."""
        self._last, self._next = self._next, None


class _ItemLinker:
    """Finds the arrays of one item that did not change since the last step, and links them. Adds to
    ``changing`` the (item, array name) pairs that it finds changed: no later save compares them byte by byte.
    """

    def __init__(
        self,
        last: _SavedStep,
        item: PreparedItem,
        changing: set[tuple[str, str]],
        context: StoreContext,
    ) -> None:
        prefix = f"{item.folder}/"
        self._saved = last.arrays[item.name]
        self._checksums = last.checksums[item.name]
        self._item = item
        self._changing = changing
        self._context = context
        self._location = Location(f"{last.path}/{item.folder}", True)
        self._identities = {
            name.removeprefix(prefix): identity
            for name, identity in last.identities.items()
            if name.startswith(prefix)
        }
        self._files = {name: last.files[prefix + name] for name in self._identities}

    def link(self, target: str) -> Linked | None:
        """Links unchanged arrays into the item's directory ``target``; None if there are none."""
        candidates = {array.name: array for array in self._item.arrays if self._may_be_same(array)}
        if not candidates:
            return None
        origins = Origins(self._location, self._files, self._context)
        keys = {name: _keys(array) for name, array in candidates.items()}
        chosen = origins.worth_linking(keys)
        with contextlib.closing(DataFiles(self._location)) as data:
            same = _filter_in_threads(
                lambda name: self._is_same(candidates[name], origins, data), chosen
            )
        if len(same) < len(chosen):
            chosen = origins.worth_linking({name: keys[name] for name in same})
        if not chosen:
            return None
        plan = origins.plan({name: keys[name] for name in chosen})
        link_files(self._location.path, target, plan.links, self._identities)
        prefix = f"{self._item.folder}/"
        crcs = self._checksums
        return Linked(
            frozenset(chosen),
            plan.bare,
            plan.runs,
            {key: crcs[key] for name in chosen for key in keys[name]},
            {prefix + name: record for name, record in plan.files.items()},
            plan.size_bytes,
        )

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

    def _is_same(self, array: ArrayToWrite, origins: Origins, data: DataFiles) -> bool:
        """Whether the array has the values that the last step saved. The same object is compared by checksums:
        on CPU a ``jax.Array`` can share the memory of a numpy array, which the user may write to. Another
        object, which a jitted function may have passed through, is compared with the file byte by byte.
        """
        chunks = stored_chunks(array.name, array.pieces, array.chunk)
        if self._is_object(array):
            return all(checksum_chunk(values) == self._checksums.get(key) for key, values in chunks)
        if all(_equals(origins.extent(key), bytes_of(values), data) for key, values in chunks):
            return True
        self._changing.add((self._item.name, array.name))
        return False


def _equals(extent: Extent, values: np.ndarray[Any, Any], data: DataFiles) -> bool:
    """Whether a chunk in a file has exactly these bytes; stops reading at the first difference."""
    if extent.size_bytes != values.size:
        return False
    start, step = 0, _FIRST_LOOK_BYTES
    buffer = np.empty(min(BLOCK_BYTES, values.size), np.uint8)
    while start < values.size:
        part = values[start : start + step]
        there = buffer[: part.size]
        if data.read(extent.file, extent.offset + start, there) < part.size:
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


def _filter_in_threads(holds: Callable[[str], bool], names: Sequence[str]) -> list[str]:
    """The names for which ``holds`` is true; it is called in parallel threads."""
    found = run_each(holds, names, _THREADS, "ckpt-compare")
    return [name for name, held in zip(names, found, strict=True) if held]
