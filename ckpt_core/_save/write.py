"""Writes what one process has of a prepared save, and makes all of it durable and visible."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ckpt_core._directory import Attempt
from ckpt_core._format import orbax_write
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, dump_checksums
from ckpt_core._format.packed import pack
from ckpt_core._format.part import Part
from ckpt_core._format.record import (
    RECORD_FILE,
    FileRecord,
    Record,
    dump_json,
    dump_record,
    library_versions,
)
from ckpt_core._lazy import jax
from ckpt_core._operation import Operation
from ckpt_core._save.dedup_links import Linked
from ckpt_core._save.digests import WHOLE_DIGEST_BYTES, digest_all, digest_own, own_data
from ckpt_core._save.job import PreparedItem, RecordFields, SaveJob
from ckpt_core._save.plain_items import write_sources
from ckpt_core._save.uploads import Uploads
from ckpt_core._storage import (
    UPLOAD_BYTES,
    ArrayWriter,
    Location,
    NewDatabase,
    add,
    merge,
    new_context,
)

_FILES_UNDER_WAY = 4
"""Number of data files on their way to an object store at once."""
_OF_METRICS = "metrics", "json"
"""Name and form of an item whose values stand where Orbax looks for metrics, too."""


class Write:
    """One process's part in one save, and on process 0 what makes a checkpoint of all. It brings the arrays of ``items`` to the host, in place."""

    def __init__(
        self,
        job: SaveJob,
        fields: RecordFields,
        items: list[PreparedItem],
        token: str,
        operation: Operation,
        snapshot_secs: float = 0.0,
    ) -> None:
        self._job = job
        self._fields = fields
        self._items = items
        self._token = token
        self._operation = operation
        self._snapshot_secs = snapshot_secs
        self.written_bytes = 0
        self.part: Part | None = None  # of the step; in a local directory of several processes
        self._began = time.monotonic()
        self._described: dict[str, FileRecord] = {}  # digests that are known already
        self.digests: list[str] = []  # on process 0: what ``own_part`` gave on each process
        alone = job.local and job.writers.count == 1 and job.options.link_unchanged
        self._links = job.links if alone else None
        self._linked: list[Linked] = []
        self._checksums: dict[str, dict[str, tuple[int, ...]]] = {}
        self._uploads: Uploads | None = None  # into an object store

    def own_part(self, attempt: Attempt) -> str:
        """Writes what this process has; gives the digests of its files, if there are other processes."""
        self.write_own(attempt)
        if self._job.writers.count == 1:
            return ""  # make_durable() digests all files
        index, local = self._job.writers.index, self._job.local
        sent = {} if self._uploads is None else self._uploads.files
        return digest_own(attempt, self._items, index, local, self._context, sent)

    def commit(self, attempt: Attempt) -> None:
        """On process 0: makes the checkpoint durable, then visible, if the guard finds in between that this run still owns the directory."""
        self.make_durable(attempt)
        self._operation.phase = "committing"
        # directly before the commit, so that another run has little time to claim the directory
        if self._job.guard is not None:
            self._job.guard.check()
        attempt.commit()
        if self._links is not None:
            self._links.committed()  # the next save may link files of this one

    def write_own(self, attempt: Attempt) -> None:
        """Writes arrays, states and checksums of this process; blocks until they are written."""
        self._operation.phase = "waiting for arrays on their way to the host"
        # merge() needs the same context: TensorStore copies index entries only within one context
        self._context = new_context(durable=self._job.options.durable)
        self._items[:] = [item.landed() for item in self._items]
        if not self._job.local:
            self._uploads = Uploads(self._job, attempt, self._items, self._context, self._operation)
        self._operation.phase = "writing arrays"
        writers: list[ArrayWriter] = []
        try:
            written = sum(self._start_item(attempt, item, writers) for item in self._items)
            if self._job.writers.index == 0:
                self._describe(attempt)  # meanwhile TensorStore writes the arrays
            # uploads report by themselves
            watch = self._progress(attempt, written) if self._job.local else None
            for writer in writers:
                writer.finish(watch)
            if self._uploads is not None:
                self._uploads.send_indices()
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
        self.written_bytes = written

    def _progress(self, attempt: Attempt, total_bytes: int) -> Callable[[], None]:
        """A function that sends a progress event from the sizes of the files; called now and then while arrays are written."""
        operation, process = self._operation, self._job.writers.index
        operation.total_bytes = total_bytes
        linked_bytes = sum(linked.size_bytes for linked in self._linked)

        def watch() -> None:
            if operation.listener is None and not operation.asked:
                return
            # TensorStore reports no progress, so take it from the sizes of the files
            try:
                sizes = own_data(attempt, self._items, process)
            except FileNotFoundError:  # TensorStore has just given a file its final name
                return
            operation.done_bytes = min(total_bytes, sum(sizes.values()) - linked_bytes)
            operation.tell_progress(operation.done_bytes)

        return watch

    def _start_item(self, attempt: Attempt, item: PreparedItem, writers: list[ArrayWriter]) -> int:
        """Starts writing an item's arrays, and writes its checksums or state files; gives the number of bytes that this
        process writes. Adds to ``writers`` the started writer of a pytree's arrays, which the caller must finish or abort.
        """
        for name, data in item.state_files.items():
            attempt.write(f"{item.folder}/{name}", data)
        if item.record.form != "tree":
            copied = write_sources(item, attempt, self._job, self._links)
            self._described |= copied
            sizes = (file.size_bytes for file in copied.values())
            return sum(map(len, item.state_files.values())) + sum(sizes)
        arrays, linked = item.arrays, None
        if self._links is not None:
            linked = self._links.link(item, attempt.path, self._context)
        options = self._job.options
        # all pytrees are written at the same time, so they share max_host_bytes
        trees = sum(one.record.form == "tree" for one in self._items)
        database, most = self._database(attempt, item), options.max_host_bytes
        upload = None
        if self._uploads is not None:
            upload = self._uploads.begin(item, database, compressed=item.record.compressed)
            database = upload.database
        writer = ArrayWriter(
            database,
            self._job.writers.index,
            self._job.writers.count,
            self._context,
            max_host_bytes=(most if upload is None else min(most, UPLOAD_BYTES)) // trees,
            upload=upload,
            write_file=(lambda name, data: attempt.write(item.folder + name, data))
            if self._job.local
            else None,
        )
        writers.append(writer)
        if linked is not None:
            self._linked.append(linked)
            arrays = linked.to_write(arrays)
            for child, runs in linked.runs.items():
                writer.take_over(child, runs)
        checksums = writer.put(arrays) | ({} if linked is None else linked.checksums)
        self._checksums[item.name] = checksums
        name = f"{item.folder}/{CHECKSUM_DIRECTORY}/process_{self._job.writers.index}"
        attempt.write(name, dump_checksums(checksums))
        return sum(array.size_bytes for array in arrays)

    def _database(self, attempt: Attempt, item: PreparedItem) -> NewDatabase:
        place = Location(attempt.data_path, self._job.local, staged=not self._job.local)
        size_bytes = self._job.options.target_data_file_bytes
        if not self._job.local:
            size_bytes = min(size_bytes, UPLOAD_BYTES // _FILES_UNDER_WAY)
        return NewDatabase(place / item.folder, attempt.data_prefix, size_bytes)

    def make_durable(self, attempt: Attempt) -> None:
        """On process 0: merges all databases, writes the record, fsyncs everything. Only
        the rename is then missing to make the checkpoint visible.
        """
        job = self._job
        self._operation.phase = "joining, describing and syncing files"
        for item in self._items:
            if item.record.form == "tree" and job.writers.count > 1:
                self._merge(attempt, item)
        if job.flat:
            self._index_at_top(attempt)
        record = self._record(attempt)
        if self._links is not None:
            self._links.prepare(
                job.target, attempt.path, self._items, self._checksums, record.files
            )
        attempt.make_durable(RECORD_FILE, dump_record(record))

    def _merge(self, attempt: Attempt, item: PreparedItem) -> None:
        """On process 0: joins all processes' databases of an item."""
        if self._uploads is not None:
            self._uploads.take_indices(item)
        merge(self._database(attempt, item), self._job.writers.count, self._context)
        if self._uploads is not None:
            self._uploads.send_merged(item)

    def _index_at_top(self, attempt: Attempt) -> None:
        """On process 0: a second index of the only item, where Orbax looks for a tree without a name."""
        (item,) = self._items
        if item.plan is not None and len(item.texts) < len(item.names):  # text has no database
            database = self._database(attempt, item)
            top = replace(database, location=Location(attempt.data_path, local=True))
            add(top, [database], self._context)

    def _record(self, attempt: Attempt) -> Record:
        files, within = self._files(attempt), dict(attempt.small_files())
        for item in self._items:  # states of other processes, each of which would be a file to sync
            for name, data in item.others.items():
                within[f"{item.folder}/{name}"] = data
                files[f"{item.folder}/{name}"] = FileRecord.of(data)
        return Record(
            items={item.name: item.record for item in self._items},
            files=files,
            token=self._token,
            single=self._fields.single,
            metadata=self._fields.metadata,
            metrics=dict(self._fields.metrics),
            versions=library_versions(),
            settings=dict(self._fields.settings),
            topology={
                "process_count": jax.process_count(),
                "device_count": jax.device_count(),
                "platform": jax.default_backend(),
            },
            created_unix_secs=time.time(),
            durations={
                "snapshot_secs": round(self._snapshot_secs, 6),
                "write_secs": round(time.monotonic() - self._began, 6),
            },
            packed=pack(within) if within else b"",
            part=self.part,
            parent=self._job.parent,
            shared=self._fields.shared,
        )

    def _files(self, attempt: Attempt) -> dict[str, FileRecord]:
        """On process 0: size and digest of every file, those of other processes included."""
        known = {name: entry for linked in self._linked for name, entry in linked.files.items()}
        known |= self._described
        if self._uploads is not None:
            known |= self._uploads.files
        if self._job.writers.count == 1:
            sizes = attempt.files(
                known_bytes={name: file.size_bytes for name, file in known.items()}
            )
            if all(size <= WHOLE_DIGEST_BYTES or name in known for name, size in sizes.items()):
                return {
                    name: known.get(name) or FileRecord(size, attempt.crc32(name))
                    for name, size in sizes.items()
                }
        local = self._job.local
        return digest_all(attempt, self._items, self.digests, known, local, self._context)

    def _describe(self, attempt: Attempt) -> None:
        """On process 0: writes the metadata files, which do not depend on array data."""
        files = dict(metadata_files(self._job, self._fields, self._items))
        for name, data in files.items():
            attempt.write(name, data)
        self._described |= {name: FileRecord.of(data) for name, data in files.items()}


def metadata_files(
    job: SaveJob, fields: RecordFields, items: Sequence[PreparedItem]
) -> Iterator[tuple[str, bytes]]:
    """Name and content of all files that Orbax reads besides the arrays."""
    handlers: dict[str, str] = {}
    for item in items:
        handlers[item.folder] = item.handler or orbax_write.HANDLERS[_handler(item)]
        if item.record.form == "process":
            note = dump_json({"format": "ckpt process state", "process_count": job.writers.count})
            yield f"{item.folder}/metadata", note
            yield f"{item.folder}/data.json", note
            continue
        if item.plan is None:
            continue
        for folder in (f"{item.folder}/", *([""] if job.flat else [])):
            for name, data in item.plan.files:
                yield folder + name, data
            if item.texts:
                paths = dict(zip(item.names, item.record.paths, strict=True))
                yield (
                    folder + orbax_write.STRINGS_FILE,
                    orbax_write.strings_file(item.texts, paths),
                )
    stored = [one.state_files for one in items if (one.name, one.record.form) == _OF_METRICS]
    if fields.metrics or stored:
        handlers["metrics"] = orbax_write.HANDLERS["json"]
        numbers = dump_json(dict(fields.metrics))
        yield "metrics/metrics", stored[0]["data.json"] if stored else numbers
    yield orbax_write.STEP_METADATA, orbax_write.step_metadata(handlers, fields.metadata)
    text = f"Checkpoint commit was successful to {job.target}"
    said = text.encode(errors="surrogateescape")
    if not job.local:  # there Orbax asks for one in each item that it opens by itself
        mark = orbax_write.COMMIT_FILE
        for item in items:
            if item.record.form != "files" or mark in item.record.notes:
                yield f"{item.folder}/{mark}", said
    yield orbax_write.COMMIT_FILE, said


def _handler(item: PreparedItem) -> str:
    if item.record.form != "tree":
        return "json"
    return "text_tree" if item.texts else "tree"
