"""What process 0 does to the steps in the persistent directory: looks, decides by ``history``, and removes."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._operation import logger
from ckpt_core._run import history
from ckpt_core._run.history import Changes, Identity, SaveRequest, Trail
from ckpt_core._run.lease import Lease
from ckpt_core._run.retention import DAMAGED, RETIRED, Retention
from ckpt_core._run.run_file import RUN_FILE, Removal
from ckpt_core._run.steps import Listing, RunDirectory

_READER_SECS = 30.0
"""Maximum time that a save waits for readers of a step that it has to move away."""


@dataclass(frozen=True)
class Disk:
    """The persistent directory of a run, which process 0 alone changes."""

    directory: RunDirectory
    retention: Retention
    lease: Lease

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
        run, moves = listing.run, self.directory.local
        if lineage and run.name:
            run = run.branch(lineage, history.lineage_bound(changes, request.step, trail))
        removals: list[Removal] = []
        for steps, into in ((changes.retire, RETIRED), (changes.set_aside, DAMAGED)):
            if steps:
                removals += self.retention.removals_of(steps, listing, into if moves else None)
        if removals or lineage:
            self.lease.check()
        if removals or run != listing.run:
            self.retention.remove(removals, listing.run, run, _READER_SECS)
        if changes.retire:
            self._log_retired(changes, listing)
        return changes, run.dump().decode() if lineage else "", lineage

    def changes(self, trail: Trail, request: SaveRequest, there: Collection[int]) -> Changes:
        """The changes of a save, given what is there; logs a step that is saved beside newer ones."""
        path = self.directory.path
        changes = history.decide_changes(trail, request, there, path, self.directory.local)
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
                self.directory.path,
                step,
                older,
            )

    def look(self, wait_secs: float = 0.0) -> Listing:
        """The steps, after what a dead writer was removing is gone."""
        listing = self.directory.steps.look()
        if not listing.run.removals:
            return listing
        if self.lease.claimed:
            self.lease.check()  # else it may be what a newer writer does now
        self.retention.finish(listing.run, wait_secs)
        return self.directory.steps.look()

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
                into = RETIRED if self.directory.local else None
                removals = self.retention.removals_of(foreign, listing, into)
                self.retention.remove(removals, listing.run, listing.run)
                self._log_retired(Changes(Identity(step, ""), foreign), listing)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: nothing is deleted: %s", self.directory.path, error)
            return
        if self.retention.policy is None:
            return
        self.retention.apply(step, listing, {*foreign}, trail.damaged)

    def _log_retired(self, changes: Changes, listing: Listing) -> None:
        moved = [step for step in changes.retire if step in listing.names]
        if not moved:
            return
        path, moves = self.directory.path, self.directory.local
        logger.warning(
            "%s: training goes on from %s, of which %s no continuation: %s %s",
            path,
            "the beginning" if changes.base is None else f"step {changes.base.step}",
            f"step {moved[0]} is" if len(moved) == 1 else f"steps {str(moved)[1:-1]} are",
            "moved to" if moves else "deleted from",
            f"{path}/{RETIRED}" if moves else "the object store",
        )

    def delete_step(self, step: int, local: Collection[int]) -> dict[str, Any]:
        """Deletes the persistent copies of a step; gives the run file, as ``run``. From then on no
        local copy counts, not even one of a host that is away.
        """
        if self.lease.claimed:
            self.lease.check()
        listing = self.look()
        if step not in local:
            self.directory.steps.refuse_absent(step, local)
        removals = self.retention.removals_of(
            [step], listing, self.directory.options.trash_directory
        )
        self.retention.refuse_read(removals)
        run = listing.run
        if run.name:
            run = run.without(step)
            newer = listing.committed(other for other in listing.names if other >= step)
            newest = max({*newer, *local}, default=step) == step
            if newest and not self.lease.is_of_another():
                # Newer ones of a host that is away were continued from it. Where this is a tool beside a run that
                # goes on, what that run has saved since, or saves now, counts.
                run = run.branch(secrets.token_hex(8), step - 1)
        self.retention.remove(removals, listing.run, run)
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
        removals = self.retention.removals_of(
            newer, listing, self.directory.options.trash_directory
        )
        self.retention.refuse_read(removals)
        run = listing.run
        target = max((other for other in {*there, *local} if other <= step), default=None)
        token = None if target is None else local.get(target)
        if target is not None and (here := listing.directories(target)):
            found = self.directory.steps.saved(here[0]).token
            if token is None or run.newer(target, found, than=token):
                token = found
        branch = run.branch(secrets.token_hex(8), step) if run.name else run
        if removals or branch != run:
            self.retention.remove(removals, run, branch)
        gone = {*newer, *(other for other in local if other > step)}
        if gone and target is None:
            logger.warning(
                "%s: rollback_to(%d) has deleted every step, for none is as old as that: training begins anew",
                self.directory.path,
                step,
            )
        place = None if target is None else [target, token]
        return {"gone": sorted(gone), "target": place, "run": branch.dump().decode()}


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
        self.disk.lease.check()
        if self.changes.replaces:
            self._withdraw_older()
        elif self.disk.directory.local:
            self._move_same_step()

    def _withdraw_older(self) -> None:
        """Notes that no older save of this number in local directories counts, because until the commit the persistent copy
        does. Without a persistent copy an older local one is all that there is, and still counts.
        """
        directory = self.disk.directory
        run = directory.steps.run_file()
        marked = run.overwritten(self.request.step, self.token)
        if run.name and marked != run and directory.steps.has(self.request.step):
            directory.backend.put(directory.path, RUN_FILE, marked.dump())

    def _move_same_step(self) -> None:
        """Moves away a step of this number that the previous writer committed meanwhile."""
        if not self.disk.directory.backend.exists(self.path):
            return
        listing = self.disk.directory.steps.look()
        if listing.has(self.request.step):
            self.disk.lease.check()  # it may be that of a newer writer
            removals = self.disk.retention.removals_of([self.request.step], listing, RETIRED)
            self.disk.retention.remove(removals, listing.run, listing.run, _READER_SECS)
