"""A run: saves, restores, deletes and rolls back its steps, in all tiers.

What a call does to the steps is decided by ``history``, from a listing and this writer's trail; process 0
decides and changes the directory, and the others get its decision.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckpt_core import _adapters, _load
from ckpt_core._devices.staging import Copy, Staging
from ckpt_core._directory.step_names import MAX_STEP, check_step
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    GraceExceeded,
    is_visible,
    raised_by_a_handler,
)
from ckpt_core._events import logger
from ckpt_core._processes import next_tag
from ckpt_core._results import Restored
from ckpt_core._run import history
from ckpt_core._run.decision import SaveDecision
from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.following import Following
from ckpt_core._run.history import Identity, Plan, Trail
from ckpt_core._run.in_flight import InFlight, raise_failures, settle_all, wait_for_all
from ckpt_core._run.lease import Guard, Lease
from ckpt_core._run.lineage import Left, Lineage, parse_lineage, token_of
from ckpt_core._run.newest import restore_newest
from ckpt_core._run.policies import keep, when
from ckpt_core._run.preemption import Preemption
from ckpt_core._run.retention import DAMAGED, RETIRED, Retention
from ckpt_core._run.steps import Listing
from ckpt_core._run.tiers import LocalTier, StepToSave, Tiers, find_run, read_run
from ckpt_core._run.unread import UnreadValues
from ckpt_core._save import Links, PreparedSave, RecordFields, prepare_save, save_job

_READER_SECS = 30.0
"""Maximum time that a save waits for readers of a step that it has to move away."""


@dataclass(frozen=True)
class _Call:
    """A save as ``history.plan_save`` is asked about it."""

    step: int
    overwrite: bool
    force: bool


class Run:
    """The steps of one run, as one writer or reader of them; all processes make the same calls.

    Args:
        directory: of the run.
        save_policy: which steps to save.
        keep_policy: which steps to keep; None for all.
        local_root: directory of the local tier; None for no such tier.
        asynchronous: write in a background thread.

    Attributes:
        directory: of the run.
        tiers: the steps, local and persistent.
        saves: the save in flight of each tier; the local tier is first.
        preemption: whether the run was told to stop.
        closed: whether ``end`` was called.
    """

    def __init__(
        self,
        directory: RunDirectory,
        save_policy: when.Decision,
        keep_policy: keep.KeepPolicy | None,
        *,
        local_root: str | None,
        asynchronous: bool,
    ) -> None:
        options, processes = directory.options, directory.processes
        self.directory = directory
        self._steps = directory.steps
        self._options = options
        self._processes = processes
        self._asynchronous = asynchronous
        self._lease = Lease(directory.path, directory.backend)
        self._retention = Retention(directory, keep_policy)
        self._local: LocalTier | None = None
        if local_root is not None:
            run, leaving = find_run(directory, make=not directory.read_only)
            self._local = LocalTier(local_root, run, leaving, directory)
        self.tiers = Tiers(directory.steps, self._local)
        self._persistent = InFlight(directory.path)
        local = [] if self._local is None else [self._local.in_flight]
        self.saves = [*local, self._persistent]
        persist = options.persist_policy
        listening = save_policy if persist is None else when.any_of(save_policy, persist)
        self.preemption = Preemption(processes, listening, options)

        def deciding(policy: when.Decision, newest: Callable[[], int | None]) -> SaveDecision:
            return SaveDecision(policy, processes, self.preemption, newest, options.timeout_secs)

        self._decision = deciding(save_policy, self.tiers.latest)
        self._persists = None if persist is None else deciding(persist, directory.steps.latest)
        self._following = Following(directory.steps, directory.local)
        self._unread = UnreadValues()
        self._links = Links()
        self._stagings = [Staging(options.max_host_bytes) for _ in self.saves]
        self.closed = False
        # Where this writer stands. What the threads of its saves find out is added at the next call.
        self._trail = Trail()
        self._outcomes: deque[Callable[[Trail], Trail]] = deque()
        self._lineage = ""  # of its saves; empty until it has begun to save from where it stands
        self._count = 0  # saves of the lineage
        self._said_repeated = False
        if not directory.read_only and processes.index == 0:
            self._retention.clean()

    # ------------------------------------------------------------------------------------ save

    def refuse_unless_open(self, call: str) -> None:
        """Raises CheckpointError if this Checkpointer is closed or must not write."""
        if self.closed:
            raise CheckpointError(f"{self.directory.path}: this Checkpointer was closed")
        if self.directory.read_only:
            raise CheckpointError(
                f"{self.directory.path}: {call}() on a Checkpointer with read_only=True"
            )

    def step_to_save(self, step: int) -> int:
        """The number of a step that is about to be saved; raises the error of the previous save."""
        self.refuse_unless_open("save")
        raise_failures(self.saves)
        self.preemption.note_step(step := check_step(step))
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
        trail = self._caught_up()
        if not overwrite and (trail.repeats(step) or step in {one.step for one in self.saves}):
            self._say_repeated(step)
            return False
        self._unread.check(items)
        if not force and not self.wants(step):
            return False
        persists = self._local is None or force or self._wants_persistent(step)
        self._wait_for_tiers(persists)
        call = _Call(step, overwrite, force)
        plan = self._plan(call, persists)
        base = plan.base
        what = StepToSave(step, items, fields, self._next_token(), base and (base.step, base.token))
        if plan.beside and not self._trail.leads:
            self._lineage = ""  # it has begun nothing: the next save looks at the steps again
        self._start(what, call, plan, persists)
        return True

    def wants(self, step: int) -> bool:
        """Whether the policy wants this step; all processes must call it."""
        running = self.saves[0].running
        return not self.directory.read_only and self._decision.wants(step, running)

    def _wants_persistent(self, step: int) -> bool:
        """Whether this save also goes to the persistent directory; all processes must call it."""
        # After a stop signal the host and its local disk may be gone before the next run starts.
        last = self.preemption.wants(step) or self.preemption.will_stop
        asked = self._persists
        return (asked is None or asked.wants(step, self._persistent.running)) or last

    def _say_repeated(self, step: int) -> None:
        if not self._said_repeated:
            self._said_repeated = True
            logger.info(
                "%s: step %d was saved by this Checkpointer already: it is neither compared nor saved again "
                "(overwrite=True does that), and save() gives False. This is said once",
                self.directory.path,
                step,
            )

    def _wait_for_tiers(self, persists: bool) -> None:
        """Waits for running saves in the tiers of the new one; raises if ``on_pending="fail"``."""
        before = self.saves if persists else self.saves[:1]
        if self._options.on_pending == "fail":
            for running in before:
                running.refuse_if_running()
        settle_all(before)

    def _caught_up(self) -> Trail:
        """The trail, with what the saves of earlier calls became."""
        while self._outcomes:  # an interrupt in between does the same twice, which changes nothing
            self._trail = self._outcomes[0](self._trail)
            self._outcomes.popleft()
        return self._trail

    def _next_token(self) -> str:
        self._count += 1
        return token_of(self._lineage, self._count)

    # ---- what becomes of the steps on disk

    @property
    def _looks_later(self) -> bool:
        """A listing takes the time of a round trip, and where local directories take every save, the caller
        never waits for one: the thread that writes makes it (``_guard``)."""
        return self._local is not None or not self.directory.local

    def _plan(self, call: _Call, persists: bool) -> Plan:
        """What this save does to other steps, which has been done; all processes must call it."""
        trail = self._caught_up()
        begins = not self._lineage
        looks = begins or trail.turns_at(call.step)
        if not looks and not persists:
            return self._planned(trail, call, trail.own)
        if begins and self._local is not None:
            self._local.claim()
        said = self.directory.on_first(
            "make way for a step", lambda: self._make_way(trail, call, looks)
        )
        plan = _plan_from(said["plan"])
        if said["lineage"] is not None:
            if self._local is not None:
                self._local.leave(parse_lineage(said["run"].encode()))
            self._count, self._lineage = 0, said["lineage"]
        return plan

    def _make_way(self, trail: Trail, call: _Call, looks: bool) -> dict[str, Any]:
        """On process 0, on the caller's thread."""
        self._lease.take()
        if not looks and self._looks_later:
            return {"plan": asdict(self._planned(trail, call, trail.own)), "lineage": None}
        plan, lineage, run = self._clear(trail, call, begins=looks)
        return {"plan": asdict(plan), "lineage": lineage, "run": run.dump().decode()}

    def _clear(
        self, trail: Trail, call: _Call, *, begins: bool
    ) -> tuple[Plan, str | None, Lineage]:
        """On process 0: looks at the steps, and removes those that the save leaves behind.

        Args:
            trail: of this writer at the call.
            call: the save.
            begins: a lineage begins with it, unless one has, and it stands beneath newer steps; on the caller's thread.

        Returns:
            The plan, the lineage that begins or None, and the run from then on.
        """
        listing = self._listing(_READER_SECS)
        there = {*listing.committed(history.of_interest(trail, call.step, listing.names))}
        if self._local is not None and begins:
            there |= history.of_interest(trail, call.step, self._local.complete)
        plan = self._planned(trail, call, there)
        run, lineage = Lineage(), None
        if begins and not (self._lineage and plan.beside):
            lineage = secrets.token_hex(8)
            run, _ = read_run(self.directory)
            run = run.branch(lineage, last_of(plan, call.step, trail)) if run.name else run
        left = self._left(plan.retire, listing, RETIRED) + self._left(plan.aside, listing, DAMAGED)
        if left or lineage is not None:
            self._lease.check()
        if left or run.name:
            self._retention.leave(left, run if run.name else None, _READER_SECS)
        self._say_left(plan, listing)
        if plan.beside and begins:
            self._say_beside(call.step, there)
        return plan, lineage, run

    def _listing(self, wait_secs: float = 0.0) -> Listing:
        """On process 0 that writes: the steps, after what a dead writer was removing is gone."""
        listing = self._steps.look()
        if self._lease.taken and (listing.leaving.steps or listing.leaving.run):
            self._lease.check()  # else it may be what a newer writer does now
        return self._steps.look() if self._retention.finish(listing.leaving, wait_secs) else listing

    def _left(self, steps: Iterable[int], listing: Listing, into: str) -> list[Left]:
        return self._retention.left(steps, listing, into if self.directory.local else None)

    def _planned(self, trail: Trail, call: _Call, there: Iterable[int]) -> Plan:
        """The plan of a save."""
        return history.plan_save(
            trail,
            call.step,
            {*there},
            directory=self.directory.path,
            overwrite=call.overwrite,
            force=call.force,
            moves=self.directory.local,
        )

    def _say_beside(self, step: int, there: Iterable[int]) -> None:
        logger.warning(
            "%s: step %d is saved with force=True, and is older than %s: restore_latest goes on from "
            "the newest step, not from this one",
            self.directory.path,
            step,
            ", ".join(map(str, sorted(other for other in there if other > step)[:5])),
        )

    def _say_left(self, plan: Plan, listing: Listing) -> None:
        moved = [step for step in plan.retire if step in listing.names]
        if moved:
            logger.warning(
                "%s: training goes on from %s, of which %s no continuation: %s %s",
                self.directory.path,
                "the beginning" if plan.base is None else f"step {plan.base.step}",
                f"step {moved[0]} is" if len(moved) == 1 else f"steps {str(moved)[1:-1]} are",
                "moved to" if self.directory.local else "deleted from",
                f"{self.directory.path}/{RETIRED}" if self.directory.local else "the object store",
            )

    # ---- snapshot, write, commit

    def _start(self, what: StepToSave, call: _Call, plan: Plan, persists: bool) -> None:
        """Takes the snapshots and starts to write them; if synchronous, blocks until committed."""
        local = None if self._local is None else self._prepare_local(self._local, what, plan)
        persistent: PreparedSave | None = None
        low = self._asynchronous and self._options.background_priority == "low"
        try:
            if persists:
                persistent = self._prepare_persistent(what, call, plan)
            self._began(what.step, persists)
            first = None
            if self._local is not None and local is not None:
                first = self._local.in_flight
                first.start(what.step, local, low=low)
            if persistent is not None and (self._asynchronous or first is not None):
                self._persistent.start(what.step, persistent.run, after=first, low=low)
            elif persistent is not None:
                persistent.run()
        except BaseException:
            if persistent is not None:
                persistent.undo()  # no effect if its thread is already running
            raise
        if not self._asynchronous:
            settle_all(self.saves)

    def _began(self, step: int, persists: bool) -> None:
        self._decision.save_began(step)
        if persists and self._persists is not None:
            self._persists.save_began(step)

    def _prepare_local(self, local: LocalTier, what: StepToSave, plan: Plan) -> Callable[[], None]:
        staging, identity = self._stagings[0], Identity(what.step, what.token)
        work = local.prepare(what, self._copying(staging))

        def save_and_note() -> None:
            try:
                work()
            finally:
                staging.release()
            self._outcomes.append(lambda trail: history.saved(trail, identity, plan))

        return save_and_note

    def _prepare_persistent(self, what: StepToSave, call: _Call, plan: Plan) -> PreparedSave:
        trail = self._trail
        job = save_job(
            self._steps.path(what.step) if plan.replace else self._steps.new_path(what.step),
            what.fields,
            self._options,
            overwrite=plan.replace,
            step=what.step,
            copy=self._copying(self._stagings[-1]),
            guard=self._guard(trail, call, plan),
            links=self._links,
            waits_for_disk=self._local is None,
            token=what.token,
            parent=what.parent,
        )
        return prepare_save(job, what.items, lambda write: self._write(what, trail, plan, write))

    def _guard(self, trail: Trail, call: _Call, plan: Plan) -> Guard:
        """Asked on process 0 before the persistent save begins, and right before its commit.

        On a disk, a save that replaces nothing also moves away a step of its number that the previous writer
        committed meanwhile.
        """

        def move_same_step() -> None:
            listing = self._steps.look()
            if listing.has(call.step):
                self._lease.check()  # it may be that of a newer writer
                self._retention.leave(self._left([call.step], listing, RETIRED), None, _READER_SECS)

        moves = self.directory.local and not plan.replace
        looks = (
            self._looks_later and plan.cuts
        )  # beside newer steps, of which some may be local only, it leaves none
        return Guard(
            self._lease,
            at_begin=(lambda: self._clear(trail, call, begins=False)) if looks else None,
            at_commit=move_same_step if moves else None,
        )

    def _write(self, what: StepToSave, trail: Trail, plan: Plan, write: Callable[[], None]) -> None:
        """Writes and commits the persistent copy of a step, then applies retention."""
        identity = Identity(what.step, what.token)
        try:
            write()
        except BaseException as error:
            if is_visible(error):
                self._outcomes.append(lambda now: history.saved(now, identity, plan, False))
            else:
                self._outcomes.append(lambda now: history.doubted(now, identity))
            raise
        finally:
            self._stagings[-1].release()
        self._outcomes.append(lambda trail: history.saved(trail, identity, plan))
        if self._processes.index == 0:
            self._committed(history.saved(trail, identity, plan), identity.step)

    def _committed(self, trail: Trail, step: int) -> None:
        """After a commit, on process 0: moves newer strangers away, then applies retention.

        If another writer has claimed the directory, deletes nothing: the steps there may be that
        writer's.
        """
        try:
            self._lease.check()
            listing = self._listing()
            unknown = listing.committed({*listing.names} - trail.own)
            strangers = history.beyond(trail, step, unknown)
            if strangers:
                self._retention.leave(self._left(strangers, listing, RETIRED), None)
                self._say_left(Plan(Identity(step, ""), strangers), listing)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: nothing is deleted: %s", self.directory.path, error)
            return
        self._retention.apply(step, listing, {*strangers}, {*trail.damaged})

    def _copying(self, staging: Staging) -> Copy | None:
        """The copy function of the next snapshot; None if synchronous, which needs no copy.

        The previous save, which used the same buffers, has ended.
        """
        if staging.lent:
            staging.release()
        return staging.copy if self._asynchronous else None

    # --------------------------------------------------------------------------------- restore

    def restore_latest(
        self, targets: Mapping[str, Any], request: _load.Request, strict_latest: bool
    ) -> Restored | None:
        """Restores the newest intact step; None if there is no step."""
        self._begin_restore()

        def candidates() -> list[tuple[int, bool]]:
            found = self.directory.on_first("go through the steps", self.tiers.candidates)
            return [(step, local_first) for step, local_first in found]

        def damaged(step: int) -> None:
            self._trail = history.found_damaged(self._trail, Identity(step, ""))

        restored = restore_newest(
            self.directory.path,
            lambda step, local_first: self._restore(step, local_first, targets, request),
            strict_latest,
            candidates,
            damaged,
        )
        if restored is None:
            self._trail, self._lineage = history.found_nothing(), ""
            _adapters.notice(targets.values())
        return restored

    def restore(self, step: int, targets: Mapping[str, Any], request: _load.Request) -> Restored:
        """Restores one step."""
        step = check_step(step)
        self._begin_restore()
        local_first = False
        if self._local is not None and step in self._local.complete:
            local_first = self.directory.on_first(
                f"find step {step}", lambda: self.tiers.prefers_local(step)
            )
        return self._restore(step, local_first, targets, request)

    def load(self, step: int, like: Any, item: str | None, arguments: dict[str, Any]) -> Any:
        """The saved tree of one step."""
        arguments.setdefault("options", self._options)
        request = _load.request_from("load", like, arguments)
        with self._handing_no_damage_on():
            return _load.load_checkpoint(self.tiers.opening(step), like, item, request, step)

    def _restore(
        self, step: int, local_first: bool, targets: Mapping[str, Any], request: _load.Request
    ) -> Restored:
        with self._handing_no_damage_on():
            restored, token = self.tiers.restore(step, local_first, targets, request)
        self._unread.watch(restored, targets, request.rules.unexpected)
        self._trail = history.restored(self._trail, Identity(step, token))
        self._lineage = ""  # the next save begins from here
        return restored

    def _begin_restore(self) -> None:
        """Claims the directories, unless read-only; then all processes list the local steps."""
        self._caught_up()
        if not self.directory.read_only and self._processes.index == 0:
            try:
                self._lease.take()
                self._listing()
            except (OSError, CheckpointError) as error:
                if raised_by_a_handler(error) is not None:
                    raise
                logger.warning(
                    "%s could not be claimed, so a run that still saves there is not stopped: %s",
                    self.directory.path,
                    error,
                )
        if self._local is None:
            return
        self._local.follow(*find_run(self.directory, make=False))
        if not self.directory.read_only:
            self._local.claim()
        self._local.look()

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
        settle_all(self.saves)
        before = self._caught_up()
        self._agree_on_call(f"delete step {step}")
        local = self._local
        token = None if local is None else local.complete.get(step)

        def leave() -> str:
            if self._lease.taken:
                self._lease.check()
            listing = self._listing()
            if token is None:
                self._steps.refuse_absent(step)
            left = self._retention.left([step], listing, self._options.trash_directory)
            self._retention.refuse_read(left)
            run, _ = read_run(self.directory)
            held = () if local is None else local.complete
            newest = max({*listing.committed(n for n in listing.names if n >= step), *held})
            # the newest one must not come back from a host that is away
            branch = (
                run.branch(secrets.token_hex(8), step - 1) if run.name and newest == step else None
            )
            hidden = left if token is None else [*left, Left("", step, token, None)]
            self._retention.leave(hidden, branch, ends=token is None)
            return "" if branch is None else branch.dump().decode()

        with self._leaving(history.deleted(before, step), before):
            run = self.directory.on_first("delete a step", leave)
            if local is not None:
                local.leave(parse_lineage(run.encode()) if run else None, lambda n: n == step)
                if token is not None:
                    self.directory.on_first("end the deletion", self._end_leaving)

    def _end_leaving(self) -> None:
        self._retention.finish(self._steps.look().leaving)

    def rollback_to(self, step: int) -> list[int]:
        """Deletes every step newer than ``step``; returns them."""
        self.refuse_unless_open("rollback_to")
        step = check_step(step)
        settle_all(self.saves)
        before = self._caught_up()
        self._agree_on_call(f"roll back to step {step}")
        local = self._local
        if local is not None:
            local.claim()  # with the persistent one: claimed later, it might be that of a newer writer
        held: Mapping[int, str] = {} if local is None else local.complete

        def leave() -> dict[str, Any]:
            self._lease.take()  # a run that still trains from the newest step must not commit any more
            self._lease.check()
            listing = self._listing()
            there = listing.committed()
            newer = [other for other in there if other > step]
            left = self._retention.left(newer, listing, self._options.trash_directory)
            self._retention.refuse_read(left)
            run, _ = read_run(self.directory)
            run = run.branch(secrets.token_hex(8), step) if run.name else run
            target = max((other for other in {*there, *held} if other <= step), default=None)
            token = None if target is None else held.get(target)
            if target is not None and token is None:
                token = self._steps.token(listing.directories(target)[0])
            if left or run.name:
                self._retention.leave(left, run if run.name else None)
            gone = sorted({*newer, *(other for other in held if other > step)})
            return {"gone": gone, "target": target, "token": token, "run": run.dump().decode()}

        with self._leaving(history.rolled_back(before, step, None), before):
            said = self.directory.on_first("leave newer steps", leave)
            if said["target"] is not None:
                target = Identity(said["target"], said["token"])
                self._trail = history.rolled_back(before, step, target)
            if local is not None:
                local.leave(parse_lineage(said["run"].encode()), lambda other: other > step)
        return said["gone"]

    @contextlib.contextmanager
    def _leaving(self, after: Trail, before: Trail) -> Generator[None]:
        """The trail is ``after`` while steps are removed, and ``before`` again if none was."""
        # Already before the removal, as an interrupt may come at any moment. A step that is forgotten though
        # it exists makes way for the next save of its number; one that is gone and not forgotten would
        # never be saved again.
        leaving = (before.own - after.own) & {*self.tiers.all()}  # retention has taken others
        self._trail, self._lineage = after, ""
        self._decision.forget()
        try:
            yield
        except Exception:
            if leaving <= {*self.tiers.all()}:
                self._trail = before
            raise

    def _agree_on_call(self, call: str) -> None:
        """Blocks until every process has announced the same ``call``, such as "delete step 3".

        Raises:
            CheckpointError: a process announced another call; nothing was changed.
        """
        if self._processes.count > 1:
            limit_secs = self._options.timeout_secs
            self._processes.gather_decide(next_tag(), "", lambda _: "", limit_secs, call)

    # ----------------------------------------------------------------------------------- other

    def wait_for_new_step(self, after: int | None, timeout_secs: float | None) -> int | None:
        """The newest step in the persistent directory, once it is newer than ``after``; None at the timeout."""
        first = self._processes.index == 0
        following = self._following if first else Following(self._steps, locks=False)
        seen = following.wait(after, timeout_secs)
        return self.directory.on_first("wait for a new step", lambda: seen)

    def explain(self) -> dict[int, str]:
        """For every step in the persistent directory whether it stays, and why."""
        return self._retention.explain({*self._trail.damaged})

    def end(self, error: BaseException | None = None) -> GraceExceeded | None:
        """Waits for running saves and releases the claims; an error if the grace period ran out.

        Args:
            error: the exception by which the caller's ``with`` block was left.
        """
        self.closed = True
        self._following.end()
        late = wait_for_all(self.saves, self.preemption.secs_left)
        left_secs = self.preemption.secs_left()
        self.preemption.close()
        if error is not None and self._processes.count > 1:
            # The others may wait for this process in the next agreement: they are told that it left.
            self._processes.refuse(next_tag(), "leave the with block", error)
        if not any(running.running for running in self.saves):
            self._lease.release()
            if self._local is not None:
                self._local.close(left_secs)
        return late

    def state(self) -> str:
        """What is going on, for ``repr``."""
        if self.closed:
            return "closed"
        saving = [str(save.step) for save in self.saves if save.running]
        if saving:
            return f"saving step {saving[0]}"
        return "read only" if self.directory.read_only else "open"


def last_of(plan: Plan, step: int, trail: Trail) -> int:
    """The last step of earlier lineages that counts after a save."""
    if plan.beside or not plan.cuts:
        return MAX_STEP
    last = history.last_before(plan, step)
    # Found nothing to continue: what a host that is away still has is of another history.
    return min(last, trail.since) if plan.base is None and trail.since is not None else last


def _plan_from(value: dict[str, Any]) -> Plan:
    """A plan that came as JSON from process 0."""
    base = value["base"]
    return replace(
        Plan(**value),
        base=None
        if base is None
        else Identity(*(base.values() if isinstance(base, dict) else base)),
        retire=tuple(value["retire"]),
        aside=tuple(value["aside"]),
    )
