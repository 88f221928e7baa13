"""What process 0 does to the steps in the persistent directory: looks, decides by ``history``, and removes."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._operation import logger
from ckpt_core._run import history
from ckpt_core._run.history import Changes, Identity, Trail
from ckpt_core._run.lease import Guard, Lease
from ckpt_core._run.retention import DAMAGED, RETIRED, Retention
from ckpt_core._run.run_file import RUN_FILE, Removal
from ckpt_core._run.steps import Listing, RunDirectory

_READER_SECS = 30.0
"""Maximum time that a save waits for readers of a step that it has to move away."""


@dataclass(frozen=True)
class SaveRequest:
    """A save, as ``history.decide_changes`` is asked about it."""

    step: int
    overwrite: bool
    force: bool
    unlisted: bool = False  # the caller has asked for nothing that is there


class Disk:
    """The persistent directory of a run, which process 0 alone changes."""

    def __init__(self, directory: RunDirectory, retention: Retention, lease: Lease) -> None:
        self.lease = lease
        self._directory = directory
        self._steps = directory.steps
        self._retention = retention

    # ------------------------------------------------------------------------------------ save

    def make_room(
        self,
        trail: Trail,
        request: SaveRequest,
        lineage: str,
        local: Collection[int],
        *,
        begins: bool = False,
    ) -> tuple[Changes, str, str]:
        """Removes the steps that a save leaves behind; gives its changes, and of a new lineage the run file and that. ``lineage`` is
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
        run, moves = listing.run, self._directory.local
        if lineage and run.name:
            run = run.branch(lineage, history.lineage_bound(changes, request.step, trail))
        removals: list[Removal] = []
        for steps, into in ((changes.retire, RETIRED), (changes.set_aside, DAMAGED)):
            if steps:
                removals += self._retention.removals_of(steps, listing, into if moves else None)
        if removals or lineage:
            self.lease.check()
        if removals or run != listing.run:
            self._retention.remove(removals, listing.run, run, _READER_SECS)
        if changes.retire:
            self._log_retired(changes, listing)
        return changes, run.dump().decode() if lineage else "", lineage

    def changes(self, trail: Trail, request: SaveRequest, there: Collection[int]) -> Changes:
        """The changes of a save, given what is there; logs a step that is saved beside newer ones."""
        path = self._directory.path
        changes = history.decide_changes(
            trail,
            request.step,
            there,
            directory=path,
            overwrite=request.overwrite,
            force=request.force,
            moves=self._directory.local,
        )
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
                self._directory.path,
                step,
                older,
            )

    def look(self, wait_secs: float = 0.0) -> Listing:
        """The steps, after what a dead writer was removing is gone."""
        listing = self._steps.look()
        if not listing.run.removals:
            return listing
        if self.lease.claimed:
            self.lease.check()  # else it may be what a newer writer does now
        self._retention.finish(listing.run, wait_secs)
        return self._steps.look()

    def guard(
        self, trail: Trail, request: SaveRequest, changes: Changes, token: str, path: str
    ) -> Guard:
        """The guard of a persistent save to ``path``, asked before the save begins, when it looks at the steps, and right before
        its commit.
        """

        def move_same_step() -> None:
            """Moves away a step of this number that the previous writer committed meanwhile."""
            if not self._directory.backend.exists(path):
                return
            listing = self._steps.look()
            if listing.has(request.step):
                self.lease.check()  # it may be that of a newer writer
                removals = self._retention.removals_of([request.step], listing, RETIRED)
                self._retention.remove(removals, listing.run, listing.run, _READER_SECS)

        def withdraw_older() -> None:
            """Notes that no older save of this number in local directories counts, because until the commit the persistent
            copy does. Without a persistent copy an older local one is all that there is, and still counts.
            """
            run = self._steps.run_file()
            marked = run.overwritten(request.step, token)
            if run.name and marked != run and self._steps.has(request.step):
                self._directory.backend.put(self._directory.path, RUN_FILE, marked.dump())

        at_commit = withdraw_older if changes.replaces else None
        if self._directory.local and not changes.replaces:
            at_commit = move_same_step
        return Guard(
            self.lease,
            # beside newer steps, of which some may be local only, it leaves none
            at_begin=(lambda: self.make_room(trail, request, "", ()))
            if changes.truncates
            else None,
            at_commit=at_commit,
        )

    def committed(self, trail: Trail, step: int, changes: Changes) -> None:
        """After a commit, removes the steps that another writer committed meanwhile, then applies retention. If another
        writer has claimed the directory, it deletes nothing: the steps may be that writer's.
        """
        try:
            self.lease.check()
            listing = self.look()
            unknown = (
                [*filter(listing.has, {*listing.names} - trail.own)] if changes.truncates else []
            )
            foreign = history.committed_by_others(trail, step, unknown) if unknown else ()
            if foreign:
                into = RETIRED if self._directory.local else None
                removals = self._retention.removals_of(foreign, listing, into)
                self._retention.remove(removals, listing.run, listing.run)
                self._log_retired(Changes(Identity(step, ""), foreign), listing)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: nothing is deleted: %s", self._directory.path, error)
            return
        if self._retention.policy is None:
            return
        self._retention.apply(step, listing, {*foreign}, {*trail.damaged})

    def _log_retired(self, changes: Changes, listing: Listing) -> None:
        moved = [step for step in changes.retire if step in listing.names]
        if not moved:
            return
        path, moves = self._directory.path, self._directory.local
        logger.warning(
            "%s: training goes on from %s, of which %s no continuation: %s %s",
            path,
            "the beginning" if changes.base is None else f"step {changes.base.step}",
            f"step {moved[0]} is" if len(moved) == 1 else f"steps {str(moved)[1:-1]} are",
            "moved to" if moves else "deleted from",
            f"{path}/{RETIRED}" if moves else "the object store",
        )

    # ----------------------------------------------------------------------- delete, roll back

    def delete_step(self, step: int, local: Collection[int]) -> dict[str, Any]:
        """Deletes the persistent copies of a step; gives the run file, as ``run``. From then on no
        local copy counts, not even one of a host that is away.
        """
        if self.lease.claimed:
            self.lease.check()
        listing = self.look()
        if step not in local:
            self._steps.refuse_absent(step, local)
        removals = self._retention.removals_of(
            [step], listing, self._directory.options.trash_directory
        )
        self._retention.refuse_read(removals)
        run = listing.run
        if run.name:
            run = run.without(step)
            newer = listing.committed(other for other in listing.names if other >= step)
            newest = max({*newer, *local}, default=step) == step
            if newest and not self.lease.is_of_another():
                # Newer ones of a host that is away were continued from it. Where this is a tool beside a run that
                # goes on, what that run has saved since, or saves now, counts.
                run = run.branch(secrets.token_hex(8), step - 1)
        self._retention.remove(removals, listing.run, run)
        return {"run": run.dump().decode()}

    def delete_newer(self, step: int, local: Mapping[int, str]) -> dict[str, Any]:
        """Deletes the steps newer than ``step``; gives those, the newest that stays, and the run file. ``local`` has the
        tokens of the saves in local directories, by step.
        """
        self.lease.claim()  # a run that still trains from the newest step must not commit any more
        self.lease.check()
        listing = self.look()
        there = listing.committed()
        newer = [other for other in there if other > step]
        removals = self._retention.removals_of(
            newer, listing, self._directory.options.trash_directory
        )
        self._retention.refuse_read(removals)
        run = listing.run
        target = max((other for other in {*there, *local} if other <= step), default=None)
        token = None if target is None else local.get(target)
        if target is not None and (here := listing.directories(target)):
            found = self._steps.saved(here[0]).token
            if token is None or run.newer(target, found, than=token):
                token = found
        branch = run.branch(secrets.token_hex(8), step) if run.name else run
        if removals or branch != run:
            self._retention.remove(removals, run, branch)
        gone = {*newer, *(other for other in local if other > step)}
        if gone and target is None:
            logger.warning(
                "%s: rollback_to(%d) has deleted every step, for none is as old as that: training begins anew",
                self._directory.path,
                step,
            )
        place = None if target is None else [target, token]
        return {"gone": sorted(gone), "target": place, "run": branch.dump().decode()}
