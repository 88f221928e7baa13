"""Writing and committing a prepared save: everything that needs the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from ckpt_core._devices import shardings
from ckpt_core._directory import Attempt
from ckpt_core._errors import CheckpointError
from ckpt_core._events import Progress
from ckpt_core._format import orbax_write
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, dump_checksums
from ckpt_core._format.record import (
    RECORD_FILE,
    FileRecord,
    Record,
    dump_json,
    dump_record,
    library_versions,
)
from ckpt_core._save.agreement import agree_to_save, done_by_all
from ckpt_core._save.dedup_links import Linked
from ckpt_core._save.digests import WHOLE_DIGEST_BYTES, digest_all, digest_own, own_data
from ckpt_core._save.job import RecordFields, SaveJob
from ckpt_core._save.prepare import PreparedItem
from ckpt_core._storage import ArrayWriter, Location, merge, new_context

CALL = "save"
"""What processes that save together tell each other."""


class Write:
    """Writing and committing one prepared save: everything that needs the disk.

    Args:
        job: of the save.
        fields: of the record, frozen.
        items: prepared; they are replaced by landed ones when they are written.
        token: of the attempt.
        tag: of the round that the processes agree in.

    Attributes:
        snapshot_secs: how long the caller was blocked, for the record.
        written_bytes: of the arrays that this process wrote.
    """

    def __init__(
        self, job: SaveJob, fields: RecordFields, items: list[PreparedItem], token: str, tag: str
    ) -> None:
        self._job = job
        self._fields = fields
        self._items = items
        self._token = token
        self._tag = tag
        self.snapshot_secs = 0.0
        self.written_bytes = 0
        self._began = time.monotonic()
        self._described: dict[str, FileRecord] = {}
        self._digests: list[str] = []  # of the files of each process, on process 0
        alone = job.local and job.writers.count == 1 and job.options.link_unchanged
        self._links = job.links if alone else None
        self._linked: list[Linked] = []
        self._checksums: dict[str, dict[str, list[int]]] = {}

    def agree_to_start(self, attempt: Attempt | None, refusal: Exception | None) -> Attempt:
        """Agreement 1: on the token, where to write, and all that decides what lies where.

        Args:
            attempt: of process 0; None on the others.
            refusal: why this process cannot save, where the others have to be told.
        """
        job = self._job
        if job.processes.count == 1:
            assert attempt is not None
            return attempt
        try:
            if attempt is not None:
                attempt.write("ckpt.token", self._token.encode())
        except Exception as error:
            refusal = error  # the others wait to hear from this process
        said = agree_to_save(
            job.processes,
            self._tag,
            CALL,
            job.target,
            self._items,
            {
                "the path": job.target,
                "overwrite=": job.overwrite,
                "Options(durable=)": job.options.durable,
                "whether one state or named items are saved": job.fields.single,
                "the version of ckpt": library_versions().get("ckpt-core"),
            },
            None if attempt is None else [attempt.path, self._token],
            refusal,
            job.options.timeout_secs,
        )
        joined = attempt or job.backend.join(job.target, said[0], durable=job.options.durable)
        self._token = said[1]
        self._on_all("seen", lambda: self._refuse_unseen(joined))
        return joined

    def _refuse_unseen(self, attempt: Attempt) -> None:
        """Raises CheckpointError where this process does not see what process 0 wrote."""
        try:
            seen = attempt.read("ckpt.token")
        except FileNotFoundError:
            seen = b""
        if seen != self._token.encode():
            raise CheckpointError(
                f"{self._job.target} is not a directory that all processes share: process "
                f"{self._job.processes.index} does not see what process 0 wrote in it"
            )

    def write_items(self, attempt: Attempt) -> None:
        """Agreement 2: all processes have written what is theirs."""

        def work() -> str:
            self.write_own(attempt)
            if self._job.writers.count == 1:
                return ""  # all is digested when it is committed
            index = self._job.writers.index
            return digest_own(attempt, self._items, index, self._job.local, self._context)

        self._on_all("written", work, tell=str, hear=self._digests.extend)

    def commit(self, attempt: Attempt) -> None:
        """Agreement 3: process 0 has made the checkpoint durable, was allowed to, and made it visible."""

        def work() -> None:
            self.make_durable(attempt)
            if self._job.guard is not None:  # last of all: nothing that takes time comes after it
                self._job.guard.check()
            attempt.commit()

        self._on_all("committed", work if self._job.writers.index == 0 else lambda: None)
        self.committed()

    def committed(self) -> None:
        """The checkpoint is visible: what was noted of it for the next save counts."""
        if self._links is not None:
            self._links.committed()

    def _on_all(self, what: str, work: Callable[[], Any], **telling: Any) -> None:
        tag = f"{self._tag}/{what}"
        done_by_all(self._job, self._job.writers, tag, work, "save", **telling)

    def write_own(self, attempt: Attempt) -> None:
        """The arrays, states and checksums of this process."""
        # every process's databases are merged in the context that wrote this process's one
        self._context = new_context(durable=self._job.options.durable)
        self._items[:] = [item.landed() for item in self._items]
        writers: list[ArrayWriter] = []
        try:
            written = sum(self._start_item(attempt, item, writers) for item in self._items)
            if self._job.writers.index == 0 and self._job.local:
                self._describe(attempt)  # the disk is busy with the arrays anyway
            watch = self._progress(attempt, written) if self._job.options.on_event else None
            for writer in writers:
                writer.finish(watch)
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
        self.written_bytes = written

    def _progress(self, attempt: Attempt, total_bytes: int) -> Callable[[], None]:
        """What to call now and then while the arrays are being written."""
        job = self._job
        progress = Progress(job.target, job.step, total_bytes, job.options.on_event)
        process = job.writers.index
        linked_bytes = sum(linked.size_bytes for linked in self._linked)

        def watch() -> None:
            # TensorStore tells nothing before all is done, but the files grow
            sizes = own_data(attempt, self._items, process)
            progress.reached(min(total_bytes, sum(sizes.values()) - linked_bytes))

        return watch

    def _start_item(self, attempt: Attempt, item: PreparedItem, writers: list[ArrayWriter]) -> int:
        """Starts writing an item, and writes its arrays' checksums; gives the bytes to write.

        Args:
            attempt: of the save.
            item: a tree, or what this process has of a state.
            writers: that of a tree's arrays is added, to be finished, or aborted where this fails.
        """
        for name, data in item.state_files.items():
            attempt.write(f"{item.folder}/{name}", data)
        if item.record.form != "tree":
            return sum(map(len, item.state_files.values()))
        arrays, linked = item.arrays, None
        if self._links is not None:
            linked = self._links.link(item, attempt.path, self._context)
        options = self._job.options
        trees = sum(one.record.form == "tree" for one in self._items)  # all are under way at once
        writer = ArrayWriter(
            Location(f"{attempt.path}/{item.folder}", self._job.local),
            self._job.writers.index,
            self._job.writers.count,
            self._context,
            target_data_file_bytes=options.target_data_file_bytes,
            max_host_bytes=options.max_host_bytes // trees,
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

    def make_durable(self, attempt: Attempt) -> None:
        """Process 0: merges and describes; after it, nothing is left but to make the checkpoint visible."""
        job = self._job
        for item in self._items:
            if item.record.form == "tree" and job.writers.count > 1:
                merge(
                    Location(f"{attempt.path}/{item.folder}", job.local),
                    job.writers.count,
                    self._context,
                    target_data_file_bytes=job.options.target_data_file_bytes,
                )
        if not job.local:
            # nothing is renamed there: what tells Orbax of a checkpoint comes after all of it
            self._describe(attempt)
        record = self._record(attempt)
        if self._links is not None:
            self._links.prepare(
                job.target, attempt.path, self._items, self._checksums, record.files
            )
        attempt.make_durable(RECORD_FILE, dump_record(record))

    def _record(self, attempt: Attempt) -> Record:
        return Record(
            items={item.name: item.record for item in self._items},
            files=self._files(attempt),
            token=self._token,
            single=self._fields.single,
            metadata=self._fields.metadata,
            metrics=dict(self._fields.metrics),
            versions=library_versions(),
            topology=shardings.topology(),
            created_unix_secs=time.time(),
            durations={
                "snapshot_secs": round(self.snapshot_secs, 6),
                "write_secs": round(time.monotonic() - self._began, 6),
            },
        )

    def _files(self, attempt: Attempt) -> dict[str, FileRecord]:
        """Size and digest of every file, the other processes' included."""
        known = {name: entry for linked in self._linked for name, entry in linked.files.items()}
        known |= self._described
        if self._job.writers.count == 1:
            sizes = attempt.files()
            if all(size <= WHOLE_DIGEST_BYTES or name in known for name, size in sizes.items()):
                return {
                    name: known.get(name) or FileRecord.of(attempt.read(name)) for name in sizes
                }
        local = self._job.local
        return digest_all(attempt, self._items, self._digests, known, local, self._context)

    def _describe(self, attempt: Attempt) -> None:
        """Process 0: writes what needs no array."""
        files = dict(self._metadata_files())
        for name, data in files.items():
            attempt.write(name, data)
        self._described = {name: FileRecord.of(data) for name, data in files.items()}

    def _metadata_files(self) -> Iterable[tuple[str, bytes]]:
        """Everything that Orbax reads besides the arrays."""
        handlers: dict[str, str] = {}
        for item in self._items:
            handlers[item.folder] = orbax_write.HANDLERS[_handler(item)]
            if item.record.form == "process":
                note = dump_json(
                    {"format": "ckpt process state", "process_count": self._job.writers.count}
                )
                yield f"{item.folder}/metadata", note
                yield f"{item.folder}/data.json", note
                continue
            assert item.plan is not None
            for name, data in item.plan.files:
                yield f"{item.folder}/{name}", data
            if item.texts:
                paths = dict(zip(item.names, item.record.paths, strict=True))
                yield (
                    f"{item.folder}/{orbax_write.STRINGS_FILE}",
                    orbax_write.strings_file(item.texts, paths),
                )
        if self._fields.metrics:
            handlers["metrics"] = orbax_write.HANDLERS["json"]
            yield "metrics/metrics", dump_json(dict(self._fields.metrics))
        yield orbax_write.STEP_METADATA, orbax_write.step_metadata(handlers, self._fields.metadata)
        text = f"Checkpoint commit was successful to {self._job.target}"
        yield orbax_write.COMMIT_FILE, text.encode(errors="surrogateescape")


def _handler(item: PreparedItem) -> str:
    if item.record.form == "process":
        return "json"
    return "text_tree" if item.texts else "tree"
