"""One save: flatten, plan and snapshot on the caller's thread; then write and commit.

An asynchronous save writes and commits in a background thread. ``PreparedSave`` has all processes write into one
directory, which process 0 commits; ``_run/tiers/save.py`` has a directory for each, and all commit or none.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_core._devices.staging import Copy
from ckpt_core._directory import Attempt
from ckpt_core._errors import CheckpointError
from ckpt_core._format.record import library_versions
from ckpt_core._operation import Operation
from ckpt_core._save.agreement import agree_to_save, of_process_0
from ckpt_core._save.job import RecordFields, SaveJob
from ckpt_core._save.prepare import PreparedItem, prepare_items
from ckpt_core._save.write import Write

Around = Callable[[Callable[[], None]], None]
"""Calls its argument, which writes and commits; may do more before and after, on that thread."""


class Snapshot:
    """What a save has taken from its caller, and its agreements with the other processes, which detect a process that does another ``call``."""

    def __init__(self, job: SaveJob, call: str = "save") -> None:
        options = job.options
        self.operation = Operation(
            "save", job.target, job.step, options.report_secs, options.on_event
        )
        self.fields = RecordFields(job.fields.single)  # a copy that the caller cannot change
        self.items: list[PreparedItem] = []
        self.refusal: Exception | None = None  # ``agree`` reports it to the others and raises it
        self.blocking_secs = 0.0
        self.job = job
        self._round = job.processes.round(call, options.timeout_secs, job.target)
        self._refused = False

    def refuse(self, error: BaseException) -> None:
        """Reports to the others, who wait in ``agree``, that this process does not take part; only the first time."""
        if not self._refused:
            self._refused = True
            self._round.refuse(error)

    def agree(
        self,
        settings: Mapping[str, Any],
        offer: Callable[[], Any],
        combine: Callable[[list[Any]], Any] = of_process_0,
    ) -> Any:
        """Agreement 1 of several processes, that all save the same (see ``agree_to_save``); the answer to what they offer. ``settings``
        must be equal on all, besides items and fields. ``offer`` is called when the arrays of this process are on the host.
        """
        job, offered = self.job, None
        try:
            if self.refusal is None:
                self.operation.phase = "waiting for arrays on their way to the host"
                self.items[:] = [item.landed() for item in self.items]  # their values are compared
                offered = offer()
        except Exception as error:
            self.refusal = error  # the other processes wait for this one: it reports the error to them, then raises
        self.operation.phase = "agreeing what is saved"
        common = {
            "Options(durable=)": job.options.durable,
            "whether one state or named items are saved": job.fields.single,
            "the version of ckpt": library_versions().get("ckpt-core"),
        }
        return agree_to_save(
            self._round, self.items, {**settings, **common}, offered, self.refusal, combine
        )

    def write(self, token: str) -> Write:
        """What writes this process's part, into the attempt that has this token."""
        secs = self.blocking_secs
        return Write(self.job, self.fields, self.items, token, self.operation, secs)

    def on_all(self, moment: str, work: Callable[[], Any], **reporting: Any) -> None:
        """Calls ``work`` and waits until all processes have done theirs; if one fails, all raise. ``moment`` names what all have
        done then with their parts; ``reporting`` goes to ``Round.all``.
        """

        def noted() -> Any:
            found = work()
            if self.job.processes.count > 1:
                self.operation.phase = f"waiting until all processes have {moment} their parts"
            return found

        self._round.all(noted, **reporting)


class PreparedSave:
    """A save after its snapshot, made by ``prepare_save`` on the caller's thread. It is either run once, perhaps by another thread, or
    undone; later calls do nothing. The processes agree four times: that they save the same, that they see one attempt, after writing, and after the commit by process 0.
    """

    def __init__(self, job: SaveJob, around: Around | None = None) -> None:
        self._job = job
        self._around = around
        self.snapshot = Snapshot(job)
        self._token = job.token or secrets.token_hex(16)
        self._attempt: Attempt | None = None
        self._agreeing = False
        self._begun = threading.Lock()  # taken once, by ``run`` or ``undo``

    def run(self) -> None:
        """Writes and commits the checkpoint; if that fails, its files are removed."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            write = self._write_and_commit
            write() if self._around is None else self._around(write)
        except BaseException:
            self._give_back()
            raise

    def undo(self) -> bool:
        """Removes the attempt's directory, unless ``run`` was called; whether it will never run."""
        undone = self._begun.acquire(blocking=False)
        if undone:
            self._give_back()
        return undone

    def _write_and_commit(self) -> None:
        snapshot, index = self.snapshot, self._job.processes.index
        with snapshot.operation.failing("save_failed", "beginning"), aborting(self.abort):
            if index == 0 and self._attempt is None and snapshot.refusal is None:
                try:
                    self.begin()
                except Exception as error:
                    if self._job.processes.count == 1:
                        raise
                    snapshot.refusal = error
            self._agreeing = True
            attempt = self._agree_to_start()
            write = snapshot.write(self._token)
            passed = write.passed.extend
            snapshot.on_all("written", lambda: write.own_part(attempt), report=str, judge=passed)
            commit = (lambda: write.commit(attempt)) if index == 0 else (lambda: None)
            snapshot.on_all("committed", commit)
        self._attempt = None
        snapshot.operation.committed(write.written_bytes, snapshot.blocking_secs)

    def begin(self) -> None:
        """On process 0: claims the target, and begins the attempt."""
        job = self._job
        if job.guard is not None:
            job.guard.take()
            # in an object store, an attempt begins by deleting the files of an unfinished one
            if not job.local:
                job.guard.check()
        self._attempt = job.backend.begin(
            job.target, overwrite=job.overwrite, durable=job.options.durable, token=self._token
        )

    def _agree_to_start(self) -> Attempt:
        """Agreement 1: all processes save the same, into the attempt that process 0 began, which each
        gets; CheckpointError if they do not, if one cannot save, or does not see the files of process 0.
        """
        job, begun = self._job, self._attempt
        if job.processes.count == 1:
            assert begun is not None
            return begun

        def offer() -> Any:
            if begun is None:
                return None
            begun.write("ckpt.token", self._token.encode(), until_commit=True)
            return [begun.path, self._token]

        settings = {"the path": job.target, "overwrite=": job.overwrite}
        path, self._token = self.snapshot.agree(settings, offer)
        attempt = begun or job.backend.join(job.target, path, durable=job.options.durable)
        self.snapshot.on_all("seen", lambda: self._refuse_unseen(attempt))
        return attempt

    def _refuse_unseen(self, attempt: Attempt) -> None:
        """Raises CheckpointError if this process does not see the token file of process 0."""
        try:
            seen = attempt.read("ckpt.token")
        except FileNotFoundError:
            seen = b""
        if seen != self._token.encode():
            raise CheckpointError(
                f"{self._job.target} is not a directory that all processes share: process "
                f"{self._job.processes.index} does not see what process 0 wrote in it"
            )

    def _give_back(self) -> None:
        """Removes the attempt; reports that to the other processes, unless they know."""
        if not self._agreeing:
            self.snapshot.refuse(CheckpointError("its save could not begin"))
        self.abort()

    def abort(self) -> None:
        """Removes the attempt, if there is one."""
        if self._attempt is not None:
            self._attempt.abort()
            self._attempt = None


def take(
    items: Mapping[str, Any],
    snapshots: Sequence[Snapshot],
    copy: Copy | None = None,
    begins: PreparedSave | None = None,
) -> None:
    """Copies or references all values as they are now, once for all saves of one step. With several
    processes, an error is kept and raised in ``agree``, where the others wait for this one. ``begins``
    is the save that then begins on process 0, in a file system, where that takes no round trip.
    """
    jobs = [one.job for one in snapshots]
    for one in snapshots:
        one.operation.happened("save_started")
    try:
        with snapshots[0].operation.watched("taking the snapshot"):
            fields = jobs[0].fields.frozen()
            prepared, shared = prepare_items(items, jobs, copy)
            for one, its in zip(snapshots, prepared, strict=True):
                one.items, one.fields = its, replace(fields, shared=shared)
            if begins is not None and jobs[0].local and jobs[0].processes.index == 0:
                begins.begin()
        for one in snapshots:
            one.blocking_secs = one.operation.happened("snapshot_taken")
    except BaseException as error:
        if jobs[0].processes.count > 1 and isinstance(error, Exception):
            for one in snapshots:
                one.refusal = error
            return
        for one in snapshots:
            one.refuse(error)
            one.operation.happened("save_failed", error=error)
        raise


def prepare_save(job: SaveJob, items: Mapping[str, Any], copy: Copy | None = None) -> PreparedSave:
    """The save with the snapshot of all items, ready to be written and committed; process 0 has also begun it in a file system."""
    prepared = PreparedSave(job)
    try:
        take(items, [prepared.snapshot], copy, prepared)
    except BaseException:
        prepared.abort()
        raise
    return prepared


@contextlib.contextmanager
def aborting(abort: Callable[[], None]) -> Generator[None]:
    """Calls ``abort`` if the block raises."""
    try:
        yield
    except BaseException:
        abort()
        raise
