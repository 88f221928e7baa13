"""The chunks of an item that ckpt wrote, as they are stored: found, read and verified."""

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
from ckpt_core._options import KIB, MIB, Options
from ckpt_core._storage import DataFiles, Extent, most_stored_bytes, read_index, read_value
from ckpt_core._tree import format_path

INDEX_FILE = "manifest.ocdbt"
_FEW_OF = 8
"""If fewer than 1/8 of the leaves are wanted, index and checksums are read partially."""
_PIECE_BYTES = 256 * KIB
"""Read before it is verified: a fraction of a core's second-level cache."""
_UNVERIFIED_BLOCK_BYTES = 4 * MIB


class StoredChunks:
    """Finds, reads and verifies chunks; leaves are numbered as in the item.

    Args:
        checkpoint, item: where the chunks lie.
        wants: the leaves that will be asked for.
        options: of the load.
        context: of the load, for TensorStore.

    Attributes:
        files: the item's data files.
        index: where every chunk of the wanted leaves lies.
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
        self._context = context
        self._verify = options.checksums
        self._location = checkpoint.location / item.directory
        self.files = DataFiles(self._location, checkpoint.sizes_in(item), is_local_disk)
        checkpoint.read_file(f"{item.directory}/{INDEX_FILE}")
        few = len(wants) * _FEW_OF < len(item.paths)
        wanted = [item.name_of(want.leaf) for want in wants] if few else None
        try:  # which opens files
            check, most = self.files.check, item.most_keys
            self.index = read_index(self._location, context, wanted, check, most)
        except BaseException:
            self.files.close()
            raise
        self._checked: set[str] = set()
        self._crcs = ItemChecksums(checkpoint, item, few=few)

    @property
    def block_bytes(self) -> int:
        """How much one checksum covers; of the chunks whose checksums were asked for so far."""
        return self._crcs.block_bytes if self._verify else _UNVERIFIED_BLOCK_BYTES

    def find(self, leaf: int, key: str, chunk_size: int) -> tuple[str, Extent]:
        """A key and the place of its chunk, of which all but the content is checked.

        Args:
            leaf: that the chunk belongs to.
            key: of the chunk, with the name of the array.
            chunk_size: bytes of the decoded chunk.

        Raises:
            CheckpointCorrupt: the chunk is missing, of an impossible size, or in no file that was saved.
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
        if extent.file:
            file = f"{self._item.directory}/{extent.file}"
            listed = self._checkpoint.record.files.get(file)
            if listed is None:
                raise self.corrupt(leaf, f"chunk {key} lies in {file}, which was never saved")
            if extent.offset + extent.size_bytes > listed.size_bytes:
                raise self.corrupt(leaf, f"chunk {key} lies beyond the end of it", extent.file)
            if extent.file not in self._checked:
                self._check_file(leaf, extent.file)
        return key, extent

    def find_only(self, leaf: int) -> tuple[str, Extent]:
        """Key and place of the one chunk that an array has."""
        name, spec = self._item.name_of(leaf), self._item.specs[leaf]
        key = chunk_key((0,) * len(spec.stored_shape))
        return self.find(leaf, f"{name}/{key}" if name else key, spec.stored_bytes)

    def _check_file(self, leaf: int, file: str) -> None:
        """Before anything of it is read, also by TensorStore."""
        try:
            self.files.check([file])
        except CheckpointCorrupt as error:
            raise self.corrupt(leaf, str(error), file) from error
        self._checked.add(file)

    def checksums(self, leaf: int, key: str, extent: Extent) -> list[int] | None:
        """The checksums of a chunk's blocks; None where nothing is verified."""
        if not self._verify:
            return None
        crcs = self._crcs.of(key, extent)
        if not crcs or not isinstance(crcs, list):
            raise self.corrupt(leaf, f"no checksum for chunk {key}")
        return crcs

    def blocks(
        self, leaf: int, key: str, crcs: list[int], itemsize: int
    ) -> Iterator[tuple[slice, int]]:
        """The bytes of every block of a chunk, and what their checksum must be."""
        chunk = self._item.chunks[leaf]
        rows = (0, chunk[0] if chunk else 1)
        count = -(-rows[1] // rows_per_block(chunk, itemsize, self.block_bytes))
        if count != len(crcs):  # before there is something made for each
            raise self.corrupt(leaf, f"{len(crcs)} checksums for chunk {key}, not {count}")
        _, blocks = covered_blocks(chunk, itemsize, rows=rows, block_bytes=self.block_bytes)
        for block, crc in zip(blocks, crcs, strict=True):
            yield slice(block.offset_bytes, block.offset_bytes + block.size_bytes), crc

    def fill(
        self, leaf: int, key: str, extent: Extent, offset: int, target: Array, crc: int | None
    ) -> None:
        """Reads ``target.size`` bytes of a chunk and verifies them."""
        file = extent.file or INDEX_FILE
        if not extent.file:
            target[:] = np.frombuffer(extent.value, np.uint8)[offset : offset + target.size]
        elif self._location.local:
            self._read(leaf, extent.file, extent.offset + offset, target, crc)
            return
        else:
            data = read_value(self._location, key, offset, target.size, self._context)
            if len(data) != target.size:
                raise self.corrupt(leaf, f"chunk {key} is truncated", file)
            target[:] = np.frombuffer(data, np.uint8)
        if crc is not None:
            self.check(leaf, file, target, crc)

    def _read(self, leaf: int, file: str, offset: int, target: Array, crc: int | None) -> None:
        """Reads and verifies by turns: what was just read is still in the core's cache."""
        found = 0
        step = target.size if crc is None else _PIECE_BYTES
        for start in range(0, target.size, step or 1):
            piece = target[start : start + step]
            if self.files.read(file, offset + start, piece) != piece.size:
                raise self.corrupt(leaf, "the file is truncated", file)
            if crc is not None:
                found = crc_of(piece, found)
        if crc is not None:
            self._compare(leaf, file, found, crc)

    def check(self, leaf: int, file: str | None, data: Array, crc: int) -> None:
        """Raises CheckpointCorrupt where the checksum of the data is another one."""
        self._compare(leaf, file, crc_of(data), crc)

    def _compare(self, leaf: int, file: str | None, found: int, crc: int) -> None:
        if found != crc:
            raise self.corrupt(leaf, "the data is damaged: its checksum differs", file)

    def corrupt(self, leaf: int, what: str, file: str | None = None) -> CheckpointCorrupt:
        """The error for damage of a leaf, which names item, leaf and file."""
        where = format_path(self._item.paths[leaf])
        full = f"{self._item.directory}/{file}" if file else None
        place = f", file {full}" if full else ""
        return CheckpointCorrupt(
            f"{self._checkpoint.path}: item {self._item.name!r}, leaf {where}{place}: {what}",
            file=full,
            leaf=where,
        )
