"""Saving into local directories: every process writes what it holds, and all commit or none."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core._format.record import library_versions
from ckpt_core._processes import next_tag
from ckpt_core._run.fence import Fence
from ckpt_core._save import RecordFields, SaveJob
from ckpt_core._save.agreement import agree_to_save, done_by_all
from ckpt_core._save.prepare import PreparedItem, prepare_items
from ckpt_core._save.protocol import SaveEvents, aborting
from ckpt_core._save.write import Write

_CALL = "save into local directories"


@dataclass(frozen=True)
class StepToSave:
    """What is saved, and what is noted of it; see ``Checkpointer.save``."""

    step: int
    items: Mapping[str, Any]
    fields: RecordFields


class LocalSave:
    """One save of all processes, each into a directory of its own: all commit, or none.

    ``take_snapshot`` is called by the caller of the save, ``write_and_commit`` by whoever writes. The processes
    agree three times: that they save the same, that all have made it durable and may still write, and that
    all have committed.

    Args:
        job: of this process's own checkpoint; what is at its target is replaced.
        fence: says whether this run may still write there.
        tidy: called when this process has committed and none has gone on: all hold their fences.
    """

    def __init__(self, job: SaveJob, fence: Fence, tidy: Callable[[], None]) -> None:
        self._job = job
        self._fence = fence
        self._tidy = tidy
        self._events = SaveEvents(job.target, job.step, job.options)
        self._tag = next_tag()
        self._fields = RecordFields(job.fields.single)
        self._items: list[PreparedItem] = []
        self._refusal: Exception | None = None
        self._blocking_secs = 0.0
        self._all_wrote = False

    def take_snapshot(self, items: Mapping[str, Any]) -> None:
        """Everything that must be of this moment; what fails here is told to the other processes."""
        self._events.happened("save_started")
        try:
            self._fields = self._job.fields.frozen()
            self._items = prepare_items(items, self._job)
        except Exception as error:
            if self._job.processes.count == 1:
                self._events.happened("save_failed", error=error)
                raise
            self._refusal = (
                error  # the others wait for this process: they are told, and it is raised then
            )
        except BaseException as error:  # told as well, but nothing of it waits
            self._job.processes.refuse(self._tag, _CALL, error)
            raise
        self._blocking_secs = self._events.happened("snapshot_taken")

    def write_and_commit(self) -> str:
        """The token of the attempt, when all processes have committed.

        Where one of them fails before, it raises on all, and nothing is left of the step.
        """
        with self._events.failing():
            token = self._agree_to_start()
            write = Write(self._job, self._fields, self._items, token, self._tag)
            write.snapshot_secs = self._blocking_secs
            self._on_all("committed", lambda: self._write(write, token))
        self._events.committed(write.written_bytes, self._blocking_secs)
        return token

    def _agree_to_start(self) -> str:
        """Agreement 1: all are about to save the same; gives the token of process 0."""
        job = self._job
        return agree_to_save(
            job.processes,
            self._tag,
            _CALL,
            job.target,
            self._items,
            {
                "the step": job.step,
                "Options(durable=)": job.options.durable,
                "Options(local_max_to_keep=)": job.options.local_max_to_keep,
                "whether one state or named items are saved": job.fields.single,
                "the version of ckpt": library_versions().get("ckpt-core"),
            },
            secrets.token_hex(16),
            self._refusal,
            job.options.timeout_secs,
        )

    def _write(self, write: Write, token: str) -> None:
        """This process's part, of which agreement 2 is the last step before publishing."""
        job = self._job
        try:
            self._fence.take()
            attempt = job.backend.begin(
                job.target, overwrite=True, durable=job.options.durable, token=token
            )
            with aborting(attempt):
                write.write_own(attempt)
                write.make_durable(attempt)
                self._all_wrote = True
                self._on_all("written", self._fence.check)
                attempt.commit()
            self._tidy()
        except BaseException as error:
            if not self._all_wrote:
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """The others wait to hear that this process has written."""

        def failed() -> None:
            raise error

        with contextlib.suppress(BaseException):  # it is raised by whoever calls this
            self._on_all("written", failed)

    def _on_all(self, moment: str, work: Callable[[], None]) -> None:
        what = "save into its local directory"
        done_by_all(self._job, self._job.processes, f"{self._tag}/{moment}", work, what)
