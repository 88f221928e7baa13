"""A run: saves, restores, deletes and rolls back its steps, in all tiers.

What a call does to the steps is decided by ``history``, from a listing and this writer's trail; process 0
decides and changes the directory, and the others get its decision.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

from ckpt_core import _adapters, _load
from ckpt_core._devices.staging import Copy, Staging
from ckpt_core._directory import check_step
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    GraceExceeded,
    agreed_kind,
    is_visible,
)
from ckpt_core._operation import logger
from ckpt_core._results import RestoredStep
from ckpt_core._run import history
from ckpt_core._run.decision import SaveDecision
from ckpt_core._run.disk import Disk, SaveRequest
from ckpt_core._run.history import Changes, Identity, Trail
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
from ckpt_core._run.retention import Retention
from ckpt_core._run.run_file import parse_run_file
from ckpt_core._run.steps import Following, RunDirectory
from ckpt_core._run.tiers import LocalTier, NotReplaced, StepToSave, Tiers, open_local
from ckpt_core._run.unread import UnreadValues
from ckpt_core._save import Links, RecordFields, Save, make_job, take_snapshot


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
        lease = Lease(directory.path, directory.backend)
        self._retention = Retention(directory, keep_policy, lease)
        self._disk = Disk(directory, self._retention, lease)
        self._local: LocalTier | None = None
        if local_directory is not None:
            self._local = open_local(local_directory, directory)
        self.tiers = Tiers(directory, self._local)
        self._persistent = SaveSlot(directory.path)
        local = [] if self._local is None else [self._local.in_flight]
        self.slots = [*local, self._persistent]  # for a save in flight, the local tier first
        persist = options.persist_policy
        listening = save_policy if persist is None else when.any_of(save_policy, persist)
        self.preemption = Preemption(processes, listening, options)

        def deciding(policy: when.Decision, newest: Callable[[], int | None]) -> SaveDecision:
            return SaveDecision(policy, processes, self.preemption, newest, options.timeout_secs)

        self._decision = deciding(save_policy, self.tiers.latest)
        self._persist_decision = (
            None if persist is None else deciding(persist, directory.steps.latest)
        )
        self.following = Following(directory)
        self._unread = UnreadValues()
        self._links = Links()
        self._stagings = [Staging(options.max_host_bytes) for _ in self.slots]
        self.closed = False
        # Where this writer stands. What the threads of its saves find out is added at the next call.
        self._trail = Trail()
        self._outcomes: deque[Callable[[Trail], Trail]] = deque()
        self._lineage = ""  # of its saves; empty until it has begun to save from where it stands
        self._count = 0  # saves of the lineage
        self._persisted = ""  # token of the last save that the persistent directory got
        self._said_repeated = self.listed = False
        if not directory.read_only:
            self.on_first("open a run", self._retention.clean)

    # ------------------------------------------------------------------------------------ save

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
        trail = self._apply_outcomes()
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
        if not force and not self._decision.wants(step, self.slots[0].running):
            return False
        persists = self._local is None or force or self._wants_persistent(step)
        replaces = overwrite and (step in trail.own or step in running_steps)
        replaces = replaces or step in trail.uncertain or step in trail.damaged
        replaces_local = replaces and self._local is not None
        # a tier takes one save at a time; what is replaced, or failed in the first, must have ended in all of them
        untracked = running_steps[-1] not in (None, running_steps[0], *trail.own)
        in_all = persists or replaces_local or overwrite or untracked
        to_wait_for = self.slots if in_all else self.slots[:1]
        if self._options.on_pending == "fail":
            refuse_if_running(to_wait_for, self._processes, self._options.timeout_secs)
        settle_all(to_wait_for)
        request = SaveRequest(step, overwrite, force, not self.listed)
        changes = self._change_steps(request, replaces_local)
        self._count += 1
        token = f"{self._lineage}{self._count:016x}"
        persists = persists or changes.persistent_first
        # a local save may begin while a persistent one still reads its buffers
        staging = self._stagings[-1 if persists else 0]
        release = staging.lend((self._local is not None) + persists)
        parent = changes.base and (changes.base.step, changes.base.token)
        contents = StepToSave(step, items, fields, token, parent, release=release)
        if changes.detached:
            self._lineage = ""  # it has left nothing: the next save looks at the steps again
        in_thread = self._asynchronous or self._local is not None
        self._start(contents, request, changes, persists, staging.copy if in_thread else None)
        return True

    def wants(self, step: int) -> bool:
        """Whether the policy wants this step; all processes must call it."""
        return not self.directory.read_only and self._decision.wants(step, self.slots[0].running)

    def _wants_persistent(self, step: int) -> bool:
        """Whether this save also goes to the persistent directory; all processes must call it."""
        # After a stop signal the host and its local disk may be gone before the next run starts.
        last = self.preemption.wants(step) or self.preemption.will_stop
        asked = self._persist_decision
        return (asked is None or asked.wants(step, self._persistent.running)) or last

    def _is_local_only(self, step: int) -> bool:
        """Whether a step that was saved is in no tier but the local one; all processes must call it."""
        if self._local is None:
            return False
        settle_all(self.slots[-1:])  # it may be on its way
        return self.on_first("look for a step", lambda: not self._steps.has(step))

    def _without_removed(self, trail: Trail, step: int) -> Trail:
        """The trail without its steps from a number on, if somebody removed them all. Several processes do not ask."""
        if self._processes.count > 1 or self._disk.lease.is_of_another():
            return trail
        there, beyond = {*self.tiers.all()}, sorted(one for one in trail.own if one >= step)
        if there.isdisjoint(beyond):
            for one in reversed(beyond):
                self._trail = trail = history.deleted(trail, one, there)
            self._lineage = ""
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

    def _apply_outcomes(self) -> Trail:
        """The trail, with what the saves of earlier calls became."""
        while self._outcomes:  # an interrupt in between does the same twice, which changes nothing
            self._trail = self._outcomes[0](self._trail)
            self._outcomes.popleft()
        return self._trail

    def _change_steps(self, request: SaveRequest, replaces_local: bool) -> Changes:
        """The changes of this save, after the steps that it leaves are removed; all processes must call it. ``replaces_local``: with local
        directories, it replaces an own step. A save that goes on looks at what is on disk when it begins to write.
        """
        trail = self._apply_outcomes()
        begins = not self._lineage
        branches = begins or trail.branches_at(request.step)
        if not branches and not replaces_local:
            return self._disk.changes(trail, request, trail.own)
        local = self._local
        if begins and local is not None:
            local.claim()

        def make_room() -> tuple[Changes, str, str]:
            if begins:
                self._disk.lease.claim()
                self.tiers.refuse_lost_run()
            held = local.standing if branches and local is not None else ()
            drawn = secrets.token_hex(8) if branches else ""
            return self._disk.make_room(trail, request, drawn, held, begins=begins)

        try:
            changes, run, lineage = self.on_first("make room for a step", make_room)
        except BaseException:
            self._forget_stale_local()
            raise
        if lineage:
            if local is not None:
                local.delete(parse_run_file(run.encode(), self.directory.path))
            self._count, self._lineage = 0, lineage
        return changes if isinstance(changes, Changes) else history.parse_changes(changes)

    def on_first(self, call: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``, plain JSON values, which process 0 runs; if it fails, every process raises. All must call
        it with the same ``call``, a text like "delete step 3", or they raise.
        """
        return self._processes.round(call, self._options.timeout_secs).first(work)

    # ---- snapshot, write, commit

    def _start(
        self,
        contents: StepToSave,
        request: SaveRequest,
        changes: Changes,
        persists: bool,
        copy: Copy | None,
    ) -> None:
        """Takes the snapshot and starts to write it to each tier; if synchronous, blocks until committed."""
        tier = self._local
        persistent: Save | None = None
        saves: list[Save] = []
        writes: list[tuple[SaveSlot, str, Callable[[], None], SaveSlot | None]] = []
        if tier is not None:
            save, work = self._prepare_local(tier, contents, changes)
            saves.append(save)
            writes.append((tier.in_flight, save.job.target, work, None))
        if persists:
            persistent = self._prepare_persistent(contents, request, changes)
            saves.append(persistent)
            # what replaces a step goes first, and the local save waits for it
            at = 0 if changes.persistent_first else len(writes)
            path, after = persistent.job.target, tier and tier.in_flight
            writes.insert(at, (self._persistent, path, persistent.run, after))
        low = self._asynchronous and self._options.background_priority == "low"
        try:
            # where local directories take every save, the caller does not wait for the other disk
            take_snapshot(contents.items, saves, copy, persistent if tier is None else None)
            self._decision.save_began(contents.step)
            if persists and self._persist_decision is not None:
                self._persist_decision.save_began(contents.step)
            if self._asynchronous or tier is not None:
                for in_flight, path, work, after in writes:
                    in_flight.start(contents.step, path, work, after, low=low)
            elif persistent is not None:
                persistent.run()
        except BaseException as error:
            if persistent is not None and persistent.undo():  # else its thread is running
                contents.decided.set()  # the local save may wait for it
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

        def replaced_first() -> None:
            contents.decided.wait()
            if self._persisted != contents.token:
                raise NotReplaced(f"step {contents.step} was not replaced in {self.directory.path}")

        # Until an overwrite is acknowledged a restart finds the old value, in each tier; then the new one.
        save, work = local.prepare(contents, replaced_first if changes.persistent_first else None)

        # what waits for the next call holds no arrays
        identity = Identity(contents.step, contents.token)

        def save_and_note() -> None:
            try:
                work()
            except NotReplaced:
                return  # the other save raises the reason
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
        trail, directory, path = self._trail, self.directory, self._steps.new_path(contents.step)
        if changes.replaces:  # it may have another name
            path = self.on_first("find a step", lambda: self._steps.path(contents.step))
        job = make_job(
            path,
            directory.local,
            directory.backend,
            self._processes,
            contents.fields,
            self._options,
            overwrite=changes.replaces,
            step=contents.step,
            guard=self._disk.guard(trail, request, changes, contents.token, path),
            links=self._links,
            token=contents.token,
            parent=contents.parent,
        )
        return Save(job, lambda write: self._write(contents, trail, changes, write))

    def _write(
        self, contents: StepToSave, trail: Trail, changes: Changes, write: Callable[[], None]
    ) -> None:
        """Writes and commits the persistent copy of a step, then applies retention."""
        identity = Identity(contents.step, contents.token)
        try:
            write()
            self._persisted = contents.token
        except BaseException as error:
            if is_visible(error):
                self._outcomes.append(lambda now: history.saved(now, identity, changes, False))
            else:
                self._outcomes.append(lambda now: history.persistent_failed(now, identity))
            raise
        finally:
            if changes.persistent_first:
                contents.decided.set()
            contents.release()
        self._outcomes.append(lambda trail: history.saved(trail, identity, changes))
        if self._processes.index == 0:
            self._disk.committed(history.saved(trail, identity, changes), identity.step, changes)

    # --------------------------------------------------------------------------------- restore

    def restore_latest(
        self, targets: Mapping[str, Any], request: _load.Request, strict_latest: bool
    ) -> RestoredStep | None:
        """Restores the newest intact step; None if there is no step."""
        self._begin_restore()

        def candidates() -> list[tuple[int, bool | None]]:
            found = self.on_first("go through the steps", self.tiers.candidates)
            return [(step, local_first) for step, local_first in found]

        def damaged(step: int) -> None:
            self._trail = history.found_damaged(self._trail, Identity(step, ""))

        restored = self.tiers.restore_newest(
            lambda step, local_first: self._restore(
                step, local_first, targets, request, by_number=False
            ),
            strict_latest,
            candidates,
            damaged,
        )
        if restored is None:
            self._trail, self._lineage = history.found_nothing(), ""
            _adapters.notice(targets.values())
        return restored

    def restore(
        self, step: int, targets: Mapping[str, Any], request: _load.Request
    ) -> RestoredStep:
        """Restores one step."""
        step = check_step(step)
        self._begin_restore()
        local = self._local is not None and step in self._local.complete
        return self._restore(step, None if local else False, targets, request, by_number=True)

    def load(self, step: int, like: Any, item: str | None, arguments: dict[str, Any]) -> Any:
        """The saved tree of one step."""
        arguments.setdefault("options", self._options)
        request = _load.request_from("load", like, arguments)
        with self._handing_no_damage_on():
            found = self.tiers.load(
                step, lambda opening: _load.load_checkpoint(opening, like, item, request, step)
            )
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
            asked = self.on_first(f"find step {step}", lambda: self.tiers.prefers_local(step))
            local_first = bool(asked)
        try:
            with self._handing_no_damage_on():
                restored, token = self.tiers.restore(
                    step, local_first, targets, request, by_number=by_number
                )
        except BaseException as error:
            self._unread.failed(targets, error)
            raise
        self._unread.watch(restored, targets, request.rules.unexpected)
        self._trail = history.restored(self._trail, Identity(step, token))
        self._lineage = ""  # the next save begins from here
        return restored

    def _begin_restore(self) -> None:
        """Claims the directories, unless read-only; then all processes list the local steps."""
        self._apply_outcomes()
        if not self.directory.read_only and self._processes.index == 0:
            self._disk.lease.try_to_claim()
        if self._local is not None:
            self._local.begin_restore()

    @contextlib.contextmanager
    def _handing_no_damage_on(self) -> Generator[None]:
        """After damage, the next save hard-links no earlier files: they may be the damaged ones."""
        try:
            yield
        except CheckpointCorrupt:
            self._links.forget()
            raise

    # --------------------------------------------------------------------- delete and roll back

    def delete(self, step: int) -> None:
        """Deletes a step in all tiers, after running saves."""
        self.refuse_unless_open("delete")
        step = check_step(step)

        def delete_it(held: Mapping[int, str]) -> dict[str, Any]:
            self.tiers.refuse_unread(step)
            return self._disk.delete_step(step, held)

        self._remove(
            f"delete step {step}",
            delete_it,
            functools.partial(operator.eq, step),
            lambda before, standing, _: history.deleted(before, step, standing),
        )

    def rollback_to(self, step: int) -> list[int]:
        """Deletes every step newer than ``step``; returns them."""
        self.refuse_unless_open("rollback_to")
        step = check_step(step)

        def after(before: Trail, _: set[int], said: Mapping[str, Any]) -> Trail:
            if not said:
                return history.rolled_back(before, step, None)
            number, token = said["target"] or (-1, "")
            target = Identity(number, token) if number >= 0 else None
            return history.rolled_back(before, number, target)

        newer = functools.partial(operator.lt, step)
        local = {*filter(newer, () if self._local is None else self._local.standing)}
        work = functools.partial(self._disk.delete_newer, step)
        said = self._remove(f"roll back to step {step}", work, newer, after, claims=True)
        return sorted({*said["gone"], *local})  # also those that could not be read

    def _remove(
        self,
        call: str,
        work: Callable[[Mapping[int, str]], dict[str, Any]],
        gone: Callable[[int], bool],
        after: Callable[[Trail, set[int], Mapping[str, Any]], Trail],
        *,
        claims: bool = False,
    ) -> dict[str, Any]:
        """What ``work`` gives, which removes persistent steps on process 0; then each process removes its local ones that are
        ``gone``. Nothing changes before all have announced the same ``call``. ``work`` gets the local steps with their
        tokens, and gives the run file, ``run``; ``after`` makes the new trail from the steps that were there and what
        ``work`` gave. With ``claims`` local directories are claimed first: later they might be a newer writer's.
        """
        settle_all(self.slots)
        before, lineage = self._apply_outcomes(), self._lineage
        together = self._processes.round(call, self._options.timeout_secs)
        there = together.decide("", lambda _: json.dumps(self.tiers.all()))
        local = self._local
        if claims and local is not None:
            local.claim()
        held = {} if local is None else local.complete
        # Already before the removal, as an interrupt may come at any moment. A step that is forgotten though
        # it exists makes way for the next save of its number; one that is gone and not forgotten would
        # never be saved again.
        standing = {*json.loads(there)}  # retention has taken others
        self._trail, self._lineage = after(before, standing, {}), ""
        removed = (before.own - self._trail.own) & standing
        self._decision.forget()
        try:
            said = together.first(lambda: work(held))
            self._trail = after(before, standing, said)
            if local is not None:
                local.delete(parse_run_file(said["run"].encode(), self.directory.path), gone)
        except BaseException as error:
            self._forget_stale_local()
            # only where all processes know of the failure, so that all go on from the same trail
            alone = self._processes.count == 1
            agree = isinstance(error, Exception) and (alone or agreed_kind(error))
            if agree and self.on_first("look for steps", lambda: self.tiers.have(removed)):
                self._trail = before
                if isinstance(error, CheckpointNotFound):  # before anything was changed
                    self._lineage = lineage
            raise
        return said

    def _forget_stale_local(self) -> None:
        """After a removal that failed or was interrupted: local steps that count no more are forgotten."""
        if self._local is None:
            return
        with contextlib.suppress(OSError, CheckpointError):
            self._local.forget(self._steps.run_file())

    # ----------------------------------------------------------------------------------- other

    def explain(self) -> dict[int, str]:
        """For every step in the persistent directory whether it stays, and why."""
        return self._retention.explain({*self._trail.damaged})

    def end(self) -> GraceExceeded | None:
        """Waits for running saves and releases the claims; returns an error if the grace period ran out."""
        self.closed = True
        self.following.end()
        late = wait_for_all(self.slots, self.preemption.secs_left)
        left_secs = self.preemption.secs_left()
        self.preemption.close()
        if not any(running.running for running in self.slots):
            self._disk.lease.release()
            if self._local is not None:
                self._local.close(left_secs)
        return late

    def state(self) -> str:
        """What is going on, for ``repr``."""
        if self.closed:
            return "closed"
        saving = [str(save.step) for save in self.slots if save.running]
        if saving:
            return f"saving step {saving[0]}"
        return "read only" if self.directory.read_only else "open"
