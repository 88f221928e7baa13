"""Writing and committing a prepared save: everything that needs the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt_core import _processes, _snapshot
from ckpt_core._directory import Attempt, Form
from ckpt_core._errors import CheckpointError
from ckpt_core._events import Progress
from ckpt_core._format import orbax
from ckpt_core._format.checksums import (
    CHECKSUM_DIRECTORY,
    dump_checksums,
)
from ckpt_core._format.record import (
    RECORD_FILE,
    FileRecord,
    Record,
    dump_json,
    dump_record,
    library_versions,
)
from ckpt_core._options import Options
from ckpt_core._save.agreement import agree_to_save
from ckpt_core._save.digests import WHOLE_DIGEST_BYTES, digest_all, digest_own, own_data
from ckpt_core._save.links import Linked, Links
from ckpt_core._save.prepare import PreparedItem
from ckpt_core._storage import (
    ArrayWriter,
    Location,
    merge,
    new_context,
)

CALL = "save"
"""What processes that save together tell each other."""


class Guard(Protocol):
    """Who may write to a directory; process 0 asks it. Either may raise, and the save is undone."""

    def take(self) -> None:
        """Before the try begins, which removes what others have left."""
        ...

    def check(self) -> None:
        """Last before the commit, when everything is durable."""
        ...


@dataclass(frozen=True)
class Notes:
    """What goes into the record besides the items.

    Attributes:
        single: whether a bare tree was passed.
        overwrite: whether a checkpoint that is there is replaced.
        metadata, metrics: the user's own.
        guard: asked last before the commit; whoever begins the try has asked it before.
        links: what a Checkpointer remembers of the last step, to share its files.
        step: for events.
        snapshot_secs: how long the caller was blocked.
    """

    single: bool
    overwrite: bool = False
    metadata: Any = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    guard: Guard | None = None
    links: Links | None = None
    step: int | None = None
    snapshot_secs: float = 0.0


class Write:
    """Writing and committing one prepared save: everything that needs the disk."""

    def __init__(
        self,
        form: Form,
        target: str,
        local: bool,
        items: list[PreparedItem],
        notes: Notes,
        processes: _processes.Processes,
        options: Options,
        token: str,
        tag: str,
    ) -> None:
        self._form = form
        self._target = target
        self._local = local
        self._items = items
        self._notes = notes
        self._described: dict[str, FileRecord] = {}
        self._written_bytes = 0
        self._digests: list[str] = []  # of the files of each process, on process 0
        self._processes = processes
        self._options = options
        self._token = token
        self._tag = tag
        self._began = time.monotonic()
        alone = local and processes.count == 1 and options.link_unchanged
        self._links = notes.links if alone else None
        self._linked: list[Linked] = []
        self._checksums: dict[str, dict[str, list[int]]] = {}

    def run(self, attempt: Attempt | None, refusal: Exception | None = None) -> int:
        """Writes, agrees, commits; gives the bytes of the arrays that this process wrote.

        Where it fails, whoever began the attempt aborts it.

        Args:
            attempt: of process 0; None on the others.
            refusal: why this process cannot save, where the others have to be told.
        """
        attempt = self._agree_to_start(attempt, refusal)
        self._together("written", lambda: self._write_items(attempt), hear=self._digests.extend)
        self._together("committed", lambda: self._commit(attempt), only_first=True)
        if self._links is not None:
            self._links.committed()
        return self._written_bytes

    def _agree_to_start(self, attempt: Attempt | None, refusal: Exception | None) -> Attempt:
        """Agreement 1: on the token, where to write, and all that decides what lies where."""
        if self._processes.count == 1:
            assert attempt is not None
            return attempt
        try:
            if attempt is not None:
                attempt.write("ckpt.token", self._token.encode())
        except Exception as error:
            refusal = error  # the others wait to hear from this process
        said = agree_to_save(
            self._processes,
            self._tag,
            CALL,
            self._target,
            self._items,
            {
                "the path": self._target,
                "overwrite=": self._notes.overwrite,
                "Options(durable=)": self._options.durable,
                "whether one state or named items are saved": self._notes.single,
                "the version of ckpt": library_versions().get("ckpt-core"),
            },
            None if attempt is None else [attempt.path, self._token],
            refusal,
            self._options.timeout_secs,
        )
        joined = attempt or self._form.join(self._target, said[0], durable=self._options.durable)
        self._token = said[1]

        def see() -> None:
            try:
                seen = joined.read("ckpt.token")
            except FileNotFoundError:
                seen = b""
            if seen != self._token.encode():
                raise CheckpointError(
                    f"{self._target} is not a directory that all processes share: process "
                    f"{self._processes.index} does not see what process 0 wrote in it"
                )

        self._together("seen", see)
        return joined

    def _together(
        self,
        what: str,
        work: Callable[[], Any],
        *,
        only_first: bool = False,
        hear: Callable[[list[str]], None] | None = None,
    ) -> Any:
        """Does the work and agrees that all did it; a failure of one is a failure of all."""
        waits = only_first and self._processes.index > 0
        return self._processes.together(
            f"{self._tag}/{what}",
            (lambda: None) if waits else work,
            self._options.timeout_secs,
            lambda index, text: CheckpointError(
                f"{self._target}: process {index} failed to save: {text}"
            ),
            hear,
        )

    def _write_items(self, attempt: Attempt) -> str:
        """The arrays, states and checksums of this process; gives their digests for process 0."""
        # every process's databases are merged in the context that wrote this process's one
        self._context = new_context(durable=self._options.durable)
        self._items[:] = [item.landed() for item in self._items]
        writers: list[ArrayWriter] = []
        try:
            written = sum(self._start_item(attempt, item, writers) for item in self._items)
            if self._processes.index == 0 and self._local:
                self._describe(attempt)  # the disk is busy with the arrays anyway
            watch = self._progress(attempt, written) if self._options.on_event else None
            for writer in writers:
                writer.finish(watch)
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
        self._written_bytes = written
        if self._processes.count == 1:
            return ""  # all is digested when it is committed
        index = self._processes.index
        return digest_own(attempt, self._items, index, self._local, self._context)

    def _progress(self, attempt: Attempt, total_bytes: int) -> Callable[[], None]:
        """What to call now and then while the arrays are being written."""
        notes, listener = self._notes, self._options.on_event
        progress = Progress(self._target, notes.step, total_bytes, listener)
        process = self._processes.index
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
        options = self._options
        trees = sum(one.record.form == "tree" for one in self._items)  # all are under way at once
        writer = ArrayWriter(
            Location(f"{attempt.path}/{item.folder}", self._local),
            self._processes.index,
            self._processes.count,
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
        name = f"{item.folder}/{CHECKSUM_DIRECTORY}/process_{self._processes.index}"
        attempt.write(name, dump_checksums(checksums))
        return sum(array.size_bytes for array in arrays)

    def _commit(self, attempt: Attempt) -> None:
        """Process 0: merges, describes, and makes the checkpoint visible."""
        for item in self._items:
            if item.record.form == "tree" and self._processes.count > 1:
                merge(
                    Location(f"{attempt.path}/{item.folder}", self._local),
                    self._processes.count,
                    self._context,
                    target_data_file_bytes=self._options.target_data_file_bytes,
                )
        if not self._local:
            # nothing is renamed there: what tells Orbax of a checkpoint comes after all of it
            self._describe(attempt)
        record = Record(
            items={item.name: item.record for item in self._items},
            files=self._files(attempt),
            token=self._token,
            single=self._notes.single,
            metadata=self._notes.metadata,
            metrics=self._notes.metrics,
            versions=library_versions(),
            topology=_snapshot.topology(),
            created_unix_secs=time.time(),
            durations={
                "snapshot_secs": round(self._notes.snapshot_secs, 6),
                "write_secs": round(time.monotonic() - self._began, 6),
            },
        )
        if self._links is not None:
            self._links.prepare(
                self._target, attempt.path, self._items, self._checksums, record.files
            )
        attempt.make_durable(RECORD_FILE, dump_record(record))
        if self._notes.guard is not None:  # last of all: nothing that takes time comes after it
            self._notes.guard.check()
        attempt.commit()

    def _files(self, attempt: Attempt) -> dict[str, FileRecord]:
        """Size and digest of every file, the other processes' included."""
        known = {name: entry for linked in self._linked for name, entry in linked.files.items()}
        known |= self._described
        if self._processes.count == 1:
            sizes = attempt.files()
            if all(size <= WHOLE_DIGEST_BYTES or name in known for name, size in sizes.items()):
                return {
                    name: known.get(name) or FileRecord.of(attempt.read(name)) for name in sizes
                }
        return digest_all(attempt, self._items, self._digests, known, self._local, self._context)

    def _describe(self, attempt: Attempt) -> None:
        """Process 0: writes what needs no array."""
        for name, data in self._metadata_files(attempt):
            attempt.write(name, data)
            self._described[name] = FileRecord.of(data)

    def _metadata_files(self, attempt: Attempt) -> Iterable[tuple[str, bytes]]:
        """Everything that Orbax reads besides the arrays."""
        handlers: dict[str, str] = {}
        for item in self._items:
            handlers[item.folder] = orbax.HANDLERS[_handler(item)]
            if item.record.form == "process":
                note = dump_json(
                    {"format": "ckpt process state", "process_count": self._processes.count}
                )
                yield f"{item.folder}/metadata", note
                yield f"{item.folder}/data.json", note
                continue
            assert item.plan is not None
            for name, data in item.plan.files:
                yield f"{item.folder}/{name}", data
            if item.texts:
                paths = dict(zip(item.names, item.record.paths, strict=True))
                yield f"{item.folder}/{orbax.STRINGS_FILE}", orbax.strings_file(item.texts, paths)
        if self._notes.metrics:
            handlers["metrics"] = orbax.HANDLERS["json"]
            yield "metrics/metrics", dump_json(self._notes.metrics)
        yield orbax.STEP_METADATA, orbax.step_metadata(handlers, self._notes.metadata)
        text = f"Checkpoint commit was successful to {self._target}"
        yield orbax.COMMIT_FILE, text.encode(errors="surrogateescape")


def _handler(item: PreparedItem) -> str:
    if item.record.form == "process":
        return "json"
    return "text_tree" if item.texts else "tree"
