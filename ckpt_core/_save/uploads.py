"""What a save into an object store does besides writing: it uploads the databases that it has built in memory."""

from __future__ import annotations

from dataclasses import replace

from ckpt_core._directory import Attempt
from ckpt_core._format.record import FileRecord
from ckpt_core._operation import Operation
from ckpt_core._save.job import PreparedItem, SaveJob
from ckpt_core._storage import INDEX_FILE, Location, NewDatabase, StoreContext, Upload


class Uploads:
    """The uploads of one process in one save, of items with their arrays on the host."""

    def __init__(
        self,
        job: SaveJob,
        attempt: Attempt,
        items: list[PreparedItem],
        context: StoreContext,
        operation: Operation,
    ) -> None:
        self._attempt = attempt
        self._processes = job.writers
        self._context = context
        self._by_folder: dict[str, Upload] = {}
        self._total_bytes = sum(array.size_bytes for item in items for array in item.arrays)
        self._operation = operation
        operation.total_bytes = self._total_bytes
        storage = job.options.storage_options
        self._target = Location(attempt.data_path, False, storage_options=storage)
        self._timeout_secs = job.options.timeout_secs

    def begin(self, item: PreparedItem, database: NewDatabase, *, compressed: bool) -> Upload:
        """The upload of an item, whose database is in memory; the writer writes into ``Upload.database``."""
        target = self._target / item.folder
        if not compressed and target.sends:
            database = replace(database, sent_to=target)
        upload = self._by_folder[item.folder] = Upload(
            database,
            target,
            self._context,
            self._processes.index,
            self._processes.count,
            self._sent,
            self._timeout_secs,
        )
        return upload

    def _sent(self, size_bytes: int) -> None:
        self._operation.done_bytes += size_bytes
        self._operation.tell_progress(min(self._total_bytes, self._operation.done_bytes))

    def send_indices(self) -> None:
        """After all data files: uploads the indices. Of several processes, process 0 gets them to merge."""
        index, count = self._processes.index, self._processes.count
        for folder, upload in self._by_folder.items():
            if count == 1:
                self._write_manifest(folder, upload.index())
            elif index == 0:
                upload.complete()
            else:
                packed = upload.packed_index()
                self._attempt.write(f"{folder}/index_{index}", packed, until_commit=True)

    def take_indices(self, item: PreparedItem) -> None:
        """On process 0, before ``merge``: takes the indices of all others into memory."""
        count = self._processes.count
        for process in range(1, count):
            packed = self._attempt.read(f"{item.folder}/index_{process}")
            self._by_folder[item.folder].take(process, count, packed)

    def send_merged(self, item: PreparedItem) -> None:
        """On process 0, after ``merge``: uploads the item's index."""
        self._write_manifest(item.folder, self._by_folder[item.folder].merged_index())

    def _write_manifest(self, folder: str, manifest: bytes | None) -> None:
        if manifest is not None:
            self._attempt.write(f"{folder}/{INDEX_FILE}", manifest)

    @property
    def files(self) -> dict[str, FileRecord]:
        """Size and digest of every file that was uploaded, by path relative to the attempt."""
        return {
            f"{folder}/{name}": file
            for folder, upload in self._by_folder.items()
            for name, file in upload.files.items()
        }
