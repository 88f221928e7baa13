"""A run: saves its steps, in all tiers.

What a call does to the steps is decided by ``history``, from a listing and this writer's trail; process 0
decides and changes the directory, and the others get its decision.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_core._devices.transfer import Staging
from ckpt_core._directory import MAX_STEP, check_step
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    GraceExceeded,
    is_visible,
)
from ckpt_core._lazy import jax
from ckpt_core._run import history
from ckpt_core._run.decision import LOOK_SECS, STORE_LOOK_SECS, SaveDecision, SaveNow
from ckpt_core._run.history import Changes, Identity, SaveRequest, Trail
from ckpt_core._run.in_flight import SaveSlot, refuse_if_running, wait_and_raise, wait_for_all
from ckpt_core._run.lease import Lease
from ckpt_core._run.policies import keep, when
from ckpt_core._run.preemption import Preemption
from ckpt_core._run.retention import Disk, SaveGuard
from ckpt_core._run.run_file import parse_run_file
from ckpt_core._run.steps import Following, RunSteps, facts_of
from ckpt_core._run.tiers import LocalTier, open_local
from ckpt_core._run.unread import UnreadValues
from ckpt_core._save import Links, RecordFields, Save, SaveJob, take_snapshot
from ckpt_core._saved import Checkpoint

Write = tuple[SaveSlot, Save, Callable[[], None]]
"""The save of one step to one tier: where it runs, and the work of its thread."""


class Run:
    """The steps of one run, as one writer or reader of them; all processes make the same calls."""

    def __init__(
        self,
        steps: RunSteps,
        save_policy: when.Decision,
        keep_policy: keep.KeepPolicy | None,
        *,
        local_directory: str | os.PathLike[str] | None,
        asynchronous: bool,
    ) -> None:
        options, processes = steps.options, steps.processes
        self.steps = steps
        self._asynchronous = asynchronous
        self.disk = Disk(steps, keep_policy, Lease(steps.directory, steps.backend))
        self.local: LocalTier | None = None
        if local_directory is not None:
            self.local = open_local(local_directory, steps)
        self._persistent = SaveSlot(steps.directory)
        local = [] if self.local is None else [self.local.in_flight]
        self.slots = [*local, self._persistent]  # for a save in flight, the local tier first
        persist = options.persist_policy
        listening = save_policy if persist is None else when.any_of(save_policy, persist)
        self.preemption = Preemption(processes, listening, options)
        # the opening counts as a look; several processes go by steps, and take up their pace from here
        first_look = time.monotonic() + (LOOK_SECS if steps.local else STORE_LOOK_SECS)
        due = first_look if processes.count == 1 else 10
        self._save_now = SaveNow(steps, self._persistent, due)
        asked = steps, self.preemption
        self.decision = SaveDecision(*asked, save_policy, self._save_now)
        self._persist_decision = None if persist is None else SaveDecision(*asked, persist)
        self.following = Following(steps)
        self.unread = UnreadValues()
        self.links = Links()
        self._stagings = [Staging(options.max_host_bytes) for _ in self.slots]
        self.closed = False
        # An RLock is implemented in C: a signal handler cannot interrupt its acquire or release.
        self.lock, self.doing = threading.RLock(), ""  # and the name of the call that holds it
        # Where this writer stands. What the threads of its saves find out is added at the next call.
        self.trail = Trail()
        self._outcomes: deque[Callable[[Trail], Trail]] = deque()
        self._persisted = ""  # token of the last save that the persistent directory got
        self.listed = False  # whether the caller has asked what is there
        if not steps.read_only:
            steps.on_first("open a run", self.disk.clean)

    def refuse_unless_open(self, call: str) -> None:
        """Raises CheckpointError if this Checkpointer is closed or must not write."""
        where = self.steps.directory
        if self.closed:
            raise CheckpointError(f"{where}: this Checkpointer was closed")
        if self.steps.read_only:
            raise CheckpointError(f"{where}: {call}() on a Checkpointer with read_only=True")

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
                return False
        self.unread.check_on_all(items, self.steps)
        if not force and not self.decision.wants(step, self.slots[0].running, self.latest):
            return False
        self.unread.watch_pipelines(items)
        numbers = {name: float(jax.device_get(one)) for name, one in fields.metrics.items()}
        fields = replace(fields, metrics=numbers)
        persists = self.local is None or force or self._wants_persistent(step)
        replaces = overwrite and (step in trail.own or step in running_steps)
        replaces = replaces or step in trail.uncertain or step in trail.damaged
        replaces_local = replaces and self.local is not None
        # a tier takes one save at a time; what is replaced, or failed in the first, must have ended in all of them
        untracked = running_steps[-1] not in (None, running_steps[0], *trail.own)
        in_all = persists or replaces_local or overwrite or untracked
        to_wait_for = self.slots if in_all else self.slots[:1]
        if self.steps.options.on_pending == "fail":
            refuse_if_running(to_wait_for, self.steps.round("look for a running save"))
        wait_and_raise(to_wait_for)
        request = SaveRequest(step, overwrite, force, not self.listed)
        changes = self._change_steps(request, replaces_local)
        persists = persists or changes.persistent_first
        # a local save may begin while a persistent one still reads its buffers
        staging = self._stagings[-1 if persists else 0]
        release = staging.lend((self.local is not None) + persists)
        self._start(items, fields, request, changes, persists, staging, release)
        return True

    def _wants_persistent(self, step: int) -> bool:
        """Whether this save also goes to the persistent directory; all processes must call it."""
        # After a stop signal the host and its local disk may be gone before the next run starts.
        last = self.preemption.wants(step) or self.preemption.will_stop
        last = last or self._save_now.step == step  # somebody wants to take it away
        asked = self._persist_decision
        if asked is None:
            return True
        return asked.wants(step, self._persistent.running, self.steps.latest) or last

    def _is_local_only(self, step: int) -> bool:
        """Whether a step that was saved is in no tier but the local one; all processes must call it."""
        if self.local is None:
            return False
        wait_and_raise(self.slots[-1:])  # it may be on its way
        return self.steps.on_first("look for a step", lambda: not self.steps.look().has(step))

    def _without_removed(self, trail: Trail, step: int) -> Trail:
        """The trail without its steps from a number on, if somebody removed them all. Several processes do not ask."""
        if self.steps.processes.count > 1 or self.disk.lease.is_of_another():
            return trail
        there, beyond = {*self.all()}, sorted(one for one in trail.own if one >= step)
        if there.isdisjoint(beyond):
            for one in reversed(beyond):
                self.trail = trail = history.deleted(trail, one, there)
        return trail

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
                if local is not None:
                    local.refuse_lost_run(self.latest)
            held = local.taken_steps if branches and local is not None else ()
            drawn = secrets.token_hex(8) if branches else ""
            return self.disk.make_room(trail, request, drawn, held, begins=begins)

        try:
            (base, *rest), run, lineage = self.steps.on_first("make room for a step", make_room)
        except BaseException:
            if local is not None:
                local.forget_uncounted()
            raise
        if lineage:
            if local is not None:
                local.delete(parse_run_file(run.encode(), self.steps.directory))
            self.trail = replace(trail, lineage=lineage, saves=0)
        return Changes(base and Identity(*base), *rest)

    def _start(
        self,
        items: Mapping[str, Any],
        fields: RecordFields,
        request: SaveRequest,
        changes: Changes,
        persists: bool,
        staging: Staging,
        release: Callable[[], None],
    ) -> None:
        """Takes the snapshot and starts to write it to each tier; if synchronous, blocks until committed."""
        self.trail = trail = replace(self.trail, saves=self.trail.saves + 1)
        identity = Identity(request.step, f"{trail.lineage}{trail.saves:016x}")
        tier = self.local
        if changes.detached:
            # it has left nothing: the next save looks at the steps again
            self.trail = replace(self.trail, lineage="")
        persistent: Save | None = None
        writes: list[Write] = []
        if tier is not None:
            writes.append(self._write_locally(tier, identity, fields, changes, release))
        if persists:
            writes.append(self._write_persistent(identity, fields, request, changes, release))
            persistent = writes[-1][1]
        saves = [save for _, save, _ in writes]
        if changes.persistent_first:
            writes.reverse()
        in_thread = self._asynchronous or tier is not None
        low = self._asynchronous and self.steps.options.background_priority == "low"
        try:
            # where local directories take every save, the caller does not wait for the other disk
            begins = persistent if tier is None else None
            take_snapshot(items, saves, staging.copy if in_thread else None, begins)
            self.decision.save_began(identity.step)
            if persists and self._persist_decision is not None:
                self._persist_decision.save_began(identity.step)
            before: SaveSlot | None = None
            for slot, save, work in writes:
                if in_thread:
                    slot.start(identity.step, save.job.target, work, before, low=low)
                    before = slot
                else:
                    work()
        except BaseException as error:
            if persistent is not None and persistent.undo():  # else its thread is running
                if tier is not None and isinstance(error, Exception):
                    wait_for_all([tier.in_flight])  # it comes before what failed
                self._outcomes.append(lambda trail: history.persistent_failed(trail, identity))
            if tier is not None and tier.in_flight.step != identity.step:  # it has not started
                saves[0].refuse(error)
            raise
        if not self._asynchronous:
            wait_and_raise(self.slots)

    def _write_locally(
        self,
        local: LocalTier,
        identity: Identity,
        fields: RecordFields,
        changes: Changes,
        release: Callable[[], None],
    ) -> Write:
        """Writes and commits the local copies of a step."""
        first = changes.persistent_first
        save, work = local.prepare(identity, changes.base, fields, replaced_first=first)

        def write() -> None:
            try:
                # until an overwrite is acknowledged, a restart finds the old value in each tier
                if first and self._persisted != identity.token:
                    text = f"step {identity.step} was not replaced in {self.steps.directory}"
                    save.give_up(CheckpointError(text))
                    return  # the other save raises the reason
                work()
            except BaseException:
                if identity.step not in local.complete:
                    self._outcomes.append(lambda trail: history.local_failed(trail, identity.step))
                raise
            finally:
                release()
            self._outcomes.append(lambda trail: history.saved(trail, identity, changes))

        return local.in_flight, save, write

    def _write_persistent(
        self,
        identity: Identity,
        fields: RecordFields,
        request: SaveRequest,
        changes: Changes,
        release: Callable[[], None],
    ) -> Write:
        """Writes and commits the persistent copy of a step, then applies retention."""
        (step, token), trail, steps = identity, self.trail, self.steps
        path = steps.new_path(step)
        if changes.replaces:  # it may have another name
            path = steps.on_first("find a step", lambda: steps.path(step))
        save = Save(
            SaveJob(
                path,
                steps.local,
                steps.backend,
                fields,
                steps.options,
                steps.processes,
                overwrite=changes.replaces,
                step=step,
                guard=SaveGuard(self.disk, trail, request, changes, token, path),
                links=self.links,
                token=token,
                parent=changes.base,
            )
        )

        def write() -> None:
            try:
                save.run()
                if not save.committed:
                    return  # it was undone before
                self._persisted = token
            except BaseException as error:
                if is_visible(error):
                    self._outcomes.append(lambda now: history.saved(now, identity, changes, False))
                else:
                    self._outcomes.append(lambda now: history.persistent_failed(now, identity))
                raise
            finally:
                release()
            self._outcomes.append(lambda now: history.saved(now, identity, changes))
            if steps.processes.index == 0:
                if self._save_now.granted:
                    self._save_now.committed(step)
                self.disk.committed(history.saved(trail, identity, changes), step, changes)

        return self._persistent, save, write

    def local_steps(self) -> Mapping[int, str]:
        """The complete local steps, as a reader sees them now, with the tokens of their saves."""
        if self.local is None:
            return {}
        self.local.refresh()
        return self.local.complete

    def all(self) -> list[int]:
        """Every step that is complete in at least one tier, ascending."""
        return sorted({*self.local_steps(), *self.steps.all()})

    def refuse_unread(self, step: int) -> None:
        """Raises why a step that is in no other place cannot be read from the local directories, if something is known."""
        local = self.local
        if local and step not in local.complete and not self.steps.look().has(step):
            local.refuse_unread(step)

    def latest(self) -> int | None:
        """The newest step that is complete in at least one tier, or None."""
        local, newest = self.local_steps(), self.steps.latest()
        return max([*local, *(() if newest is None else (newest,))], default=None)

    def facts(self) -> list[keep.StepFacts]:
        """The metrics of every step that is neither damaged nor gone; OSError or NewerFormat if one cannot be read now."""
        local = self.local_steps()
        if self.local is not None:
            for step in {*self.local.taken_steps, MAX_STEP}:
                self.refuse_unread(step)
        listing = self.steps.look()
        every = (self.steps.facts(step, listing) for step in listing.committed())
        found = {one.step: one for one in every if one is not None}
        for step in sorted(local):
            with contextlib.suppress(CheckpointCorrupt, CheckpointNotFound):
                found[step] = facts_of(step, self.open(step))
        return [found[step] for step in sorted(found)]

    def open(self, step: int) -> Checkpoint:
        """Opens a step: its persistent copy, unless the local one is a newer save. CheckpointNotFound lists both tiers."""
        step, local = check_step(step), self.local_steps()
        if self.local is None or step not in local:
            try:
                return self.steps.open(step, beside=local)
            except CheckpointNotFound:
                if self.local is not None:
                    self.local.refuse_unread(step)
                raise
        listing = self.steps.look()
        token = listing.token(step)
        if token != local[step] and not self.local.is_older(step, token):
            return self.local.opening(step)()
        return self.steps.open(step, listing)

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
        return "read only" if self.steps.read_only else "open"
