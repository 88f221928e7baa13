"""The checksums of an item's chunks; opens only the checksum files of processes that are needed."""

from __future__ import annotations

import functools
import re

from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, Checksums
from ckpt_core._load.checkpoint import Checkpoint, NativeItem
from ckpt_core._storage import Extent

_WRITER = re.compile(r"ocdbt\.process_(\d+)/")


@functools.lru_cache(1024)
def _writer_of(file: str) -> int:
    """Index of the process that wrote a data file, from the file's path."""
    named = _WRITER.match(file)
    return int(named[1]) if named else 0


class ItemChecksums:
    """Checksums of an item's chunks, by key.

    Each process that saved wrote one checksum file. A file is opened when a chunk of that process
    is asked for, so that a process which loads few shards does not open N files.

    Args:
        checkpoint, item: where the files are.
        few: True if few chunks will be asked for, so that files are not parsed completely.

    Attributes:
        block_bytes: number of bytes that one checksum covers, from the file opened last.
    """

    def __init__(self, checkpoint: Checkpoint, item: NativeItem, *, few: bool) -> None:
        self._checkpoint = checkpoint
        self._item = item
        self._few = few
        self._files: dict[int, Checksums] = {}
        self.block_bytes = 1

    def of(self, key: str, extent: Extent) -> list[int] | None:
        """The checksums of a chunk's blocks; None if no process wrote any for this key.

        Args:
            key: key of the chunk.
            extent: where the chunk is, which tells the process that wrote it.

        Raises:
            CheckpointCorrupt: a checksum file is missing or damaged.
        """
        writer = _writer_of(extent.file)
        if writer < self._item.process_count:
            found = self._of_process(writer).get(key)
            if found is not None:
                return found
        # a value inside the index does not tell its writer; it was process 0 in nearly all cases
        for process in range(self._item.process_count):
            found = self._of_process(process).get(key)
            if found is not None:
                return found
        return None

    def _of_process(self, process: int) -> Checksums:
        if process not in self._files:
            name = f"{self._item.directory}/{CHECKSUM_DIRECTORY}/process_{process}"
            self._files[process] = Checksums(self._checkpoint.read_file(name), name, few=self._few)
            self.block_bytes = self._files[process].block_bytes
        return self._files[process]
