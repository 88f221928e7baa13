"""Removes steps: those that no policy keeps, those that training leaves, and damaged ones that make room.

What is removed together is written down first, in one piece, so that a kill stands before or after.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_core._directory import is_locked, why_immovable
from ckpt_core._errors import CheckpointError
from ckpt_core._format.record import RECORD_FILE
from ckpt_core._operation import Event, logger, tell
from ckpt_core._run import history
from ckpt_core._run.history import Changes, Identity, SaveRequest, Trail
from ckpt_core._run.lease import Lease
from ckpt_core._run.policies import keep
from ckpt_core._run.run_file import RUN_FILE, Removal, RunFile
from ckpt_core._run.steps import Listing, RunSteps, unless_wanted

DAMAGED = "damaged"
"""Directory, next to the steps, for steps that could not be restored."""
RETIRED = "retired"
"""Directory for steps of a branch that training left, or of a run that was taken over."""
_PAUSE_SECS = 0.05
_READER_SECS = 30.0  # maximum time that a save waits for readers of a step that it has to move away


@dataclass
class Disk:
    """The steps in the persistent directory of a run, which process 0 alone changes, as ``history`` decides."""

    steps: RunSteps
    policy: keep.KeepPolicy | None  # None: all stay
    lease: Lease
    _unneeded_since: dict[int, float] = field(default_factory=dict[int, float])
    _known: dict[int, keep.StepFacts] = field(default_factory=dict[int, keep.StepFacts])
    _said_no_metric: bool = False

    def make_room(
        self,
        trail: Trail,
        request: SaveRequest,
        lineage: str,
        local: Collection[int],
        *,
        begins: bool = False,
    ) -> tuple[Changes, str, str]:
        """Removes what a save leaves behind; gives its changes, and of a new ``lineage`` the run file and that. It is
        empty if none is to begin; beside newer steps one begins only if ``begins``: none has yet.
        """
        listing = self.look(_READER_SECS)
        there = {*filter(listing.has, history.of_interest(trail, request.step, listing.names))}
        if local:
            there |= history.of_interest(trail, request.step, local)
        changes = self.changes(trail, request, there)
        known = trail.entries or trail.may_retire or request.force or request.overwrite
        if begins and request.unlisted and not known:
            self._warn_unlisted(request.step, listing)
        if changes.replaces and (request.force or listing.has(request.step)):
            changes = changes._replace(persistent_first=True)
        if changes.detached and not begins:
            lineage = ""
        run = listing.run
        if lineage and run.name:
            run = run.branch(lineage, history.lineage_bound(changes, request.step, trail))
        removals: list[Removal] = []
        for steps, into in ((changes.retire, RETIRED), (changes.set_aside, DAMAGED)):
            if steps:
                removals += self.removals_of(steps, listing, into if self.steps.local else None)
        if removals or lineage:
            self.lease.check()
        if removals or run != listing.run:
            self.remove(removals, listing, run, _READER_SECS)
        if changes.retire:
            self._log_retired(changes, listing)
        return changes, run.dump().decode() if lineage else "", lineage

    def changes(self, trail: Trail, request: SaveRequest, there: Collection[int]) -> Changes:
        """The changes of a save, given what is there; logs a step that is saved beside newer ones."""
        path = self.steps.directory
        changes = history.decide_changes(trail, request, there, path, self.steps.local)
        if changes.detached and (newer := sorted(other for other in there if other > request.step)):
            logger.warning(
                "%s: step %d is saved with force=True, and is older than %s: restore_latest goes on from "
                "the newest step, not from this one",
                path,
                request.step,
                ", ".join(map(str, newer[:5])),
            )
        return changes

    def _warn_unlisted(self, step: int, listing: Listing) -> None:
        older = max((one for one in listing.names if one < step and listing.has(one)), default=None)
        if older is not None:
            logger.warning(
                "%s: step %d is saved after step %d, of which this Checkpointer has restored nothing: if training goes on from "
                "there, call restore_latest() before the first save; if it begins anew, take another directory",
                self.steps.directory,
                step,
                older,
            )

    def look(self, wait_secs: float = 0.0) -> Listing:
        """The steps, after what a dead writer was removing is gone."""
        steps = self.steps
        listing = steps.look()
        if not (run := listing.run).removals:
            return listing
        self.lease.check_if_claimed()  # it may be what a newer writer does now
        found = (one for one in run.removals if steps.names.parse(one.name) == one.step)
        same = [one for one in found if steps.saved(one.name).token == one.token]
        self._remove_all(same, wait_secs)
        self._put(replace(run, removals=()))
        return steps.look()

    def committed(self, trail: Trail, step: int, changes: Changes) -> None:
        """After a commit, removes what another writer committed meanwhile, and what no policy keeps."""
        try:
            self.lease.check()
            listing = self.look()
            others = listing.names.keys() - trail.own if changes.truncates else ()
            unknown = [*filter(listing.has, others)]
            foreign = history.committed_by_others(trail, step, unknown) if unknown else ()
            if foreign:
                into = RETIRED if self.steps.local else None
                self.remove(self.removals_of(foreign, listing, into), listing)
                self._log_retired(Changes(Identity(step, ""), foreign), listing)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: nothing is deleted: %s", self.steps.directory, error)
            return
        if self.policy is not None:
            self._delete_unneeded(step, listing, {*foreign}, trail.damaged)

    def _log_retired(self, changes: Changes, listing: Listing) -> None:
        moved = [step for step in changes.retire if step in listing.names]
        if not moved:
            return
        path, moves = self.steps.directory, self.steps.local
        logger.warning(
            "%s: training goes on from %s, of which %s no continuation: %s %s",
            path,
            "the beginning" if changes.base is None else f"step {changes.base.step}",
            f"step {moved[0]} is" if len(moved) == 1 else f"steps {str(moved)[1:-1]} are",
            "moved to" if moves else "deleted from",
            f"{path}/{RETIRED}" if moves else "the object store",
        )

    def delete_step(self, step: int, local: Collection[int]) -> dict[str, Any]:
        """Deletes the persistent copies of a step, so that no local copy counts any more; gives the run file, as ``run``."""
        self.lease.check_if_claimed()
        listing = self.look()
        if step not in local:
            self.steps.refuse_absent(step, local)
        removals = self.removals_of([step], listing, self.steps.options.trash_directory)
        self.refuse_read(removals)
        run = listing.run
        if run.name:
            run = run.without(step)
            newer = any(other > step and listing.has(other) for other in listing.names)
            if not newer and max(local, default=step) <= step and not self.lease.is_of_another():
                # Newer ones of a host that is away were continued from it. Where this is a tool beside a run that
                # goes on, what that run has saved since, or saves now, counts.
                run = run.branch(secrets.token_hex(8), step - 1)
        self.remove(removals, listing, run)
        return {"run": run.dump().decode()}

    def delete_newer(self, step: int, local: Mapping[int, str]) -> dict[str, Any]:
        """Deletes the steps newer than ``step``; gives those, the newest that stays, and the run file."""
        self.lease.claim()  # a run that still trains from the newest step must not commit any more
        self.lease.check()
        listing = self.look()
        there = listing.committed()
        newer = [other for other in there if other > step]
        removals = self.removals_of(newer, listing, self.steps.options.trash_directory)
        self.refuse_read(removals)
        run = listing.run
        target = max((other for other in {*there, *local} if other <= step), default=None)
        token = None if target is None else local.get(target)
        found = None if target is None else listing.token(target)
        if target is not None and found is not None:
            token = found if token is None or run.newer(target, found, than=token) else token
        branch = run.branch(secrets.token_hex(8), step) if run.name else run
        if removals or branch != run:
            self.remove(removals, listing, branch)
        gone = {*newer, *(other for other in local if other > step)}
        if gone and target is None:
            logger.warning(
                "%s: rollback_to(%d) has deleted every step, for none is as old as that: training begins anew",
                self.steps.directory,
                step,
            )
        place = None if target is None else [target, token]
        return {"gone": sorted(gone), "target": place, "run": branch.dump().decode()}

    def _delete_unneeded(
        self, saved: int, listing: Listing, but: Set[int], damaged: Set[int]
    ) -> None:
        """Deletes what no policy has kept for ``delete_grace_secs``, except ``but``; only logs a failure."""
        self._known.pop(saved, None)
        steps = [step for step in listing.committed() if step not in but]
        if len(steps) < 2:
            return
        kept, now = self._kept(steps, listing, damaged), time.monotonic()
        before, grace_secs = self._unneeded_since, self.steps.options.delete_grace_secs
        since = {step: before.get(step, now) for step in steps if step not in kept}
        self._unneeded_since = {**since}
        for step in since:
            if now - since[step] < grace_secs:
                continue
            # the first name is the one that counts: it goes last, so that no older one counts in between
            for name in reversed(self._own(listing.directories(step))):
                path = f"{self.steps.directory}/{name}"
                try:
                    with unless_wanted(path, self.steps.local):
                        self._drop(Removal(name, step, "", self.steps.options.trash_directory))
                except BlockingIOError:
                    logger.info("%s is being read, or waited for, and stays for now", path)
                    break
                except (OSError, CheckpointError) as error:
                    logger.warning("could not delete %s: %s", path, error)
                    break

    def clean(self) -> None:
        """Removes the temporary directories that dead writers left of unfinished saves; on process 0 alone."""
        removed = self.steps.backend.clean(self.steps.directory)
        if removed:
            logger.info("%s: removed %d unfinished saves", self.steps.directory, len(removed))

    def removals_of(
        self, steps: Iterable[int], listing: Listing, into: str | None
    ) -> list[Removal]:
        """The steps of a listing among ``steps``, under every directory name that they have; ``into`` None deletes them."""
        saved, names = self.steps.saved, listing.directories
        return [Removal(name, one, saved(name).token, into) for one in steps for name in names(one)]

    def refuse_read(self, steps: Sequence[Removal]) -> None:
        """Raises CheckpointError if one of the steps is being read."""
        for one in steps:
            path = f"{self.steps.directory}/{one.name}"
            if self.steps.local and is_locked(f"{path}/{RECORD_FILE}"):
                raise CheckpointError(
                    f"{path} is being read, by this process or another: try again when that has ended"
                )

    def remove(
        self,
        steps: Sequence[Removal],
        listing: Listing,
        run: RunFile | None = None,
        wait_secs: float = 0.0,
    ) -> None:
        """Removes steps of a listing, and puts another run file ``run``: killed at any moment, all of that is done or
        nothing. A step that is still read after ``wait_secs`` raises CheckpointError; if others go with it, the next save
        removes it.
        """
        after = listing.run if run is None else run
        names = (name for one in steps for name in (one.name, one.into) if name)
        for path in (f"{self.steps.directory}/{name}" for name in names if self.steps.local):
            if why := why_immovable(path):  # another user's, who did not share it
                raise PermissionError(errno.EACCES, why, path)
        # so no step goes before one that continues it
        newest_first = tuple(sorted(steps, key=lambda one: -one.step))
        noted = after != listing.run or len(steps) > 1
        if noted:
            self._put(replace(after, removals=newest_first))
        self._remove_all(newest_first, wait_secs)
        if noted and steps:
            self._put(after)

    def _put(self, run: RunFile) -> None:
        self.lease.check_if_claimed()
        if run == RunFile():
            self.steps.backend.remove(self.steps.directory, RUN_FILE)
        else:
            self.steps.backend.put(self.steps.directory, RUN_FILE, run.dump())

    def _remove_all(self, steps: Iterable[Removal], wait_secs: float) -> None:
        deadline = time.monotonic() + wait_secs
        for one in steps:
            self.lease.check_if_claimed()
            while True:
                try:
                    self._drop(one)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise CheckpointError(
                            f"{self.steps.directory}/{one.name} must be moved away first, but it is being read: try again "
                            "when the read has ended"
                        ) from None
                    time.sleep(_PAUSE_SECS)
        self.lease.check_if_claimed()

    def _drop(self, removal: Removal) -> None:
        """Removes one directory; BlockingIOError if it is being read."""
        path, step = f"{self.steps.directory}/{removal.name}", removal.step
        listener = self.steps.options.on_event
        event = Event(kind="deleted", path=self.steps.new_path(step), step=step)
        try:
            self.steps.backend.delete(path, removal.into)
        except FileNotFoundError:
            return  # whoever began to remove it was further than it seemed
        except (OSError, CheckpointError) as error:
            if not isinstance(error, BlockingIOError):
                tell(replace(event, kind="delete_failed", error=error), listener)
            raise
        self._unneeded_since.pop(step, None)
        self._known.pop(step, None)
        if removal.into == DAMAGED:
            logger.warning("%s is damaged, and was moved to %s", path, DAMAGED)
        elif removal.into != RETIRED:
            logger.info("deleted %s", path)
        tell(event, listener)

    def explain(self, damaged: Set[int]) -> dict[int, str]:
        """For every step whether it stays, and why."""
        self._known.clear()  # another process may have written steps since
        listing = self.steps.look()
        steps = listing.committed()
        kept = self._kept(steps, listing, damaged)
        return {
            step: f"kept: {kept[step]}" if step in kept else "deleted: no policy keeps it"
            for step in steps
        }

    def _facts(self, step: int, listing: Listing) -> keep.StepFacts | None:
        """The policy's input for a step; cached, since thousands of steps may stay."""
        if step not in self._known:
            with contextlib.suppress(CheckpointError, OSError):  # what cannot be read stays
                if (facts := self.steps.facts(step, listing)) is not None:
                    self._known[step] = facts
        return self._known.get(step)

    def _kept(self, steps: list[int], listing: Listing, damaged: Set[int]) -> dict[int, str]:
        # A damaged step must not count as one of the ``max_to_keep``: no run can resume from it.
        others = {step for step in steps if not self._own(listing.names[step])}
        whole = [step for step in steps if step not in damaged and step not in others]
        facts = {step: self._facts(step, listing) for step in whole}
        known = [entry for entry in facts.values() if entry is not None]
        kept = (self.policy or keep.all())(known)
        if self.policy is not None and self.policy.ranks_by:
            self._keep_unranked(self.policy, known, kept)
        for step, entry in facts.items():
            if entry is None:
                kept.setdefault(step, "its record cannot be read, so it is never deleted")
        for step in others:
            name = listing.names[step][0]
            kept[step] = f"{name} has another prefix than this run's steps, so no policy deletes it"
        for step in damaged & set(steps):
            kept[step] = "it is damaged, so it is never deleted"
        if known:
            # The newest intact step always stays: a run resumes from it.
            kept.setdefault(known[-1].step, "the newest step")
        return kept

    def _own(self, names: Iterable[str]) -> list[str]:
        """Of the directories of a step those whose prefix this run's steps have, or none: no policy deletes others."""
        other = self.steps.names.is_of_another_series
        return [name for name in names if not other(name)]

    def _keep_unranked(
        self, policy: keep.KeepPolicy, known: Sequence[keep.StepFacts], kept: dict[int, str]
    ) -> None:
        """Keeps steps that only their rank could delete, and that have none; warns once of a metric that no step has."""
        ranks_by, found = policy.ranks_by, {name for facts in known for name in facts.metrics}
        for facts in known:
            if policy.ranks_only and not ranks_by & facts.metrics.keys():
                why = f"it has no metric {_named(ranks_by)}, so it has no rank"
                kept.setdefault(facts.step, why)
        said, absent = "", ranks_by - found
        odd = [one for one in known if one.metrics and not ranks_by & one.metrics.keys()]
        if absent and len(known) > 1:
            said = (
                f"no step has the metric {_named(absent)} by which steps are kept, so none is kept or deleted for it: pass it "
                f"to save(metrics=). The steps have {f'the metrics {_named(found)}' if found else 'no metrics'}"
            )
        elif odd and not absent:
            said = (
                f"step {odd[-1].step} has the metrics {_named(odd[-1].metrics)}, and not {_named(ranks_by)} by which steps are "
                "kept, so it has no rank, and is not deleted for one: pass it to save(metrics=)"
            )
        if said and not self._said_no_metric:
            self._said_no_metric = True
            logger.warning("%s: %s. This is said once", self.steps.directory, said)


def _named(metrics: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(metrics)))


@dataclass(frozen=True)
class SaveGuard:
    """Asked before a step's persistent save to ``path`` looks at the steps, and before its commit; ``SaveJob.guard``."""

    disk: Disk
    trail: Trail
    request: SaveRequest
    changes: Changes
    token: str
    path: str

    def claim(self) -> None:
        self.disk.lease.claim()
        # beside newer steps, some of them perhaps local only, it leaves none
        if self.changes.truncates:
            self.disk.make_room(self.trail, self.request, "", ())

    def check(self) -> None:
        disk, steps, step = self.disk, self.disk.steps, self.request.step
        disk.lease.check()
        if self.changes.replaces:
            # No older save of this number in local directories counts, because until the commit the persistent copy does.
            # Without a persistent copy an older local one is all that there is, and still counts.
            run = steps.run_file()
            marked = run.overwritten(step, self.token)
            if run.name and marked != run and steps.look().has(step):
                steps.backend.put(steps.directory, RUN_FILE, marked.dump())
        elif steps.local and steps.backend.exists(self.path):
            listing = steps.look()
            if listing.has(step):  # the previous writer committed it meanwhile
                disk.lease.check()  # or a newer one
                disk.remove(
                    disk.removals_of([step], listing, RETIRED), listing, wait_secs=_READER_SECS
                )
