"""Leaves that are the same as in the last step: their data files are linked, not written again.

A step has all that it needs below its own directory: deleting one leaves the others whole. Which
files are worth linking, and where they go, is decided in ``origins``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._background.threads import run_each
from ckpt_core._directory import FileIdentity, identify, link_files
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._events import logger
from ckpt_core._format.checksums import bytes_of, checksum_chunk, stored_chunks
from ckpt_core._format.record import FileRecord
from ckpt_core._layout.chunks import BLOCK_BYTES, keyed_parts
from ckpt_core._layout.regions import whole
from ckpt_core._options import KIB
from ckpt_core._save.dedup_origins import LEAST_FILE_BYTES, Origins
from ckpt_core._save.prepare import PreparedItem
from ckpt_core._storage import ArrayToWrite, DataFiles, Extent, KeyRun, Location
from ckpt_core._tree.leaves import LeafSpec

_THREADS = min(4, os.cpu_count() or 1)
_FIRST_LOOK_BYTES = 64 * KIB
"""What is compared first: values that changed mostly did so everywhere."""


class _SavedArray(NamedTuple):
    """What must be the same of an array for its chunks to be the same."""

    spec: LeafSpec
    chunk: tuple[int, ...]
    codec: str | None
    source: Any


@dataclass(frozen=True)
class _SavedStep:
    """What is remembered of a step.

    Attributes:
        path: of its directory.
        arrays, checksums: by item, then by name and by key.
        identities, files: what its files are, and their digests, by relative path.
    """

    path: str
    arrays: dict[str, dict[str, _SavedArray]]
    checksums: dict[str, dict[str, list[int]]]
    identities: dict[str, FileIdentity]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True)
class Linked:
    """What was linked into an item.

    Attributes:
        names: the arrays that need not be written.
        bare: those of them of which the metadata has to be.
        runs: what the item's database takes over, by child database.
        checksums: of the arrays' chunks.
        files: digests of linked files, by path relative to the checkpoint, where they still hold.
        size_bytes: of all linked files.
    """

    names: frozenset[str]
    bare: frozenset[str]
    runs: dict[str, list[KeyRun]]
    checksums: dict[str, list[int]]
    files: dict[str, FileRecord]
    size_bytes: int

    def to_write(self, arrays: Iterable[ArrayToWrite]) -> list[ArrayToWrite]:
        """What of an item's arrays is still to be written."""
        rest = (
            array._replace(pieces=[], size_bytes=0) if array.name in self.names else array
            for array in arrays
            if array.name not in self.names or array.name in self.bare
        )
        return list(rest)


class Links:
    """What one Checkpointer remembers of the last step that it committed."""

    def __init__(self) -> None:
        self._last: _SavedStep | None = None
        self._next: _SavedStep | None = None
        self._changing: set[tuple[str, str]] = set()

    def link(self, item: PreparedItem, target: str, context: Any) -> Linked | None:
        """Links what is unchanged into the checkpoint at ``target``; None where nothing is.

        Whatever keeps files from being linked (another file system, a step that was deleted,
        replaced or changed) is no error: everything is written then.
        """
        if self._last is None or item.name not in self._last.arrays:
            return None
        try:
            linker = _ItemLinker(self._last, item, self._changing, context)
            return linker.link(f"{target}/{item.folder}")
        except (OSError, CheckpointCorrupt) as error:
            logger.debug("%s: everything is written anew: %s", target, error)
            return None

    def prepare(
        self,
        path: str,
        written_at: str,
        items: Iterable[PreparedItem],
        checksums: dict[str, dict[str, list[int]]],
        files: Mapping[str, FileRecord],
    ) -> None:
        """Looks at a step that is about to be committed.

        Args:
            path: where it will be.
            written_at: where it is.
            items: what it holds.
            checksums: by item and key of the chunk.
            files: digests of its files.
        """
        arrays = {
            item.name: {
                array.name: _SavedArray(array.spec, array.chunk, array.codec, array.source)
                for array in item.arrays
            }
            for item in items
        }
        self._next = _SavedStep(path, arrays, checksums, identify(written_at, files), files)

    def forget(self) -> None:
        """Damage was met: what may share the damaged file hands nothing on, and all is written."""
        self._last = None

    def committed(self) -> None:
        """The step that was prepared is the last one from now on."""
        self._last, self._next = self._next, None


class _ItemLinker:
    """Finds out what of one item is as it was in the last step, and links it.

    Args:
        last: the last step.
        item: as it is now.
        changing: item and array of what was found changed before; added to.
        context: of the save.
    """

    def __init__(
        self, last: _SavedStep, item: PreparedItem, changing: set[tuple[str, str]], context: Any
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
        """Links what is unchanged into the item at ``target``; None where nothing is."""
        candidates = {array.name: array for array in self._item.arrays if self._may_be_same(array)}
        if not candidates:
            return None
        origins = Origins(self._location, self._files, self._context)
        keys = {name: _keys(array) for name, array in candidates.items()}
        chosen = origins.worth_linking(keys)
        with contextlib.closing(DataFiles(self._location)) as data:
            same = _those_that(lambda name: self._is_same(candidates[name], origins, data), chosen)
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
        """Whether it is the very object that was saved: weak references to one are one."""
        return array.source is not None and array.source is self._saved[array.name].source

    def _is_same(self, array: ArrayToWrite, origins: Origins, data: DataFiles) -> bool:
        """Whether the array's values are those of the last step.

        The same object may still have others: on CPU a ``jax.Array`` can share the memory of a
        numpy array, which the user may change. Its checksums tell. Another object, such as what a
        jitted function passed through, is held against the bytes of the file.
        """
        chunks = stored_chunks(array.name, array.pieces, array.chunk)
        if self._is_object(array):
            return all(checksum_chunk(values) == self._checksums.get(key) for key, values in chunks)
        if all(_equals(origins.extent(key), bytes_of(values), data) for key, values in chunks):
            return True
        self._changing.add((self._item.name, array.name))
        return False


def _equals(extent: Extent, values: np.ndarray[Any, Any], data: DataFiles) -> bool:
    """Whether a chunk in a file has exactly these bytes; little is read where it has not."""
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
    """Bytes as words where they divide: compared eight times as fast."""
    return data.view(np.uint64) if data.size % 8 == 0 else data


def _keys(array: ArrayToWrite) -> list[str]:
    """The keys of an array's chunks."""
    prefix = f"{array.name}/" if array.name else ""
    parts = keyed_parts(whole(array.spec.stored_shape), array.chunk)
    return [prefix + key for key, _ in parts]


def _those_that(holds: Callable[[str], bool], names: Sequence[str]) -> list[str]:
    """The names for which it holds, found out in parallel."""
    found = run_each(holds, names, _THREADS, "ckpt-compare")
    return [name for name, held in zip(names, found, strict=True) if held]
