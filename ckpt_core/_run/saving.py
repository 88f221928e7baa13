"""Saves one step to the tiers that take it: one snapshot per tier, written one after the other."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_core._devices.staging import Copy, Staging
from ckpt_core._errors import is_visible
from ckpt_core._run.branch import Branch
from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.in_flight import InFlight, settle_all
from ckpt_core._run.tiers import LocalTier, StepToSave
from ckpt_core._save import Links, PreparedSave, prepare_save, save_job


class Saving:
    """The saves of one Checkpointer: at most one runs per tier.

    Args:
        run: directory of the run.
        saves: list to which this adds one entry per tier; the local tier comes first.
        branch: checks that this writer still owns the directory.
        asynchronous: write in a background thread.

    Attributes:
        in_flight: the save of the persistent directory.
        links: files of the last step that the next one may hard-link.
        unsure: steps whose save failed after the commit became visible, so they may not be durable.
    """

    def __init__(
        self,
        run: RunDirectory,
        saves: list[InFlight],
        branch: Branch,
        asynchronous: bool,
    ) -> None:
        self._steps = run.steps
        self._saves = saves
        self._branch = branch
        self._processes = run.processes
        self._options = run.options
        self._asynchronous = asynchronous
        self._low = asynchronous and run.options.background_priority == "low"
        self._mine = run.mine
        self._damaged = run.damaged
        self._local: LocalTier | None = None
        self._staging = Staging(run.options.max_host_bytes)
        self._local_staging = Staging(run.options.max_host_bytes)
        self.in_flight = InFlight(run.path)
        self.links = Links()
        self.maybe_not_durable: set[int] = set()
        saves.append(self.in_flight)

    def set_local(self, local: LocalTier) -> None:
        """Adds a local tier, to which every step is saved first."""
        self._local = local
        self._saves.insert(0, local.in_flight)

    def make_way(self, persists: bool) -> None:
        """Waits for running saves in the tiers of the new one; raises if ``on_pending="fail"``."""
        before = self._saves if persists else self._saves[:1]
        if self._options.on_pending == "fail":
            for running in before:
                running.refuse_if_running()
        settle_all(before)

    def start(
        self, what: StepToSave, overwrite: bool, persists: bool, began: Callable[[], None]
    ) -> None:
        """Takes the snapshots and starts to write them; if synchronous, blocks until committed.

        Args:
            what: the step.
            overwrite: replace a step of this number.
            persists: also write to the persistent directory.
            began: called after the snapshots were taken, before writing starts.
        """
        local = None if self._local is None else self._prepare_local(what, self._local, persists)
        persistent: PreparedSave | None = None
        try:
            if persists:
                persistent = self._prepare_persistent(what, overwrite)
            began()
            first = None
            if self._local is not None and local is not None:
                first = self._local.in_flight
                first.start(what.step, local, low=self._low)
            if persistent is not None and (self._asynchronous or first is not None):
                self.in_flight.start(what.step, persistent.run, after=first, low=self._low)
            elif persistent is not None:
                persistent.run()
        except BaseException:
            if persistent is not None:
                persistent.undo()  # no effect if its thread is already running
            raise
        if not self._asynchronous:
            settle_all(self._saves)

    def _prepare_local(
        self, what: StepToSave, local: LocalTier, persists: bool
    ) -> Callable[[], None]:
        work = local.prepare(what, self._copying(self._local_staging))

        def save_and_note() -> None:
            try:
                work()
            finally:
                self._local_staging.release()
            self._damaged.discard(what.step)
            if not persists:
                self._mine.add(what.step)

        return save_and_note

    def _prepare_persistent(self, what: StepToSave, overwrite: bool) -> PreparedSave:
        step = what.step
        job = save_job(
            self._steps.path(step) if overwrite else self._steps.new_path(step),
            what.fields,
            self._options,
            overwrite=overwrite,
            step=step,
            copy=self._copying(self._staging),
            guard=self._branch.guard(step, overwrite, what.may_be_older),
            links=self.links,
            waits_for_disk=self._local is None,
        )
        return prepare_save(job, what.items, lambda write: self._save_and_retain(step, write))

    def _save_and_retain(self, step: int, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            if is_visible(error):
                self.maybe_not_durable.add(step)
            raise
        finally:
            self._staging.release()
        self._mine.add(step)
        self.maybe_not_durable.discard(step)
        self._damaged.discard(step)
        if self._processes.index == 0:
            self._branch.committed(step)

    def _copying(self, staging: Staging) -> Copy | None:
        """The copy function of the next snapshot; None if synchronous, which needs no copy.

        The previous save, which used the same buffers, has ended.
        """
        if staging.lent:
            staging.release()
        return staging.copy if self._asynchronous else None
