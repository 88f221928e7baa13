"""The steps of a fast local tier and of the persistent directory, and from which one each is read.

A tier is a place where copies of a save lie. Each process keeps the newest steps in a directory of its own
(``LocalTier``); a background thread writes steps to the persistent directory. Only steps that are complete
across all processes are restored, from either tier, and of one number the newest save counts in both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from ckpt_core._directory import MAX_STEP, check_step
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._operation import logger
from ckpt_core._run.policies.keep import StepFacts
from ckpt_core._run.steps import Listing, RunSteps, facts_of
from ckpt_core._run.tiers.judge import Misfit
from ckpt_core._run.tiers.local import LocalTier, open_local
from ckpt_core._saved import Checkpoint


class Tiers:
    """The steps of a run in both tiers: in local directories, if there are any, and in the persistent one that all share."""

    def __init__(self, steps: RunSteps, local: LocalTier | None) -> None:
        self._persistent, self._local = steps, local

    def _local_steps(self) -> Mapping[int, str]:
        """The complete local steps, as a reader sees them now, with the tokens of their saves."""
        if self._local is None:
            return {}
        self._local.refresh()
        return self._local.complete

    def all(self) -> list[int]:
        """Every step that is complete in at least one tier, ascending."""
        return sorted({*self._local_steps(), *self._persistent.all()})

    def have(self, steps: Collection[int]) -> bool:
        """Whether all of these steps are there; False if that cannot be known."""
        with contextlib.suppress(OSError, CheckpointError):
            return {*steps} <= {*self.all()}
        return False

    def refuse_lost_run(self) -> None:
        """Before a first save: raises CheckpointCorrupt if no step is left of those that the run had."""
        if self._local is not None:
            self._local.refuse_lost_run(self.latest)

    def refuse_unread(self, step: int) -> None:
        """Raises why a step that is in no other place cannot be read from the local directories, if something is known."""
        local = self._local
        if local and step not in local.complete and not self._persistent.has(step):
            local.refuse_unread(step)

    def latest(self) -> int | None:
        """The newest step that is complete in at least one tier, or None."""
        local, newest = self._local_steps(), self._persistent.latest()
        return max([*local, *(() if newest is None else (newest,))], default=None)

    def newest(self) -> int | None:
        """The same for who goes on from it; raises what kept a process from reading a newer one, if anything did."""
        newest = self.latest()
        if self._local is not None:
            self._local.refuse_older(-1 if newest is None else newest)
        return newest

    def candidates(self) -> list[int]:
        """The steps that a restore of the newest one tries, ascending; raises where it may not fall back to these."""
        local, listing = self._local_steps(), self._persistent.look()
        changes_files = self._persistent.local and not self._persistent.read_only
        if self._local is None and listing.run.name and changes_files:
            logger.warning(
                "%s: this run had local directories, which may hold newer steps: pass local_directory= again, or they "
                "count no more after the next save",
                self._persistent.directory,
            )
        steps = sorted({*listing.committed(), *local})
        if self._local is not None:
            self._local.refuse_older(max(steps, default=-1))
            self.refuse_lost_run()
        return steps

    def newer_of_another_number(self, step: int) -> str:
        """What is said of the newest local step of another number of processes, if it is newer than this one."""
        return "" if self._local is None else self._local.newer_of_another_number(step)

    def prefers_local(self, step: int, listing: Listing | None = None) -> bool:
        """Whether the local copy of a step counts: the persistent one, if any, is no newer save."""
        if self._local is None or step not in self._local.complete:
            return False
        names = (listing or self._persistent.look()).directories(step)
        return not names or not self._local.is_older(step, self._persistent.saved(names[0]).token)

    def facts(self) -> list[StepFacts]:
        """The metrics of every step that is neither damaged nor gone; OSError or NewerFormat if one cannot be read now."""
        local = self._local_steps()
        if self._local is not None:
            for step in {*self._local.standing, MAX_STEP}:
                self.refuse_unread(step)
        listing = self._persistent.look()
        every = (self._persistent.facts(step, listing) for step in listing.committed())
        found = {one.step: one for one in every if one is not None}
        for step in sorted(local):
            with contextlib.suppress(CheckpointCorrupt, CheckpointNotFound):
                found[step] = facts_of(step, self.open(step))
        return [found[step] for step in sorted(found)]

    def open(self, step: int) -> Checkpoint:
        """Opens a step: its persistent copy, unless the local one is a newer save. CheckpointNotFound lists both tiers."""
        step, local = check_step(step), self._local_steps()
        if self._local is None or step not in local:
            try:
                return self._persistent.open(step, beside=local)
            except CheckpointNotFound:
                if self._local is not None:
                    self._local.refuse_unread(step)
                raise
        listing = self._persistent.look()
        names = listing.directories(step)
        same = names and self._persistent.saved(names[0]).token == local[step]
        if not same and self.prefers_local(step, listing):
            return self._local.opening(step)()
        return self._persistent.open(step, listing)
