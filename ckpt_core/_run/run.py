"""A run: saves, restores, deletes and rolls back its steps, in all tiers.

What a call does to the steps is decided by ``history``, from a listing and this writer's trail; process 0
decides and changes the directory, and the others get its decision.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_core import _adapters, _load
from ckpt_core._devices.transfer import Copy, Staging
from ckpt_core._directory import check_step
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, GraceExceeded, is_visible
from ckpt_core._operation import logger
from ckpt_core._results import RestoredStep
from ckpt_core._run import history
from ckpt_core._run.decision import LOOK_SECS, STORE_LOOK_SECS, SaveDecision, SaveNow
from ckpt_core._run.history import Changes, Identity, SaveRequest, Trail
from ckpt_core._run.in_flight import (
    SaveSlot,
    raise_failures,
    refuse_if_running,
    settle_all,
    wait_for_all,
)
from ckpt_core._run.lease import Lease
from ckpt_core._run.policies import keep, when
from ckpt_core._run.preemption import Preemption
from ckpt_core._run.retention import Disk, SaveGuard
from ckpt_core._run.run_file import parse_run_file
from ckpt_core._run.steps import Following, RunDirectory
from ckpt_core._run.tiers import LocalTier, StepToSave, Tiers, open_local
from ckpt_core._run.unread import UnreadValues
from ckpt_core._save import Links, RecordFields, Save, SaveJob, take_snapshot


class Run:
    """The steps of one run, as one writer or reader of them; all processes make the same calls."""

    def __init__(
        self,
        directory: RunDirectory,
        save_policy: when.Decision,
        keep_policy: keep.KeepPolicy | None,
        *,
        local_directory: str | os.PathLike[str] | None,
        asynchronous: bool,
    ) -> None:
        options, processes = directory.options, directory.processes
        self.directory = directory
        self._steps = directory.steps
        self._options = options
        self._processes = processes
        self._asynchronous = asynchronous
        self.disk = Disk(directory, keep_policy, Lease(directory.path, directory.backend))
        self.local: LocalTier | None = None
        if local_directory is not None:
            self.local = open_local(local_directory, directory)
        self.tiers = Tiers(directory, self.local)
        self._persistent = SaveSlot(directory.path)
        local = [] if self.local is None else [self.local.in_flight]
        self.slots = [*local, self._persistent]  # for a save in flight, the local tier first
        persist = options.persist_policy
        listening = save_policy if persist is None else when.any_of(save_policy, persist)
        self.preemption = Preemption(processes, listening, options)
        # the opening counts as a look; several processes go by steps, and take up their pace from here
        first_look = time.monotonic() + (LOOK_SECS if directory.local else STORE_LOOK_SECS)
        due = first_look if processes.count == 1 else 10
        self._save_now = SaveNow(directory, self._persistent, due)
        asked = processes, options.timeout_secs, self.preemption
        self.decision = SaveDecision(*asked, save_policy, self.tiers.latest, self._save_now)
        self._persist_decision = (
            None if persist is None else SaveDecision(*asked, persist, directory.steps.latest)
        )
        self.following = Following(directory)
        self._unread = UnreadValues()
        self._links = Links()
        self._stagings = [Staging(options.max_host_bytes) for _ in self.slots]
        self.closed = False
        # Where this writer stands. What the threads of its saves find out is added at the next call.
        self.trail = Trail()
        self._outcomes: deque[Callable[[Trail], Trail]] = deque()
        self._persisted = ""  # token of the last save that the persistent directory got
        self._said_repeated = self.listed = False
        if not directory.read_only:
            self.on_first("open a run", self.disk.clean)

    def refuse_unless_open(self, call: str) -> None:
        """Raises CheckpointError if this Checkpointer is closed or must not write."""
        where = self.directory.path
        if self.closed:
            raise CheckpointError(f"{where}: this Checkpointer was closed")
        if self.directory.read_only:
            raise CheckpointError(f"{where}: {call}() on a Checkpointer with read_only=True")

    def check_before_save(self, step: int) -> int:
        """The number of a step that is about to be saved; raises the error of the previous save."""
        self.refuse_unless_open("save")
        raise_failures(self.slots)
        self.preemption.step = step = check_step(step)
        return step

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        fields: RecordFields,
        *,
        force: bool,
        overwrite: bool,
    ) -> bool:
        """Starts to save a step if the policy wants it; whether it did."""
        running_steps = [one.step for one in self.slots]
        # after `running_steps`: a save that ends in between is in both
        trail = self.apply_outcomes()
        older = all(one is None or one < step for one in running_steps)
        if not overwrite and older and trail.repeats(step):
            trail = self._without_removed(trail, step)
        if not overwrite and (trail.repeats(step) or step in running_steps):
            newest = trail.head if running_steps[0] is None else running_steps[0]
            overwrite = force and step == newest and self._is_local_only(step)
            if not overwrite:
                self._say_repeated(step)
                return False
        self._unread.check_on_all(items, self._processes, self._options.timeout_secs)
        if not force and not self.decision.wants(step, self.slots[0].running):
            return False
        persists = self.local is None or force or self._wants_persistent(step)
        replaces = overwrite and (step in trail.own or step in running_steps)
        replaces = replaces or step in trail.uncertain or step in trail.damaged
        replaces_local = replaces and self.local is not None
        # a tier takes one save at a time; what is replaced, or failed in the first, must have ended in all of them
        untracked = running_steps[-1] not in (None, running_steps[0], *trail.own)
        in_all = persists or replaces_local or overwrite or untracked
        to_wait_for = self.slots if in_all else self.slots[:1]
        if self._options.on_pending == "fail":
            refuse_if_running(to_wait_for, self._processes, self._options.timeout_secs)
        settle_all(to_wait_for)
        request = SaveRequest(step, overwrite, force, not self.listed)
        changes = self._change_steps(request, replaces_local)
        self.trail = replace(self.trail, saves=self.trail.saves + 1)
        token = self.trail.token
        persists = persists or changes.persistent_first
        # a local save may begin while a persistent one still reads its buffers
        staging = self._stagings[-1 if persists else 0]
        release = staging.lend((self.local is not None) + persists)
        contents = StepToSave(step, items, fields, token, changes.base, release=release)
        if changes.detached:
            # it has left nothing: the next save looks at the steps again
            self.trail = replace(self.trail, lineage="")
        in_thread = self._asynchronous or self.local is not None
        self._start(contents, request, changes, persists, staging.copy if in_thread else None)
        return True

    def wants(self, step: int) -> bool:
        """Whether the policy wants this step; all processes must call it."""
        return not self.directory.read_only and self.decision.wants(step, self.slots[0].running)

    def _wants_persistent(self, step: int) -> bool:
        """Whether this save also goes to the persistent directory; all processes must call it."""
        # After a stop signal the host and its local disk may be gone before the next run starts.
        last = self.preemption.wants(step) or self.preemption.will_stop
        last = last or self._save_now.step == step  # somebody wants to take it away
        asked = self._persist_decision
        return (asked is None or asked.wants(step, self._persistent.running)) or last

    def _is_local_only(self, step: int) -> bool:
        """Whether a step that was saved is in no tier but the local one; all processes must call it."""
        if self.local is None:
            return False
        settle_all(self.slots[-1:])  # it may be on its way
        return self.on_first("look for a step", lambda: not self._steps.has(step))

    def _without_removed(self, trail: Trail, step: int) -> Trail:
        """The trail without its steps from a number on, if somebody removed them all. Several processes do not ask."""
        if self._processes.count > 1 or self.disk.lease.is_of_another():
            return trail
        there, beyond = {*self.tiers.all()}, sorted(one for one in trail.own if one >= step)
        if there.isdisjoint(beyond):
            for one in reversed(beyond):
                self.trail = trail = history.deleted(trail, one, there)
        return trail

    def _say_repeated(self, step: int) -> None:
        if not self._said_repeated:
            self._said_repeated = True
            logger.info(
                "%s: step %d was saved by this Checkpointer already: it is neither compared nor saved again "
                "(overwrite=True does that), and save() gives False. This is said once",
                self.directory.path,
                step,
            )

    def apply_outcomes(self) -> Trail:
        """The trail, with what the saves of earlier calls became."""
        while self._outcomes:  # an interrupt in between does the same twice, which changes nothing
            self.trail = self._outcomes[0](self.trail)
            self._outcomes.popleft()
        return self.trail

    def _change_steps(self, request: SaveRequest, replaces_local: bool) -> Changes:
        """The changes of this save, after the steps that it leaves are removed; all processes must call it."""
        trail = self.apply_outcomes()
        begins = not trail.lineage
        branches = begins or trail.branches_at(request.step)
        if not branches and not replaces_local:
            return self.disk.changes(trail, request, trail.own)
        local = self.local
        if begins and local is not None:
            local.claim()

        def make_room() -> tuple[Changes, str, str]:
            if begins:
                self.disk.lease.claim()
                self.tiers.refuse_lost_run()
            held = local.standing if branches and local is not None else ()
            drawn = secrets.token_hex(8) if branches else ""
            return self.disk.make_room(trail, request, drawn, held, begins=begins)

        try:
            (base, *rest), run, lineage = self.on_first("make room for a step", make_room)
        except BaseException:
            self.forget_stale_local()
            raise
        if lineage:
            if local is not None:
                local.delete(parse_run_file(run.encode(), self.directory.path))
            self.trail = replace(trail, lineage=lineage, saves=0)
        return Changes(base and Identity(*base), *rest)

    def on_first(self, call: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``, plain JSON values, which process 0 runs; if it fails, every process raises."""
        return self._processes.round(call, self._options.timeout_secs).first(work)

    def _start(
        self,
        contents: StepToSave,
        request: SaveRequest,
        changes: Changes,
        persists: bool,
        copy: Copy | None,
    ) -> None:
        """Takes the snapshot and starts to write it to each tier; if synchronous, blocks until committed."""
        tier = self.local
        persistent: Save | None = None
        writes: list[tuple[SaveSlot, Save, Callable[[], None]]] = []
        if tier is not None:
            writes.append((tier.in_flight, *self._prepare_local(tier, contents, changes)))
        if persists:
            persistent = self._prepare_persistent(contents, request, changes)
            write = functools.partial(self._write, contents, self.trail, changes, persistent)
            writes.append((self._persistent, persistent, write))
        saves = [save for _, save, _ in writes]
        if changes.persistent_first:
            writes.reverse()
        low = self._asynchronous and self._options.background_priority == "low"
        try:
            # where local directories take every save, the caller does not wait for the other disk
            take_snapshot(contents.items, saves, copy, persistent if tier is None else None)
            self.decision.save_began(contents.step)
            if persists and self._persist_decision is not None:
                self._persist_decision.save_began(contents.step)
            if self._asynchronous or tier is not None:
                before: SaveSlot | None = None
                for slot, save, work in writes:
                    slot.start(contents.step, save.job.target, work, before, low=low)
                    before = slot
            else:
                for _, _, work in writes:
                    work()
        except BaseException as error:
            if persistent is not None and persistent.undo():  # else its thread is running
                if tier is not None and isinstance(error, Exception):
                    wait_for_all([tier.in_flight])  # it comes before what failed
                identity = Identity(contents.step, contents.token)
                self._outcomes.append(lambda trail: history.persistent_failed(trail, identity))
            if tier is not None and tier.in_flight.step != contents.step:  # it has not started
                saves[0].refuse(error)
            raise
        if not self._asynchronous:
            settle_all(self.slots)

    def _prepare_local(
        self, local: LocalTier, contents: StepToSave, changes: Changes
    ) -> tuple[Save, Callable[[], None]]:
        """The local save, and what then writes it."""
        save, work = local.prepare(contents, replaced_first=changes.persistent_first)

        # what waits for the next call holds no arrays
        identity = Identity(contents.step, contents.token)

        def save_and_note() -> None:
            try:
                # until an overwrite is acknowledged, a restart finds the old value in each tier
                if changes.persistent_first and self._persisted != identity.token:
                    text = f"step {identity.step} was not replaced in {self.directory.path}"
                    save.give_up(CheckpointError(text))
                    return  # the other save raises the reason
                work()
            except BaseException:
                if contents.step not in local.complete:
                    self._outcomes.append(lambda trail: history.local_failed(trail, identity.step))
                raise
            finally:
                contents.release()
            self._outcomes.append(lambda trail: history.saved(trail, identity, changes))

        return save, save_and_note

    def _prepare_persistent(
        self, contents: StepToSave, request: SaveRequest, changes: Changes
    ) -> Save:
        trail, directory, path = self.trail, self.directory, self._steps.new_path(contents.step)
        if changes.replaces:  # it may have another name
            path = self.on_first("find a step", lambda: self._steps.path(contents.step))
        job = SaveJob(
            path,
            directory.local,
            directory.backend,
            contents.fields,
            self._options,
            self._processes,
            overwrite=changes.replaces,
            step=contents.step,
            guard=SaveGuard(self.disk, trail, request, changes, contents.token, path),
            links=self._links,
            token=contents.token,
            parent=contents.parent,
        )
        return Save(job)

    def _write(self, contents: StepToSave, trail: Trail, changes: Changes, save: Save) -> None:
        """Writes and commits the persistent copy of a step, then applies retention."""
        identity = Identity(contents.step, contents.token)
        try:
            save.run()
            if not save.committed:
                return  # it was undone before
            self._persisted = contents.token
        except BaseException as error:
            if is_visible(error):
                self._outcomes.append(lambda now: history.saved(now, identity, changes, False))
            else:
                self._outcomes.append(lambda now: history.persistent_failed(now, identity))
            raise
        finally:
            contents.release()
        self._outcomes.append(lambda trail: history.saved(trail, identity, changes))
        if self._processes.index == 0:
            if self._save_now.granted:
                self._save_now.committed(identity.step)
            self.disk.committed(history.saved(trail, identity, changes), identity.step, changes)

    def restore_latest(
        self, targets: Mapping[str, Any], request: _load.Request, strict_latest: bool
    ) -> RestoredStep | None:
        """Restores the newest intact step; None if there is no step."""
        self._begin_restore()

        def damaged(step: int) -> None:
            self.trail = replace(self.trail, damaged=self.trail.damaged | {step})

        restored = self.tiers.restore_newest(
            lambda step, local_first: self._restore(
                step, local_first, targets, request, by_number=False
            ),
            strict_latest,
            lambda: self.on_first("go through the steps", self.tiers.candidates),
            damaged,
        )
        if restored is None:
            # at the beginning, whatever it saved before
            self.trail = Trail(may_retire=True, root=-1)
            _adapters.notice(targets.values())
        return restored

    def restore(
        self, step: int, targets: Mapping[str, Any], request: _load.Request
    ) -> RestoredStep:
        """Restores one step."""
        step = check_step(step)
        self._begin_restore()
        local = self.local is not None and step in self.local.complete
        return self._restore(step, None if local else False, targets, request, by_number=True)

    def load(self, step: int, like: Any, item: str | None, arguments: dict[str, Any]) -> Any:
        """The saved tree of one step."""
        arguments.setdefault("options", self._options)
        request = _load.request_from("load", like, arguments)
        try:
            found = self.tiers.load(
                step, lambda opening: _load.load_checkpoint(opening, like, item, request, step)
            )
        except CheckpointCorrupt:
            self._links.forget()
            raise
        self._unread.took(step, item)
        return found

    def _restore(
        self,
        step: int,
        local_first: bool | None,
        targets: Mapping[str, Any],
        request: _load.Request,
        *,
        by_number: bool,
    ) -> RestoredStep:
        if local_first is None:
            call = f"find step {step}"
            local_first = bool(self.on_first(call, lambda: self.tiers.prefers_local(step)))
        try:
            restored, token = self.tiers.restore(
                step,
                local_first,
                lambda opening: _load.restore_checkpoint(opening, targets, request, step),
                by_number=by_number,
            )
        except BaseException as error:
            if isinstance(error, CheckpointCorrupt):
                self._links.forget()
            self._unread.failed(targets, error)
            raise
        self._unread.watch(restored, targets, request.matching.unexpected)
        self.trail = history.restored(self.trail, Identity(step, token))
        return restored

    def _begin_restore(self) -> None:
        """Claims the directories, unless read-only; then all processes list the local steps."""
        self.apply_outcomes()
        if not self.directory.read_only and self._processes.index == 0:
            self.disk.lease.try_to_claim()
        if self.local is not None:
            self.local.begin_restore()

    def forget_stale_local(self) -> None:
        """After a removal that failed or was interrupted: local steps that count no more are forgotten."""
        if self.local is None:
            return
        with contextlib.suppress(OSError, CheckpointError):
            self.local.forget(self._steps.run_file())

    def end(self) -> GraceExceeded | None:
        """Waits for running saves and releases the claims; returns an error if the grace period ran out."""
        self.closed = True
        self.following.end()
        late = wait_for_all(self.slots, self.preemption.secs_left)
        left_secs = self.preemption.secs_left()
        self.preemption.close()
        if not any(running.running for running in self.slots):
            self.disk.lease.release()
            if self.local is not None:
                self.local.close(left_secs)
        return late

    def state(self) -> str:
        """What is going on, for ``repr``."""
        if self.closed:
            return "closed"
        saving = [str(save.step) for save in self.slots if save.running]
        if saving:
            return f"saving step {saving[0]}"
        return "read only" if self.directory.read_only else "open"
