"""The checksums of an item's chunks, from the files of those that wrote them and of no others."""

from __future__ import annotations

import functools
import re

from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, Checksums
from ckpt_core._load.checkpoint import Checkpoint, NativeItem
from ckpt_core._storage import Extent

_WRITER = re.compile(r"ocdbt\.process_(\d+)/")


@functools.lru_cache(1024)
def _writer_of(file: str) -> int:
    """The process that wrote a data file."""
    named = _WRITER.match(file)
    return int(named[1]) if named else 0


class ItemChecksums:
    """Opens a process's file when one of its chunks is asked for: with N writers, not N files.

    Args:
        checkpoint, item: where they lie.
        few: whether few chunks will be asked for.

    Attributes:
        block_bytes: how much one checksum covers; of the files that were opened so far.
    """

    def __init__(self, checkpoint: Checkpoint, item: NativeItem, *, few: bool) -> None:
        self._checkpoint = checkpoint
        self._item = item
        self._few = few
        self._files: dict[int, Checksums] = {}
        self.block_bytes = 1

    def of(self, key: str, extent: Extent) -> list[int] | None:
        """The checksums of a chunk by its key; None where nobody wrote any.

        Raises:
            CheckpointCorrupt: a file of checksums is missing or damaged.
        """
        writer = _writer_of(extent.file)
        if writer < self._item.process_count:
            found = self._of_process(writer).get(key)
            if found is not None:
                return found
        # a value that stands in the index does not say who wrote it; nearly always it was the first
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
