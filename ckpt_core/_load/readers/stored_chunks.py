"""Finds, reads and verifies the stored chunks of an item that ckpt wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckpt_core._directory import is_local_disk
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.checksums import crc_of
from ckpt_core._layout.chunks import chunk_key, covered_blocks, rows_per_block
from ckpt_core._load.checkpoint import NativeCheckpoint, NativeItem
from ckpt_core._load.readers.checksums import ItemChecksums
from ckpt_core._load.readers.wants import Array, Want
from ckpt_core._options import MIB, Options
from ckpt_core._storage import (
    INDEX_FILE,
    DataFiles,
    Extent,
    StoreFiles,
    most_chunk_bytes,
    most_stored_bytes,
    read_index,
)
from ckpt_core._tree import format_path

_FEW_OF = 8
"""If fewer than 1/8 of the leaves are wanted, read index and checksums partially."""
_UNVERIFIED_BLOCK_BYTES = 4 * MIB
"""Size of the blocks that are read with ``Options(checksums=False)``."""


class StoredChunks:
    """Finds, reads and verifies chunks. ``leaf`` is always the position of a leaf in the item.

    Args:
        checkpoint, item: where the chunks are.
        wants: the leaves that will be asked for.
        options: options of the load.
        context: TensorStore context of the load.

    Attributes:
        files: the item's data files; the caller closes them.
        index: file, offset and size of every chunk of the wanted leaves, by key.

    Raises:
        CheckpointCorrupt: the index is missing or damaged.
    """

    def __init__(
        self,
        checkpoint: NativeCheckpoint,
        item: NativeItem,
        wants: Sequence[Want],
        options: Options,
        context: Any,
    ) -> None:
        self._checkpoint = checkpoint
        self._item = item
        self._verify = options.checksums
        self._location = checkpoint.location / item.directory
        self.files = (
            DataFiles(self._location, checkpoint.sizes_in(item), is_local_disk)
            if self._location.local
            else StoreFiles(self._location, context)
        )
        manifest = checkpoint.read_file(f"{item.directory}/{INDEX_FILE}")
        few = len(wants) * _FEW_OF < len(item.paths)
        wanted = [item.name_of(want.leaf) for want in wants] if few else None
        try:  # self.files opens files while the index is read: close them on failure
            check, most = self.files.check, item.most_keys
            self.index = read_index(self._location, context, wanted, check, most, manifest)
        except BaseException:
            self.files.close()
            raise
        self._there: dict[str, int] = {}  # how long the data files are that were looked at
        self._crcs = ItemChecksums(checkpoint, item, few=few)

    @property
    def block_bytes(self) -> int:
        """Number of bytes that one checksum covers; correct only after ``checksums`` was called."""
        return self._crcs.block_bytes if self._verify else _UNVERIFIED_BLOCK_BYTES

    def find(self, leaf: int, key: str, chunk_size: int) -> tuple[str, Extent]:
        """The key, and where its chunk is stored. Checks size, file and range, but not the content.

        Args:
            leaf: the leaf of the chunk.
            key: key of the chunk: array name and chunk position.
            chunk_size: bytes of the decoded chunk.

        Raises:
            CheckpointCorrupt: the chunk is missing, has an impossible size, lies in a file that the
                record does not list, or beyond the file's end.
        """
        extent = self.index.get(key)
        if extent is None:
            raise self.corrupt(leaf, f"chunk {key} is missing")
        if self._item.codecs[leaf] is None:
            if extent.size_bytes != chunk_size:
                what = f"{extent.size_bytes} bytes, not {chunk_size}"
                raise self.corrupt(leaf, f"chunk {key} has {what}")
        elif extent.size_bytes > most_stored_bytes(chunk_size):
            what = f"{extent.size_bytes} bytes, too many for {chunk_size}"
            raise self.corrupt(leaf, f"chunk {key} has {what}")
        elif chunk_size > most_chunk_bytes(extent.size_bytes):
            what = f"{extent.size_bytes} bytes, too few for {chunk_size}"
            raise self.corrupt(leaf, f"chunk {key} has {what}")
        if extent.file:
            file = f"{self._item.directory}/{extent.file}"
            listed = self._checkpoint.record.files.get(file)
            if listed is None:
                raise self.corrupt(leaf, f"chunk {key} lies in {file}, which was never saved")
            if extent.offset + extent.size_bytes > listed.size_bytes:
                raise self.corrupt(
                    leaf, f"chunk {key} lies beyond the end of the file", extent.file
                )
            if extent.file not in self._there:
                try:  # before there is a buffer for it
                    (self._there[extent.file],) = self.files.check([extent.file])
                except CheckpointCorrupt as error:
                    raise self.corrupt(leaf, str(error), extent.file) from error
            if extent.offset + extent.size_bytes > self._there[extent.file]:
                raise self.corrupt(leaf, "the file is truncated", extent.file)
        return key, extent

    def find_only(self, leaf: int) -> tuple[str, Extent]:
        """As ``find``, for an array that is stored as a single chunk."""
        name, spec = self._item.name_of(leaf), self._item.specs[leaf]
        key = chunk_key((0,) * len(spec.stored_shape))
        return self.find(leaf, f"{name}/{key}" if name else key, spec.stored_bytes)

    def checksums(self, leaf: int, key: str, extent: Extent) -> list[int] | None:
        """The checksums of a chunk's blocks; None with ``Options(checksums=False)``.

        Raises:
            CheckpointCorrupt: no checksum was saved for this chunk.
        """
        if not self._verify:
            return None
        crcs = self._crcs.of(key, extent)
        if not crcs or not isinstance(crcs, list):
            raise self.corrupt(leaf, f"no checksum for chunk {key}")
        return crcs

    def blocks(
        self, leaf: int, key: str, crcs: list[int], itemsize: int
    ) -> Iterator[tuple[slice, int]]:
        """For each block of a chunk, its range of bytes in the chunk and the saved checksum."""
        chunk = self._item.chunks[leaf]
        rows = (0, chunk[0] if chunk else 1)
        count = -(-rows[1] // rows_per_block(chunk, itemsize, self.block_bytes))
        if count != len(crcs):  # checked first: a forged count must not make millions of objects
            raise self.corrupt(leaf, f"{len(crcs)} checksums for chunk {key}, not {count}")
        _, blocks = covered_blocks(chunk, itemsize, rows=rows, block_bytes=self.block_bytes)
        for block, crc in zip(blocks, crcs, strict=True):
            yield slice(block.offset_bytes, block.offset_bytes + block.size_bytes), crc

    def fill(
        self, leaf: int, key: str, extent: Extent, offset: int, target: Array, crc: int | None
    ) -> None:
        """Reads ``target.size`` bytes of a chunk into ``target`` and verifies their checksum.

        Args:
            leaf, key, extent: as ``find`` takes and returns them.
            offset: first byte, relative to the chunk.
            target: memory to fill, as bytes.
            crc: the saved checksum of these bytes; None to verify nothing.

        Raises:
            CheckpointCorrupt: the file or chunk is truncated, or the checksum differs.
        """
        if not extent.file:
            target[:] = np.frombuffer(extent.value, np.uint8)[offset : offset + target.size]
        else:
            self._read(leaf, extent.file, extent.offset + offset, target, crc)
            return
        if crc is not None:
            self.check(leaf, INDEX_FILE, target, crc)

    def _read(self, leaf: int, file: str, offset: int, target: Array, crc: int | None) -> None:
        """Reads and checksums piece by piece."""
        found = 0
        step = target.size if crc is None else self.files.piece_bytes or target.size
        for start in range(0, target.size, step or 1):
            piece = target[start : start + step]
            if self.files.read(file, offset + start, piece) != piece.size:
                raise self.corrupt(leaf, "the file is truncated", file)
            if crc is not None:
                found = crc_of(piece, found)
        if crc is not None:
            self._compare(leaf, file, found, crc)

    def check(self, leaf: int, file: str | None, data: Array, crc: int) -> None:
        """Raises CheckpointCorrupt if the checksum of ``data`` is not ``crc``."""
        self._compare(leaf, file, crc_of(data), crc)

    def _compare(self, leaf: int, file: str | None, found: int, crc: int) -> None:
        if found != crc:
            raise self.corrupt(leaf, "the data is damaged: its checksum differs", file)

    def corrupt(self, leaf: int, what: str, file: str | None = None) -> CheckpointCorrupt:
        """The error for a damaged leaf; its message names checkpoint, item, leaf and file."""
        where = format_path(self._item.paths[leaf])
        full = f"{self._item.directory}/{file}" if file else None
        place = f", file {full}" if full else ""
        return CheckpointCorrupt(
            f"{self._checkpoint.path}: item {self._item.name!r}, leaf {where}{place}: {what}",
            file=full,
            leaf=where,
        )
