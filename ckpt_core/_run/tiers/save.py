"""Saves into local directories: each process writes the shards it holds, and all commit or none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_core._format.part import Part
from ckpt_core._format.versions import library_versions
from ckpt_core._processes import next_tag
from ckpt_core._run.lease import Lease
from ckpt_core._run.tiers.partners import judge_copies
from ckpt_core._save import RecordFields, SaveJob
from ckpt_core._save.agreement import agree_to_save, done_by_all
from ckpt_core._save.coverage import Shares, holding_of, share
from ckpt_core._save.prepare import PreparedItem, prepare_items
from ckpt_core._save.protocol import SaveEvents, aborting
from ckpt_core._save.write import Write

_CALL = "save into local directories"


@dataclass(frozen=True)
class StepToSave:
    """The items of one step and the fields of its record; see ``Checkpointer.save``.

    Attributes:
        token: of the save; in all tiers the same.
        parent: number and token of the step that it continues from, or None.
    """

    step: int
    items: Mapping[str, Any]
    fields: RecordFields
    token: str
    parent: tuple[int, str] | None = None


@dataclass(frozen=True)
class Saved:
    """What all processes agreed on in a save.

    Attributes:
        token: identifies the save.
        part: the part of this process; None if it is the only one.
        copies: whether the partners copy the step now.
        protected: step and token of which the partners have whole copies, or None.
    """

    token: str
    part: Part | None = None
    copies: bool = False
    protected: tuple[int, str] | None = None


def combine_offers(offers: Sequence[Any]) -> dict[str, Any]:
    """On process 0: the answer to what each process offered in agreement 1."""
    answer: dict[str, Any] = {"token": offers[0]["token"]}
    if len(offers) > 1:
        shares = share([offer["holding"] for offer in offers])
        answer |= {"groups": shares.groups, "states": shares.states, "alike": shares.alike}
        answer |= judge_copies([offer["copied"] for offer in offers])
    return answer


class LocalSave:
    """One save of all processes, each into its own directory: all commit, or none.

    The thread that calls ``save`` runs ``take_snapshot``, the background thread
    ``write_and_commit``. The processes agree three times: that they save the same; that all have
    made their files durable and still own their directories; and that all have committed.

    Args:
        job: the process-local checkpoint; an existing one at its target is replaced.
        lease: checks that this writer still owns the directory.
        committed: called after this process's commit, before the last agreement: every live process
            still holds its claim then.
        copied: what ``judge_copies`` is told of this process.

    Attributes:
        may_have_replaced: a process may have put the step in the place of an earlier save of its number.
    """

    def __init__(
        self,
        job: SaveJob,
        lease: Lease,
        committed: Callable[[Saved], None],
        copied: Callable[[], Any],
    ) -> None:
        self._job = job
        self._lease = lease
        self._committed = committed
        self._copied = copied
        self._events = SaveEvents(job.target, job.step, job.options)
        self._tag = next_tag()
        self._fields = RecordFields(job.fields.single)
        self._items: list[PreparedItem] = []
        self._refusal: Exception | None = None
        self._blocking_secs = 0.0
        self._all_wrote = False
        self.may_have_replaced = False

    def take_snapshot(self, items: Mapping[str, Any]) -> None:
        """Copies all that the caller may change later; an error is sent to the other processes."""
        self._events.happened("save_started")
        try:
            self._fields = self._job.fields.frozen()
            self._items, shared = prepare_items(items, self._job)
            self._fields = replace(self._fields, shared=shared)
        except Exception as error:
            if self._job.processes.count == 1:
                self._events.happened("save_failed", error=error)
                raise
            self._refusal = (
                error  # raised by write_and_commit, after it was sent to the processes that wait
            )
        except BaseException as error:  # interrupts: send to the others, and raise at once
            self._job.processes.refuse(self._tag, _CALL, error)
            raise
        self._blocking_secs = self._events.happened("snapshot_taken")

    def write_and_commit(self) -> Saved:
        """Blocks until all processes have committed; returns what they agreed on.

        If one process fails before the commits, all raise and nothing of the step remains.
        """
        with self._events.failing():
            saved = self._agree_to_start()
            activity = self._events.activity
            write = Write(self._job, self._fields, self._items, saved.token, self._tag, activity)
            write.snapshot_secs = self._blocking_secs
            write.part = saved.part
            self._on_all("committed", lambda: self._write(write, saved))
        self._events.committed(write.written_bytes, self._blocking_secs)
        return saved

    def _agree_to_start(self) -> Saved:
        """Agreement 1: all processes save the same; what they hold, and what is copied."""
        job = self._job
        offer: dict[str, Any] = {"token": job.token}
        if job.processes.count > 1 and self._refusal is None:
            try:
                self._items = [item.landed() for item in self._items]
                offer |= {"holding": holding_of(self._items).dump(), "copied": self._copied()}
            except Exception as error:
                self._refusal = error
        answer = self._agree(offer)
        if job.processes.count == 1:
            return Saved(answer["token"])
        shares = Shares(answer["groups"], answer["states"], answer["alike"])
        self._items = shares.with_states(self._items)
        protected = answer["protected"] and (answer["protected"][0], answer["protected"][1])
        part = shares.part(job.processes.index)
        return Saved(answer["token"], part, answer["copies"], protected)

    def _agree(self, offer: dict[str, Any]) -> dict[str, Any]:
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
            offer,
            self._refusal,
            job.options.timeout_secs,
            combine_offers,
        )

    def _write(self, write: Write, saved: Saved) -> None:
        """Writes and commits this process's part; agreement 2 is right before the commit."""
        job = self._job
        try:
            self._lease.take()
            attempt = job.backend.begin(
                job.target, overwrite=True, durable=job.options.durable, token=saved.token
            )
            with aborting(attempt.abort):
                write.write_own(attempt)
                write.make_durable(attempt)
                self._all_wrote = True
                self._on_all("written", self._lease.check)
                self.may_have_replaced = True
                attempt.commit()
            self._committed(saved)
        except BaseException as error:
            if not self._all_wrote:
                self._send_failure(error)
            raise

    def _send_failure(self, error: BaseException) -> None:
        """Reports an error in agreement 2, where the other processes wait for this one."""

        def failed() -> None:
            raise error

        with contextlib.suppress(BaseException):  # the caller raises the error itself
            self._on_all("written", failed)

    def _on_all(self, moment: str, work: Callable[[], None]) -> None:
        what = "save into its local directory"
        done_by_all(self._job, self._job.processes, f"{self._tag}/{moment}", work, what)
