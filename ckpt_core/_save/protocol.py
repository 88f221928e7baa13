"""One save: flatten, plan and snapshot on the caller's thread; then write and commit, perhaps in a background thread.

In ``Save`` all processes write into one directory, which process 0 commits; ``_run/tiers/save.py`` has a directory for each, and
all commit or none; in ``pieces`` one process writes bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_core._devices.staging import Copy
from ckpt_core._directory import Attempt
from ckpt_core._errors import CheckpointError
from ckpt_core._format.record import library_versions
from ckpt_core._save.agreement import agree_to_save, of_process_0
from ckpt_core._save.job import SaveJob
from ckpt_core._save.prepare import landed, prepare_items
from ckpt_core._save.write import Write

Around = Callable[[Callable[[], None]], None]
"""Calls its argument, which writes and commits; may do more before and after, on that thread."""


class Save(Write):
    """One save of all processes. After ``take`` it is either run once, perhaps by another thread, or undone; later calls do nothing. The
    processes agree that they save the same, that they see one attempt, after writing, and after the commit.
    """

    def __init__(self, job: SaveJob, around: Around | None = None, call: str = "save") -> None:
        super().__init__(job)
        self.refusal: Exception | None = None  # ``agree`` reports it to the others and raises it
        self._around = around
        self._round = job.processes.round(call, job.options.timeout_secs, job.target)
        self._refused = self._agreeing = False
        self._claim = threading.Lock()  # taken once, by ``run`` or ``undo``
        self._begun: Attempt | None = None  # by this process, which removes it if it fails

    def run(self) -> None:
        """Writes and commits the checkpoint; if that fails, its files are removed."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            write = self._write_and_commit
            write() if self._around is None else self._around(write)
        except BaseException:
            self._give_back()
            raise

    def undo(self) -> bool:
        """Removes the attempt's directory, unless ``run`` was called; whether it will never run."""
        undone = self._claim.acquire(blocking=False)
        if undone:
            self._give_back()
        return undone

    def _write_and_commit(self) -> None:
        with self.operation.failing("save_failed", "beginning"):
            self.start()
            self._on_all("written", self.write_part, report=str, judge=self.passed.extend)
            self._on_all("committed", self.commit)
        self._begun = None
        self.operation.committed(self.written_bytes, self.blocking_secs)

    def start(self) -> None:
        """Agreement 1: all processes save the same, into the attempt that process 0 began; CheckpointError
        if they do not, if one cannot save, or does not see the files of process 0.
        """
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
        self._on_all("seen", self._refuse_unseen)

    def begin(self) -> None:
        """Claims the target, and begins the attempt."""
        job = self.job
        if job.guard is not None:
            job.guard.claim()
            # in an object store, an attempt begins by deleting the files of an unfinished one
            if not job.local:
                job.guard.check()
        self.attempt = self._begun = job.backend.begin(
            job.target, overwrite=job.overwrite, durable=job.options.durable, token=self.token
        )

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
        self._agreeing = True
        try:
            if self.refusal is None:
                self.operation.phase = "waiting for arrays on their way to the host"
                self.items[:] = [landed(item) for item in self.items]  # their values are compared
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

    def _on_all(self, moment: str, work: Callable[[], Any], **reporting: Any) -> None:
        """Calls ``work`` and waits until all processes have done theirs; if one fails, all raise. ``moment`` names what all have
        done then with their parts; ``reporting`` goes to ``Round.all``.
        """
        self._agreeing = True
        if self.job.processes.count == 1:
            work()
            return

        def noted() -> Any:
            found = work()
            self.operation.phase = f"waiting until all processes have {moment} their parts"
            return found

        self._round.all(noted, **reporting)

    def _refuse_unseen(self) -> None:
        """Raises CheckpointError if this process does not see the token file of process 0."""
        try:
            seen = self.attempt.read("ckpt.token")
        except FileNotFoundError:
            seen = b""
        if seen != self.token.encode():
            raise CheckpointError(
                f"{self.job.target} is not a directory that all processes share: process "
                f"{self.job.processes.index} does not see what process 0 wrote in it"
            )

    def _give_back(self) -> None:
        """Removes the attempt; reports that to the other processes, unless they know."""
        if not self._agreeing:
            self.refuse(CheckpointError("its save could not begin"))
        if self._begun is not None:
            self._begun.abort()
            self._begun = None


def take_snapshot(
    items: Mapping[str, Any],
    saves: Sequence[Save],
    copy: Copy | None = None,
    begins: Save | None = None,
) -> None:
    """Copies or references all values as they are now, once for all saves of one step. With several
    processes, an error is kept and raised in ``agree``, where the others wait for this one. ``begins``
    is the save that then begins on process 0, in a file system, where that takes no round trip.
    """
    jobs = [one.job for one in saves]
    for one in saves:
        one.operation.happened("save_started")
    try:
        with saves[0].operation.watched("taking the snapshot"):
            fields = jobs[0].fields.frozen()
            prepared, shared = prepare_items(items, jobs, copy)
            for one, its in zip(saves, prepared, strict=True):
                one.items, one.fields = its, replace(fields, shared=shared)
            if begins is not None and jobs[0].local and jobs[0].processes.index == 0:
                begins.begin()
        for one in saves:
            one.blocking_secs = one.operation.happened("snapshot_taken")
    except BaseException as error:
        if jobs[0].processes.count > 1 and isinstance(error, Exception):
            for one in saves:
                one.refusal = error
            return
        for one in saves:
            one.refuse(error)
            one.operation.happened("save_failed", error=error)
        raise


def prepare_save(job: SaveJob, items: Mapping[str, Any], copy: Copy | None = None) -> Save:
    """The save with the snapshot of all items, ready to be written and committed; process 0 has also begun it in a file system."""
    save = Save(job)
    try:
        take_snapshot(items, [save], copy, save)
    except BaseException:
        save.undo()
        raise
    return save
