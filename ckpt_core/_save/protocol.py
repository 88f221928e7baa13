"""One save: a snapshot on the caller's thread; then agree, write and commit, perhaps in a background thread.

In ``Save`` all processes write into one directory, which process 0 commits; ``_run/tiers/save.py`` has a directory for each, and
all commit or none; in ``pieces`` one process writes bit by bit.
"""

from __future__ import annotations

import itertools
import operator
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckpt_core._background import PendingSave, Workers
from ckpt_core._devices.transfer import Copy
from ckpt_core._directory import Attempt
from ckpt_core._errors import ANSWERS, CheckpointError, at_the_call
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, dump_checksums
from ckpt_core._format.packed import pack
from ckpt_core._format.part import Part
from ckpt_core._format.record import RECORD_FILE, FileRecord, Record, dump_record, library_versions
from ckpt_core._lazy import jax
from ckpt_core._operation import Operation
from ckpt_core._options import DEFAULTS, MIB, Options, checked_options
from ckpt_core._save.agree import agree_to_save, join_parts, pass_part, refuse_unseen
from ckpt_core._save.job import (
    NOTHING,
    PreparedItem,
    RecordFields,
    SaveJob,
    collect_items,
    metadata_files,
    save_job,
    write_sources,
)
from ckpt_core._save.prepare import landed, take_snapshot
from ckpt_core._storage import INDEX_FILE, ArrayWriter, Rows, encode_index

_FILES_AT_ONCE = 4  # number of data files that are written at once
_UPLOADED_FILE_BYTES = 32 * MIB  # of a data file in an object store: it is in memory as a whole


def save(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """Writes a checkpoint at ``path``; when it returns, a power cut cannot lose the checkpoint.

    Blocks until every file is written, fsynced and renamed into place. Where several processes run,
    all must call it, with the same structure, shardings, path and options; before anything is
    written, the processes compare all that decides what is stored where. Each process writes its
    shards; metadata is taken from process 0. Python numbers, text, numpy arrays and arrays that no
    sharding places must be equal on all, unless an object with ``per_process = True`` holds them.

    Args:
        path: directory of the checkpoint. It must not exist; missing parents are created.
        state: one pytree or object, saved as the only item, ``state``.
        overwrite: if a checkpoint exists at ``path``, replace it: after a crash, ``load`` finds
            either the old or the new one, complete.
        metadata: any JSON value, stored with the checkpoint.
        options: see ``Options``.
        items: more named items, for names that are no identifiers or are argument names.
        **named: named items: models, optimizers, data iterators, pytrees.

    Raises:
        CheckpointExists: there is something at ``path``, and ``overwrite`` is False.
        UnsupportedLeaf: a value cannot be saved; the message says its path and type.
        CheckpointError: processes save different things or values, or another process failed.
        BarrierTimeout: a process did not come within ``Options.timeout_secs``.
        OSError: the system refused (disk full, no permission). Partial files are removed.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
    """
    try:
        prepared = _prepared(path, state, overwrite, metadata, options, items, named)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904
    try:
        prepared.run()
    except BaseException:
        prepared.undo()
        raise


def save_async(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> PendingSave:
    """A ``PendingSave``: a background thread writes the checkpoint that ``save`` would write.

    Blocks only until the snapshot is taken: then the caller may donate or delete arrays and write
    to numpy arrays. (Exception: a numpy array whose memory a ``jax.Array`` shares must not be
    written to; jax forbids that at any time.) Where several processes run, all must call it.

    Takes the arguments of ``save`` and raises its errors. An error in the background thread is
    raised by ``.result()``; if nobody calls that, it is printed when the interpreter exits, and the
    exit status is 1. The interpreter does not exit before the save has ended. If the system has no thread
    for it, ``RuntimeError`` is raised here, and nothing of it is left.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> pending = ckpt.save_async("/tmp/ckpt-docs/two", {"w": jnp.ones(3)}, overwrite=True)
        >>> pending.result()
    """
    try:
        prepared = _prepared(path, state, overwrite, metadata, options, items, named, np.copy)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904
    pending, job = None, prepared.job
    try:
        low = job.options.background_priority == "low"
        pending = PendingSave(job.target, prepared.run, "ckpt-save", low=low)
        pending.start()
        return pending
    except BaseException:
        if pending is not None:  # interpreter exit would wait for a thread that never started
            pending.abandon()
        prepared.undo()  # does nothing if the background thread has begun to write
        raise


def _prepared(
    path: str | os.PathLike[str],
    state: Any,
    overwrite: bool,
    metadata: Any,
    options: Options | None,
    items: Mapping[str, Any] | None,
    named: Mapping[str, Any],
    copy: Copy | None = None,
) -> Save:
    """The save with the snapshot of all items, which in a file system process 0 has also begun."""
    options = DEFAULTS if options is None else checked_options(options)
    chosen = collect_items(state, items, named)
    fields = RecordFields(state is not NOTHING, metadata)
    save = Save(save_job(path, fields, options, overwrite=overwrite))
    try:
        take_snapshot(chosen, [save], copy, save)
    except BaseException:
        save.undo()
        raise
    return save


class Save:
    """One save of all processes. After ``take_snapshot`` it is run once, perhaps by another thread, or undone; later calls do
    nothing. The processes agree that they save the same, that they see one attempt, and after writing and committing.
    """

    attempt: Attempt  # in which this process writes

    def __init__(self, job: SaveJob, call: str = "save") -> None:
        options = job.options
        self.job = job
        self.operation = Operation(
            "save", job.target, job.step, options.report_secs, options.on_event
        )
        self.token = job.token or secrets.token_hex(16)
        self.fields = job.fields  # later a copy that the caller cannot change
        self.items: list[PreparedItem] = []
        self.part: Part | None = None  # of the step; in a local directory of several processes
        self.refusal: Exception | None = None  # ``agree`` reports it to the others and raises it
        self.files: dict[str, FileRecord] = {}  # that are written, by path in the checkpoint
        self.blocking_secs = 0.0  # the snapshot's
        self.written_bytes = 0
        self.committed = False
        self._round = job.processes.round(call, options.timeout_secs, job.target)
        self._others_know = False  # whether this process takes part
        self._claim = threading.Lock()  # taken once, by ``run`` or ``undo``
        self._begun: Attempt | None = None  # by this process, which removes it if it fails
        self._passed: list[str] = []  # on process 0: what ``write_part`` gave on each process
        self._began = time.monotonic()
        alone = job.on_disk and job.writers.count == 1 and options.link_unchanged
        self._links = job.links if alone else None
        self._writers: dict[str, ArrayWriter] = {}  # by item
        self._file_bytes, held_bytes = options.target_data_file_bytes, options.chunk_bytes
        if not job.on_disk:
            self._file_bytes = min(self._file_bytes, _UPLOADED_FILE_BYTES)
            held_bytes = max(self._file_bytes, held_bytes)
        # each thread has a chunk in memory, or a file on its way to an object store
        threads = max(1, min(_FILES_AT_ONCE, options.max_host_bytes // held_bytes))
        self._workers = Workers(threads, "ckpt-write")
        self._host_bytes = options.max_host_bytes

    def run(self) -> None:
        """Writes and commits the checkpoint; if that fails, its files are removed."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            with self.operation.failing("save_failed", "beginning"):
                self.start()
                self._on_all("written", self.write_part, report=str, judge=self._passed.extend)
                self._on_all("committed", self.commit)
        except BaseException:
            self._give_back()
            raise
        self._begun, self.committed = None, True
        self.operation.committed(self.written_bytes, self.blocking_secs)

    def undo(self) -> bool:
        """Removes the attempt's directory, unless ``run`` was called; whether it will never run."""
        undone = self._claim.acquire(blocking=False)
        if undone:
            self._give_back()
        return undone

    def start(self) -> None:
        """Agreement 1: all save the same, into the attempt of process 0, and see its files; CheckpointError if they do not."""
        job = self.job
        if job.processes.index == 0 and self._begun is None and self.refusal is None:
            try:
                self.begin()
            except Exception as error:
                if job.processes.count == 1:
                    raise
                self.refusal = error
        if job.processes.count == 1:
            return
        begun = self._begun

        def offer() -> Any:
            if begun is None:
                return None
            begun.write("ckpt.token", self.token.encode(), until_commit=True)
            return [begun.path, self.token]

        settings = {"the path": job.target, "overwrite=": job.overwrite}
        path, self.token = self.agree(settings, offer)
        if begun is None:
            self.attempt = job.backend.join(job.target, path, durable=job.options.durable)
        self._on_all("seen", lambda: refuse_unseen(self.attempt, self.token, job))

    def begin(self) -> None:
        """Claims the target, and begins the attempt."""
        job = self.job
        if job.guard is not None:
            job.guard.claim()
            # in an object store, an attempt begins by deleting the files of an unfinished one
            if not job.on_disk:
                job.guard.check()
        self.attempt = self._begun = job.backend.begin(
            job.target, overwrite=job.overwrite, durable=job.options.durable, token=self.token
        )

    def refuse(self, error: BaseException) -> None:
        """Reports to the others, who wait in ``agree``, that this process does not take part; only the first time."""
        if not self._others_know:
            self._others_know = True
            self._round.refuse(error)

    def give_up(self, error: BaseException) -> None:
        """Tells the other processes and the listeners that this save does not begin."""
        self.refuse(error)
        self.operation.happened("save_failed", error=error)

    def agree(
        self,
        settings: dict[str, Any],
        offer: Callable[[], Any],
        combine: Callable[[list[Any]], Any] = operator.itemgetter(0),
    ) -> Any:
        """Agreement 1, see ``agree_to_save``: what ``combine`` makes of all offers, made when the arrays are on the host."""
        self._others_know = True
        common = {
            "Options(durable=)": self.job.options.durable,
            "whether one state or named items are saved": self.job.fields.single,
            "the version of ckpt": library_versions().get("ckpt-core"),
        }

        def offered() -> Any:
            try:
                self.land()  # its values are compared
                return offer()
            finally:
                self.operation.phase = "agreeing what is saved"

        return agree_to_save(
            self._round, self.items, settings | common, offered, self.refusal, combine
        )

    def _on_all(self, moment: str, work: Callable[[], Any], **reporting: Any) -> None:
        """Calls ``work`` and waits until all have, or raises with them. ``moment``: what all have done then with their parts."""
        self._others_know = True
        if self.job.processes.count == 1:
            work()
            return

        def noted() -> Any:
            found = work()
            self.operation.phase = f"waiting until all processes have {moment} their parts"
            return found

        self._round.all(noted, **reporting)

    def _give_back(self) -> None:
        """Removes the attempt; reports that to the other processes, unless they know."""
        self.refuse(CheckpointError("its save could not begin"))
        if self._begun is not None:
            self._begun.abort()
            self._begun = None

    def write_part(self) -> str:
        """Writes what this process has, and passes where it stands to process 0; returns the digest of that."""
        self.write_own()
        index = self.job.writers.index
        return pass_part(self.attempt, index, self.files, self._writers) if index else ""

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

    def land(self) -> None:
        """Blocks until the arrays of this process are on the host."""
        self.operation.phase = "waiting for arrays on their way to the host"
        self.items[:] = [landed(item) for item in self.items]

    def write_own(self) -> None:
        """Writes arrays, states and checksums of this process; blocks until they are written."""
        self.land()
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
        if self.job.writers.index == 0:
            self._write(metadata_files(self.job, self.fields, self.items))

    def _start_item(self, item: PreparedItem) -> int:
        """Starts to write an item's arrays, or writes its files; returns the number of bytes that this process writes."""
        self._write({f"{item.folder}/{name}": data for name, data in item.state_files.items()})
        if item.record.form != "tree":
            copied = write_sources(item, self.attempt, self.job, self._links)
            self.files |= copied
            sizes = (file.size_bytes for file in copied.values())
            return sum(map(len, item.state_files.values())) + sum(sizes)
        writer, arrays, apart = self._writer(item), item.arrays, ()
        if self._links is not None:
            linked, apart, arrays = self._links.link(item, self.attempt.path, writer)
            self.files |= linked
        if apart:
            writer.put(apart)
            writer.start()  # into files of their own
        writer.put(arrays)
        writer.start()  # meanwhile this thread goes on
        return sum(array.size_bytes for array in (*apart, *arrays))

    def _writer(self, item: PreparedItem) -> ArrayWriter:
        """The writer of the item's arrays. All trees are written at the same time, so they share ``max_host_bytes``."""
        trees = sum(one.record.form == "tree" for one in self.items)
        index, attempt = self.job.writers.index, self.attempt
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
        alone, index = self.job.writers.count == 1, self.job.writers.index
        for item in self.items:
            if (writer := self._writers.get(item.name)) is None:
                continue
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
            self._write({folder + INDEX_FILE: manifest})

    def make_durable(self) -> None:
        """On process 0: joins what all processes wrote, writes the record, and fsyncs. Only the rename is then missing."""
        job, trees = self.job, [item for item in self.items if item.name in self._writers]
        self.operation.phase = "joining, describing and syncing files"
        if job.writers.count > 1:
            join_parts(self.attempt, self._passed, self.files, self._writers)
            for item in trees:
                self._write_index(f"{item.folder}/", self._writers[item.name].rows)
        if job.options.flat and not job.own:  # Orbax looks there for a tree without a name
            for item in trees:
                self._write_index("", self._writers[item.name].rows, below=f"{item.folder}/")
        record = self._record()
        if (links := self._links) is not None:
            links.prepare(job.target, self.attempt.path, self.items, self._writers, self.files)
        self.attempt.make_durable(RECORD_FILE, dump_record(record))

    def _record(self) -> Record:
        files = dict(self.files)
        within = {} if self.job.on_disk else dict(self.attempt.small_files())
        for item in self.items:  # states of other processes, each of which would be a file to sync
            for name, data in item.others.items():
                within[f"{item.folder}/{name}"] = data
                files[f"{item.folder}/{name}"] = FileRecord.of(data)
        return Record(
            items={item.name: item.record for item in self.items},
            files=files,
            token=self.token,
            **vars(self.fields),
            versions=library_versions(),
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
        )
