"""Writes what one process has of a prepared save, and makes all of it durable and visible."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence

from ckpt_core._background.threads import Workers
from ckpt_core._directory import Attempt, pieces_of, write_pieces
from ckpt_core._errors import CheckpointError
from ckpt_core._format import orbax_write
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, dump_checksums
from ckpt_core._format.packed import pack, unpack
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
from ckpt_core._options import MIB
from ckpt_core._save.job import PreparedItem, RecordFields, SaveJob
from ckpt_core._save.prepare import landed
from ckpt_core._save.unchanged import Links
from ckpt_core._storage import INDEX_FILE, ArrayWriter, Rows, encode_index, joined

_FILES_AT_ONCE = 4
"""Number of data files that are written at once."""
_UPLOADED_FILE_BYTES = 32 * MIB
"""Maximum size of a data file in an object store, since it is in memory as a whole."""
_MOST_PASSED_BYTES = 4096 * MIB
_OF_METRICS = "metrics", "json"
"""Name and form of an item whose values stand where Orbax looks for metrics, too."""


class Write:
    """One process's part in a save, and on process 0 what makes a checkpoint of all."""

    attempt: Attempt  # in which this process writes

    def __init__(self, job: SaveJob) -> None:
        options = job.options
        self.job = job
        self.operation = Operation(
            "save", job.target, job.step, options.report_secs, options.on_event
        )
        self.token = job.token or secrets.token_hex(16)
        self.fields = job.fields  # later a copy that the caller cannot change
        self.items: list[PreparedItem] = []
        self.blocking_secs = 0.0  # the snapshot's
        self.written_bytes = 0
        self.part: Part | None = None  # of the step; in a local directory of several processes
        self._began = time.monotonic()
        self.files: dict[str, FileRecord] = {}  # that are written, by path in the checkpoint
        self.passed: list[str] = []  # on process 0: what ``write_part`` gave on each process
        self._processes = job.writers
        alone = job.local and self._processes.count == 1 and job.options.link_unchanged
        self._links = job.links if alone else None
        self._writers: dict[str, ArrayWriter] = {}  # by item
        self._rows: dict[str, Rows] = {}  # by item; on process 0 of all processes
        self._file_bytes, held_bytes = options.target_data_file_bytes, options.chunk_bytes
        if not job.local:
            self._file_bytes = min(self._file_bytes, _UPLOADED_FILE_BYTES)
            held_bytes = max(self._file_bytes, held_bytes)
        # each thread has a chunk in memory, or a file on its way to an object store
        threads = max(1, min(_FILES_AT_ONCE, options.max_host_bytes // held_bytes))
        self._workers = Workers(threads, "ckpt-write")
        self._host_bytes = options.max_host_bytes

    def write_part(self) -> str:
        """Writes what this process has, and passes where it stands to process 0; returns the digest of that."""
        self.write_own()
        if self._processes.index == 0:
            return ""
        files = [[name, one.size_bytes, one.crc32, one.data] for name, one in self.files.items()]
        passed = {name: rows.dump() for name, rows in self._rows.items()}
        data = pack({"": json.dumps(files).encode()} | passed)
        self.attempt.write(_passed(self._processes.index), data, until_commit=True)
        return digest_of(data)

    def commit(self) -> None:
        """On process 0: makes the checkpoint durable, then visible, if this run still owns the directory."""
        if self.job.processes.index > 0:
            return
        self.make_durable()
        self.operation.phase = "committing"
        # directly before the commit, so that another run has little time to claim the directory
        if self.job.guard is not None:
            self.job.guard.check()
        self.attempt.commit()
        if self._links is not None:
            self._links.committed()  # the next save may link files of this one

    def write_own(self) -> None:
        """Writes arrays, states and checksums of this process; blocks until they are written."""
        self.operation.phase = "waiting for arrays on their way to the host"
        self.items[:] = [landed(item) for item in self.items]
        self.operation.phase = "writing arrays"
        self._began = time.monotonic()
        try:
            with self._workers:
                described = self._workers.submit(self._describe)
                written = sum(map(self._start_item, self.items))
                self.operation.total_bytes = written
                self._settle()
                described.result()
                self.operation.done_bytes = written
        finally:
            for array in itertools.chain(*(item.arrays for item in self.items)):
                array.pieces = ()  # an error's traceback may refer to this save
        self.written_bytes = written

    def _describe(self) -> None:
        """On process 0: writes the metadata files, which do not depend on array data."""
        if self._processes.index == 0:
            self._write(metadata_files(self.job, self.fields, self.items))

    def _start_item(self, item: PreparedItem) -> int:
        """Starts to write an item's arrays, or writes its files; returns the number of bytes that this process writes."""
        self._write({f"{item.folder}/{name}": data for name, data in item.state_files.items()})
        if item.record.form != "tree":
            copied = write_sources(item, self.attempt, self.job, self._links)
            self.files |= copied
            sizes = (file.size_bytes for file in copied.values())
            return sum(map(len, item.state_files.values())) + sum(sizes)
        arrays = item.arrays
        writer = self._writer(item)
        if self._links is not None and (linked := self._links.link(item, self.attempt.path)):
            self.files |= linked.files
            writer.take_over(linked.places)
            writer.checksums |= linked.checksums
            arrays = linked.to_write(arrays)
            arrays.sort(key=lambda array: array.name not in linked.unlinked)
            writer.put(arrays[: len(linked.unlinked)])
            writer.start()  # into files of their own
            writer.put(arrays[len(linked.unlinked) :])
        else:
            writer.put(arrays)
        writer.start()  # meanwhile this thread goes on
        return sum(array.size_bytes for array in arrays)

    def _writer(self, item: PreparedItem) -> ArrayWriter:
        """The writer of the item's arrays. All trees are written at the same time, so they share ``max_host_bytes``."""
        trees = sum(one.record.form == "tree" for one in self.items)
        index, attempt = self._processes.index, self.attempt
        writer = self._writers[item.name] = ArrayWriter(
            lambda name, parts: attempt.write_data(f"{item.folder}/{name}", parts),
            self._workers,
            f"ocdbt.process_{index}/d/{attempt.data_prefix}",
            first=index == 0,
            file_bytes=self._file_bytes,
            max_host_bytes=self._host_bytes // max(1, trees),
        )
        return writer

    def _settle(self) -> None:
        """Blocks until all arrays are in files; writes their checksums, and of one process alone the indexes."""
        alone, index = self._processes.count == 1, self._processes.index
        for item in self.items:
            if item.name not in self._writers:
                continue
            writer = self._writers[item.name]
            self._rows[item.name] = writer.rows
            if writer.compresses:  # the index waits for the sizes
                writer.settle(self._tell_progress)
            if alone:
                self._write_index(f"{item.folder}/", writer.rows)
            writer.settle(self._tell_progress)
            self.files |= {f"{item.folder}/{name}": file for name, file in writer.files.items()}
            name = f"{item.folder}/{CHECKSUM_DIRECTORY}/process_{index}"
            self._write({name: dump_checksums(writer.checksums)})

    def _tell_progress(self) -> None:
        done_bytes = sum(writer.done_bytes for writer in self._writers.values())
        self.operation.done_bytes = min(done_bytes, self.operation.total_bytes)
        self.operation.tell_progress(self.operation.done_bytes)

    def _write(self, files: Mapping[str, bytes]) -> None:
        self.files |= {name: self.attempt.write(name, data) for name, data in files.items()}

    def _write_index(self, folder: str, rows: Rows, below: str = "") -> None:
        """Writes the index of arrays below a folder, which ends with a slash or is empty."""
        if rows.keys:
            path = f"d/{self.attempt.data_prefix}{secrets.token_hex(16)}"
            nodes, manifest = encode_index(rows, path, below)
            self.attempt.write_data(folder + path, (nodes,))
            self.files[folder + path] = FileRecord(len(nodes), zlib.crc32(nodes))
            self.files[folder + INDEX_FILE] = self.attempt.write(folder + INDEX_FILE, manifest)

    def make_durable(self) -> None:
        """On process 0: joins what all processes have written, writes the record, fsyncs everything. Only
        the rename is then missing to make the checkpoint visible.
        """
        job = self.job
        self.operation.phase = "joining, describing and syncing files"
        if self._processes.count > 1:
            self._join()
        if job.flat:  # Orbax looks there for a tree without a name
            (item,) = self.items
            self._write_index("", self._rows.get(item.name, Rows()), below=f"{item.folder}/")
        record = self._record()
        if self._links is not None:
            checksums = {name: writer.checksums for name, writer in self._writers.items()}
            self._links.prepare(
                job.target, self.attempt.path, self.items, self._rows, checksums, self.files
            )
        self.attempt.make_durable(RECORD_FILE, dump_record(record))

    def _join(self) -> None:
        """On process 0: takes what the other processes passed, and writes the indexes of all arrays."""
        dumped = {name: [rows.dump()] for name, rows in self._rows.items()}
        for process, said in list(enumerate(self.passed))[1:]:
            name = _passed(process)
            try:
                data = self.attempt.take(name)
            except FileNotFoundError:
                data = b""
            if said != digest_of(data):
                raise _unseen(self.attempt, name, "the same")
            parts = unpack(data, _MOST_PASSED_BYTES)
            for path, *file in json.loads(parts.pop("")):
                self.files[path] = FileRecord(*file)
            for item, rows in parts.items():
                dumped[item].append(rows)
        known_bytes = {name: file.size_bytes for name, file in self.files.items()}
        present = self.attempt.files(known_bytes=known_bytes)
        for name, size_bytes in known_bytes.items():
            if present.get(name) != size_bytes:
                raise _unseen(self.attempt, name, f"{size_bytes} bytes")
        for name in present.keys() - self.files.keys():
            self.files[name] = FileRecord.of(self.attempt.read(name))
        for item in self.items:
            if item.name in dumped:
                rows = self._rows[item.name] = joined(dumped[item.name])
                self._write_index(f"{item.folder}/", rows)

    def _record(self) -> Record:
        files = dict(self.files)
        within = {} if self.job.local else dict(self.attempt.small_files())
        for item in self.items:  # states of other processes, each of which would be a file to sync
            for name, data in item.others.items():
                within[f"{item.folder}/{name}"] = data
                files[f"{item.folder}/{name}"] = FileRecord.of(data)
        return Record(
            items={item.name: item.record for item in self.items},
            files=files,
            token=self.token,
            single=self.fields.single,
            metadata=self.fields.metadata,
            metrics=dict(self.fields.metrics),
            versions=library_versions(),
            settings=dict(self.fields.settings),
            topology={
                "process_count": jax.process_count(),
                "device_count": jax.device_count(),
                "platform": jax.default_backend(),
            },
            created_unix_secs=time.time(),
            durations={
                "snapshot_secs": round(self.blocking_secs, 6),
                "write_secs": round(time.monotonic() - self._began, 6),
            },
            packed=pack(within) if within else b"",
            part=self.part,
            parent=self.job.parent,
            shared=self.fields.shared,
        )


def _passed(process: int) -> str:
    """Name of the file that a process passes to process 0."""
    return f"ckpt.passed_{process}"


def digest_of(passed: bytes) -> str:
    """Size and CRC-32, by which process 0 knows that it has read what was passed."""
    return f"{len(passed)} {zlib.crc32(passed)}"


def _unseen(attempt: Attempt, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{attempt.path}: the process that wrote {name} left {what} there, and process 0 does not see it: do all "
        "processes see the same files at once?"
    )


def metadata_files(
    job: SaveJob, fields: RecordFields, items: Sequence[PreparedItem]
) -> dict[str, bytes]:
    """Name and content of all files that Orbax reads besides the arrays."""
    handlers, found = dict[str, str](), dict[str, bytes]()
    for item in items:
        form = "json" if item.record.form != "tree" else "text_tree" if item.texts else "tree"
        handlers[item.folder] = item.handler or orbax_write.HANDLERS[form]
        if item.record.form == "process":
            note = dump_json({"format": "ckpt process state", "process_count": job.writers.count})
            found |= dict.fromkeys([f"{item.folder}/metadata", f"{item.folder}/data.json"], note)
            continue
        if item.plan is None:
            continue
        for folder in (f"{item.folder}/", *([""] if job.flat else [])):
            found |= {folder + name: data for name, data in item.plan.files}
            if item.texts:
                paths = dict(zip(item.names, item.record.paths, strict=True))
                texts = orbax_write.strings_file(item.texts, paths)
                found[folder + orbax_write.STRINGS_FILE] = texts
    stored = [one.state_files for one in items if (one.name, one.record.form) == _OF_METRICS]
    if fields.metrics or stored:
        handlers["metrics"] = orbax_write.HANDLERS["json"]
        numbers = dump_json(dict(fields.metrics))
        found["metrics/metrics"] = stored[0]["data.json"] if stored else numbers
    found[orbax_write.STEP_METADATA] = orbax_write.step_metadata(handlers, fields.metadata)
    text = f"Checkpoint commit was successful to {job.target}"
    said = text.encode(errors="surrogateescape")
    if not job.local:  # there Orbax asks for one in each item that it opens by itself
        mark = orbax_write.COMMIT_FILE
        for item in items:
            if item.record.form != "files" or mark in item.record.notes:
                found[f"{item.folder}/{mark}"] = said
    return found | {orbax_write.COMMIT_FILE: said}


def write_sources(
    item: PreparedItem, attempt: Attempt, job: SaveJob, links: Links | None
) -> dict[str, FileRecord]:
    """Size and digest, by path in the checkpoint, of the item's larger files, which it copies into the attempt,
    or links if they have not changed. CheckpointError if a file has changed since the save was called.
    """
    found: dict[str, FileRecord] = {}
    for source in item.sources:
        name = f"{item.folder}/{source.name}"
        linked = None if links is None else links.link_file(name, attempt.path, source)
        if linked is not None:
            found[name] = linked
        elif job.local:
            path = os.path.join(attempt.path, name)
            crc = write_pieces(path, pieces_of(source), durable=job.options.durable)
            size = os.stat(path).st_size
            if size != source.size_bytes:
                raise CheckpointError(f"{source.path} became shorter while it was being saved")
            found[name] = FileRecord(size, crc)
        else:
            data = b"".join(pieces_of(source))
            found[name] = attempt.write(name, data)
    if item.scratch is not None:
        item.scratch.close()
    return found
