"""One save: flatten, plan and snapshot on the caller's thread; then write and commit.

An asynchronous save writes and commits in a background thread.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

from ckpt_core import _processes
from ckpt_core._directory import Attempt
from ckpt_core._errors import CheckpointError
from ckpt_core._events import Event, Kind, logger, tell
from ckpt_core._options import Options
from ckpt_core._save.job import RecordFields, SaveJob
from ckpt_core._save.prepare import PreparedItem, prepare_items
from ckpt_core._save.write import CALL, Write
from ckpt_core._slow import Activity, watched

Around = Callable[[Callable[[], None]], None]
"""Calls its argument, which writes and commits; may do more before and after, on that thread."""


class PreparedSave:
    """A save whose snapshot is taken. It is either run once, or undone; later calls do nothing.

    Args:
        write: writes and commits the checkpoint.
        give_back: removes the attempt's directory, if the checkpoint is never written.
    """

    def __init__(self, write: Callable[[], None], give_back: Callable[[], None]) -> None:
        self._write = write
        self._give_back = give_back
        self._claims: dict[str, object] = {}

    def run(self) -> None:
        """Writes and commits the checkpoint; if that fails, its files are removed."""
        me = object()
        try:
            # after an exception of a signal handler, a lock would not tell who has taken it
            if self._claims.setdefault("by", me) is me:
                self._write()
        except BaseException:
            if self._claims.get("by") is me:
                self._give_back()
            raise

    def undo(self) -> None:
        """Removes the attempt's directory, if ``run`` was not called."""
        me = object()
        if self._claims.setdefault("by", me) is me:
            self._give_back()


def prepare_save(
    job: SaveJob, items: Mapping[str, Any], around: Around | None = None
) -> PreparedSave:
    """Takes the snapshot of all items; returns the save, ready to be written and committed.

    Args:
        job: job of the save.
        items: values to save, by item name.
        around: see ``Around``; None to just write and commit.
    """
    save = _Save(job)
    run = save.write_and_commit
    prepared = PreparedSave(run if around is None else lambda: around(run), save.cancel)
    save.take_snapshot(items)
    return prepared


class _Save:
    """One save. The caller's thread takes the snapshot; another thread may write and commit."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._events = SaveEvents(job.target, job.step, job.options)
        self._tag = _processes.next_tag() if job.processes.count > 1 else ""
        self._token = job.token or secrets.token_hex(16)
        self._attempt: Attempt | None = None
        self._agreeing = False
        self._fields = RecordFields(job.fields.single)
        self._items: list[PreparedItem] = []
        self._refusal: Exception | None = None
        self._blocking_secs = 0.0

    def take_snapshot(self, items: Mapping[str, Any]) -> None:
        """Copies or references all values as they are now; process 0 also begins, unless that comes later.

        With several processes, an error is kept and raised in ``write_and_commit``, after the other
        processes have been told: they wait for this one there.
        """
        self._events.happened("save_started")
        try:
            with watched(self._events.activity, "taking the snapshot"):
                self._fields = self._job.fields.frozen()
                self._items, shared = prepare_items(items, self._job)
                self._fields = replace(self._fields, shared=shared)
                at_once = self._job.local and self._job.waits_for_disk
                if self._job.processes.index == 0 and at_once:
                    self._attempt = self._begin()
            self._blocking_secs = self._events.happened("snapshot_taken")
        except BaseException as error:
            if self._job.processes.count == 1 or not isinstance(error, Exception):
                self._job.processes.refuse(self._tag, CALL, error)
                self._abort()
                self._events.happened("save_failed", error=error)
                raise
            self._refusal = error

    def _begin(self) -> Attempt:
        job = self._job
        if job.guard is not None:
            job.guard.take()
            # in an object store, an attempt begins by deleting the files of an unfinished one
            if not job.local:
                job.guard.check()
        return job.backend.begin(
            job.target, overwrite=job.overwrite, durable=job.options.durable, token=self._token
        )

    def _begin_later(self) -> None:
        """Begins the attempt on the thread that writes."""
        try:
            self._attempt = self._begin()
        except Exception as error:
            if self._job.processes.count == 1:
                raise
            self._refusal = error

    def write_and_commit(self) -> None:
        """Writes and commits the checkpoint; if that fails, its files are removed."""
        with self._events.failing(), aborting(self._abort):
            job = self._job
            later = self._attempt is None and self._refusal is None
            if job.processes.index == 0 and later:
                self._begin_later()
            write = Write(
                self._job, self._fields, self._items, self._token, self._tag, self._events.activity
            )
            write.snapshot_secs = self._blocking_secs
            self._agreeing = True
            attempt = write.agree_to_start(self._attempt, self._refusal)
            write.write_items(attempt)
            write.commit(attempt)
        self._attempt = None
        self._events.committed(write.written_bytes, self._blocking_secs)

    def cancel(self) -> None:
        """Removes the attempt; tells other processes, unless ``write_and_commit`` has."""
        if not self._agreeing:
            refusal = CheckpointError("its save could not begin")
            self._job.processes.refuse(self._tag, CALL, refusal)
        self._abort()

    def _abort(self) -> None:
        if self._attempt is not None:
            self._attempt.abort()
            self._attempt = None


@contextlib.contextmanager
def aborting(abort: Callable[[], None]) -> Generator[None]:
    """Calls ``abort`` if the block raises."""
    try:
        yield
    except BaseException:
        abort()
        raise


class SaveEvents:
    """Sends the events of one save to the log and to ``Options.on_event``.

    Attributes:
        activity: how far the save is, for reports if it takes long.
    """

    def __init__(self, path: str, step: int | None, options: Options) -> None:
        self._path = path
        self._step = step
        self._listener = options.on_event
        self.activity = Activity("save", path, step, options.report_secs, options.on_event)

    def happened(
        self, kind: Kind, written_bytes: int = 0, error: BaseException | None = None
    ) -> float:
        """Sends one event; returns the seconds since the save was called."""
        secs = time.monotonic() - self.activity.began
        event = Event(
            kind=kind,
            path=self._path,
            step=self._step,
            bytes=written_bytes,
            secs=secs,
            error=error,
        )
        tell(event, self._listener)
        return secs

    @contextlib.contextmanager
    def failing(self) -> Generator[None]:
        """If the block raises, sends ``save_failed`` with the error; reports if it takes long."""
        try:
            with watched(self.activity, "beginning"):
                yield
        except BaseException as error:
            self.happened("save_failed", error=error)
            raise

    def committed(self, written_bytes: int, blocking_secs: float) -> None:
        """Sends ``committed``, and writes the save's single line to the log."""
        secs = self.happened("committed", written_bytes)
        logger.info(
            "%s: %d bytes, blocked %.3f s, total %.3f s, %.2f GB/s",
            self._path,
            written_bytes,
            blocking_secs,
            secs,
            written_bytes / max(secs, 1e-9) / 1e9,
        )
