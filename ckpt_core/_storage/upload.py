"""Uploads a database that TensorStore has built in memory, so that nothing need be read back or listed.

An object store tells neither names nor sizes of what TensorStore writes there, and digests would cost a download.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from ckpt_core._format.packed import pack, unpack
from ckpt_core._format.record import FileRecord
from ckpt_core._options import MIB
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.failures import settled
from ckpt_core._storage.index import read_index
from ckpt_core._storage.location import INDEX_FILE, Location, NewDatabase, open_store

UPLOAD_BYTES = 128 * MIB
"""Maximum size of a transaction in memory, and of what is on its way to the store."""
_MOST_INDEX_BYTES = 4096 * MIB


class Upload:
    """The upload of what one process writes of one item.

    Args:
        database: the item's database, in memory.
        target: where its files go.
        context: TensorStore context of the save.
        process: index of this process.
        process_count: number of processes.
        sent: called with the size of each file that the store has acknowledged.
        timeout_secs: maximum time of the upload of one file, from when the one before it was done.

    Attributes:
        files: size and digest of every file that was uploaded, by path relative to the item.
    """

    def __init__(
        self,
        database: NewDatabase,
        target: Location,
        context: Any,
        process: int,
        process_count: int,
        sent: Callable[[int], None],
        timeout_secs: float,
    ) -> None:
        self._sent = sent
        self._timeout_secs = timeout_secs
        self._database = database
        self._mine = database.of_process(process, process_count)
        self._target = target
        self._context = context
        self._memory: Any = settled(
            ts.KvStore.open(database.location.spec(), context=context), "opening memory"
        )
        self._store: Any = settled(open_store(target, context), f"{target.path}: cannot open")
        self.files: dict[str, FileRecord] = {}
        self._sending: deque[tuple[str, Any]] = deque()
        self._under_way_bytes = 0

    def data_files(self) -> None:
        """Uploads the data files that are complete, and removes them from memory.

        Blocks while much is on its way, but not until the store has all of it: ``index`` and
        ``packed_index`` wait for that.
        """
        self._send(self._names(f"{self._mine.values_in}d/"))

    def abandon(self) -> None:
        """Blocks until nothing is on its way any more; never raises."""
        while self._sending:
            future = self._sending.popleft()[1]
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=self._timeout_secs)
            future.cancel()

    def index(self) -> bytes | None:
        """Uploads the nodes of this process's index; returns its manifest, None if there is no array."""
        return self._send_index(self._mine)

    def packed_index(self) -> bytes:
        """This process's index, for ``take``; nothing of it is uploaded."""
        self._wait()
        manifest, nodes = self._index_of(self._mine)
        first = {} if manifest is None else {"": manifest}
        return pack(first | {name: self._read(name) for name in nodes})

    def take(self, process: int, process_count: int, packed: bytes) -> None:
        """On process 0: takes the index of another process into memory, for ``merge``."""
        other = self._database.of_process(process, process_count)
        for name, data in unpack(packed, _MOST_INDEX_BYTES).items():
            self._memory[name or f"{other.manifest}{INDEX_FILE}"] = data

    def merged_index(self) -> bytes | None:
        """On process 0, after ``merge``: as ``index``, of the item's index."""
        return self._send_index(self._database)

    def _send_index(self, database: NewDatabase) -> bytes | None:
        manifest, nodes = self._index_of(database)
        self._send(nodes)
        self._wait()
        return manifest

    def _index_of(self, database: NewDatabase) -> tuple[bytes | None, list[str]]:
        """The manifest of a database in memory, and the names of the nodes that it leads to."""
        manifest = self._read(f"{database.manifest}{INDEX_FILE}")
        if not manifest:
            return None, []
        index = read_index(database.location, self._context, manifest=manifest)
        return manifest, sorted(index.files)

    def _names(self, folder: str) -> list[str]:
        listed = self._memory.list(ts.KvStore.KeyRange(folder, folder[:-1] + "0"))
        return [name.decode() for name in settled(listed, "listing memory")]

    def _read(self, name: str) -> bytes:
        """The content of a file in memory; empty if there is none."""
        return bytes(settled(self._memory.read(name), f"reading {name} in memory").value)

    def _send(self, names: list[str]) -> None:
        """Starts to send files, as soon as less than ``UPLOAD_BYTES`` are on their way."""
        for name in names:
            data = self._read(name)
            self._memory[name] = None
            self.files[name] = FileRecord.of(data)
            self._wait(UPLOAD_BYTES - len(data))
            self._sending.append((name, self._store.write(name, data)))
            self._under_way_bytes += len(data)

    def _wait(self, most_bytes: int = 0) -> None:
        """Blocks until at most ``most_bytes``, or nothing, are on their way."""
        while self._sending and self._under_way_bytes > most_bytes:
            name, future = self._sending.popleft()
            settled(future, f"{self._target.path}: cannot write {name}", self._timeout_secs)
            self._under_way_bytes -= self.files[name].size_bytes
            self._sent(self.files[name].size_bytes)
