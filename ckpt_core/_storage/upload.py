"""Uploads what TensorStore has built in memory, so that nothing need be read back or listed.

An object store tells neither names nor sizes of what TensorStore writes there, and digests would cost a download. The
index, which is always in memory, tells names and sizes; of the bytes that no block checksum covers, which are
the arrays' metadata, the writer tells the content. So data files are sent by TensorStore itself, without a
copy. Those of compressed arrays, whose stored bytes only the memory has, and those for a mounted bucket, which
TensorStore's driver cannot write, are built in memory too.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._format.packed import pack, unpack
from ckpt_core._format.record import FileRecord
from ckpt_core._options import MIB
from ckpt_core._storage._tensorstore import StoreContext, ts
from ckpt_core._storage.database import Index, read_index
from ckpt_core._storage.digests import StoredValues, is_metadata, values_in_files
from ckpt_core._storage.failures import carried_out, settled
from ckpt_core._storage.location import INDEX_FILE, Location, NewDatabase, open_store

UPLOAD_BYTES = 128 * MIB
"""Maximum size of a transaction; of data files in memory, also of what is on its way to the store."""
_OVERLAP = 1
"""Number of transactions on their way to the store while the next one is filled."""
_UNPADDED_BYTES = 4 * MIB
"""Up to this size TensorStore sends data files as they are; longer ones it fills with zeros to whole pages
(kvstore/ocdbt/io/indirect_data_writer.cc), which the index does not tell."""
_PAGE_BYTES = 4096
_ROUNDS = 3
"""TensorStore sends what is left of a transaction, below the size of a data file, after the other files."""
_MOST_INDEX_BYTES = 4096 * MIB


class Upload:
    """The upload of what one process writes of one item. ``sent`` gets the size of each file that the store
    has acknowledged; ``timeout_secs`` limits one file or transaction, from when the one before it was done.
    """

    def __init__(
        self,
        database: NewDatabase,
        target: Location,
        context: StoreContext,
        process: int,
        process_count: int,
        sent: Callable[[int], None],
        timeout_secs: float,
    ) -> None:
        self._sent = sent
        self.timeout_secs = timeout_secs
        self.metadata: dict[str, bytes] = {}  # of arrays, by key; filled by the writer
        self.overlap = _OVERLAP if database.sent_to else 0  # under way while the next is filled
        self.database = database
        self._mine = database.of_process(process, process_count)
        self._target = target
        self._context = context
        self._memory: Any = settled(
            ts.KvStore.open(database.location.spec(), context=context()), "opening memory"
        )
        self._store: Any = settled(open_store(target, context), f"{target.path}: cannot open")
        self.files: dict[str, FileRecord] = {}  # that were uploaded, by path in the item
        self._sending: deque[tuple[str, Any]] = deque()
        self._under_way_bytes = 0

    def committed(self, size_bytes: int) -> None:
        """Called after the commit of a transaction: uploads the data files that are in memory.
        Blocks while much is on its way, but not until the store has all of it, as ``complete`` does.
        """
        if self.database.sent_to is None:
            self._send(self._names(f"{self._mine.values_in}d/"))
        else:
            self._sent(size_bytes)

    def abandon(self) -> None:
        """Blocks until nothing is on its way any more, ``timeout_secs`` at most; never raises."""
        deadline = time.monotonic() + self.timeout_secs
        _end([future for _, future in self._sending], deadline)
        self._sending.clear()
        if self.database.sent_to is None:
            return
        base: Any = ts.KvStore.open(self._mine.spec()["base"], context=self._context()).result()
        for _ in range(_ROUNDS):
            _end([base.read(lane) for lane in self._mine.lanes()], deadline)

    def index(self) -> bytes | None:
        """Uploads the nodes of this process's index; returns its manifest, None if there is no array."""
        return self._send_index(self._mine, self.complete())

    def packed_index(self) -> bytes:
        """This process's index, for ``take``; nothing of it is uploaded."""
        index = self.complete()
        first = {"": manifest} if (manifest := self._manifest(self._mine)) else {}
        return pack(first | {name: self._read(name) for name in sorted(index.files)})

    def take(self, process: int, process_count: int, packed: bytes) -> None:
        """On process 0: takes the index of another process into memory, for ``merge``."""
        other = self.database.of_process(process, process_count)
        for name, data in unpack(packed, _MOST_INDEX_BYTES).items():
            self._memory[name or f"{other.manifest}{INDEX_FILE}"] = data

    def merged_index(self) -> bytes | None:
        """On process 0, after ``merge``: as ``index``, of the item's index."""
        return self._send_index(self.database, self._index_of(self.database))

    def _send_index(self, database: NewDatabase, index: Index) -> bytes | None:
        manifest = self._manifest(database)
        self._send(sorted(index.files))
        self._wait()
        return manifest or None

    def _manifest(self, database: NewDatabase) -> bytes:
        """The manifest of a database; empty if nothing was written."""
        return self._read(f"{database.manifest}{INDEX_FILE}")

    def _index_of(self, database: NewDatabase) -> Index:
        manifest = self._manifest(database)
        if not manifest:
            return Index()
        return read_index(database.location, self._context, manifest=manifest)

    def complete(self) -> Index:
        """Blocks until all data files are in the store, and in ``files``; returns this process's index."""
        self._wait()
        index = self._index_of(self._mine)
        if self.database.sent_to is None:
            return index
        in_files = values_in_files(index)
        ends = {name: values[-1][0] + values[-1][1] for name, values in in_files.items()}
        padded = {
            name: self._store.read(name, byte_range=slice(end - 1, end + -end % _PAGE_BYTES))
            for name, end in ends.items()
            if end > _UNPADDED_BYTES and end % _PAGE_BYTES
        }
        for name, values in in_files.items():
            padding = b""
            if name in padded:
                padding = self._received(name, padded[name], ends[name] - 1)[1:]
            self.files[name] = self._record_of(name, values, padding)
        return index

    def _record_of(self, name: str, values: StoredValues, padding: bytes) -> FileRecord:
        """The record of a data file that TensorStore has sent; its digest is of the arrays' metadata."""
        crc = size_bytes = 0
        for offset, value_bytes, key in values:
            if offset != size_bytes:  # there is something between the values
                return FileRecord.of(self._received(name, self._store.read(name)))
            if is_metadata(key):
                crc = zlib.crc32(self.metadata[key], crc)
            size_bytes += value_bytes
        return FileRecord(size_bytes + len(padding), zlib.crc32(padding, crc), data=True)

    def _received(self, name: str, future: Any, start: int = 0) -> bytes:
        doing = f"{self._target.path}: cannot read {name}"
        try:
            return bytes(settled(future, doing, self.timeout_secs).value)
        except CheckpointError:  # the range is not in the file, or the store tells wrong lengths
            whole = settled(self._store.read(name), doing, self.timeout_secs)
            return bytes(whole.value)[start:]

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
            doing = f"{self._target.path}: cannot write {name}"
            carried_out(settled(future, doing, self.timeout_secs), doing)
            self._under_way_bytes -= self.files[name].size_bytes
            self._sent(self.files[name].size_bytes)


def _end(under_way: Iterable[Any], deadline: float) -> None:
    """Blocks until the requests have ended; gives those up that have not at the deadline."""
    for future in under_way:
        with contextlib.suppress(TimeoutError):
            future.exception(timeout=max(0.0, deadline - time.monotonic()))
        future.cancel()
