"""The steps of a fast local tier and of the persistent directory, and from which one each is read.

A tier is a place where copies of a save lie. Each process keeps the newest steps in a directory of its own
(``LocalTier``); a background thread writes steps to the persistent directory. Only steps that are complete
across all processes are restored, from either tier, and of one number the newest save counts in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core import _load
from ckpt_core._directory.step_names import check_step
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound, all_take_for
from ckpt_core._load.checkpoint import Checkpoint, NativeCheckpoint
from ckpt_core._results import RestoredStep
from ckpt_core._run.steps import Listing, Steps
from ckpt_core._run.tiers.local import LocalTier as LocalTier
from ckpt_core._run.tiers.places import local_root as local_root
from ckpt_core._run.tiers.run_file import read_run as read_run
from ckpt_core._run.tiers.run_file import run_text as run_text
from ckpt_core._run.tiers.save import StepToSave as StepToSave


class Tiers:
    """The steps of a run in both tiers.

    Args:
        persistent: the directory that all processes share.
        local: the local tier, or None.
        alone: whether this process is the only one.
    """

    def __init__(self, persistent: Steps, local: LocalTier | None, alone: bool) -> None:
        self.directory = persistent.directory
        self._alone = alone
        self._persistent = persistent
        self._local = local

    def all(self) -> list[int]:
        """Every step that is complete in at least one tier, ascending."""
        if self._local is None:
            return self._persistent.all()
        self._local.refresh()
        return sorted({*self._persistent.all(), *self._local.complete})

    def latest(self) -> int | None:
        """The newest step that is complete in at least one tier, or None."""
        if self._local is not None:
            self._local.refresh()
        local = () if self._local is None else self._local.complete
        newest = self._persistent.latest()
        return max([*local, *(() if newest is None else (newest,))], default=None)

    def candidates(self) -> list[tuple[int, bool | None]]:
        """The steps, ascending, each with whether its local copy is tried first; None: ``prefers_local`` knows.

        That reads the record of a step which is in both tiers, so it is asked of the newest one alone.
        """
        if self._local is not None:
            self._local.refresh()
        listing = self._persistent.look()
        local = {} if self._local is None else self._local.complete
        persistent = listing.committed()
        steps = sorted({*persistent, *local})

        def local_first(step: int) -> bool | None:
            if step in local and step in persistent:
                return self.prefers_local(step, listing) if step == steps[-1] else None
            return step in local

        return [(step, local_first(step)) for step in steps]

    def prefers_local(self, step: int, listing: Listing | None = None) -> bool:
        """Whether the local copy of a step counts: the persistent one, if any, is no newer save."""
        if self._local is None or step not in self._local.complete:
            return False
        names = (listing or self._persistent.look()).directories(step)
        return not names or not self._local.is_older(step, self._persistent.token(names[0]))

    def open(self, step: int) -> Checkpoint:
        """A step with its metadata read; from the persistent directory, unless the local copy is a newer save.

        Raises:
            CheckpointNotFound: no tier has it; the message lists steps of the persistent directory.
        """
        step = check_step(step)
        if self._local is not None:
            self._local.refresh()
        if self._local is None or step not in self._local.complete:
            return self._persistent.open(step)
        listing = self._persistent.look()
        names = listing.directories(step)
        if names and self._persistent.token(names[0]) == self._local.complete[step]:
            return self._persistent.open(step, listing)
        if self.prefers_local(step, listing):
            return self._local.opening(step)()
        return self._persistent.open(step, listing)

    def opening(self, step: int) -> _load.Opening:
        """A function that opens a step later, inside the processes' agreement on the result."""
        return lambda: self.open(step)

    def restore(
        self, step: int, local_first: bool, targets: Mapping[str, Any], request: Any
    ) -> tuple[RestoredStep, str]:
        """Restores a step from the tier that counts, else from the other; also gives the token of the save.

        Args:
            step: its number.
            local_first: what ``prefers_local`` said on process 0.
            targets, request: as for ``_load.restore_checkpoint``.

        Raises:
            CheckpointNotFound: no tier has it.
            CheckpointCorrupt: every tier that has it holds a damaged copy.
        """
        damage: CheckpointCorrupt | None = None
        if self._local is not None and local_first:
            token = self._local.complete[step]
            found = self._local.restore(step, targets, request)
            if isinstance(found, RestoredStep):
                return found, token
            damage = found
        opened: list[Checkpoint] = []

        def opening() -> Checkpoint:
            opened.append(self._persistent.open(step))
            return opened[-1]

        try:
            restored = _load.restore_checkpoint(opening, targets, request, step)
        except Exception as error:
            # not by the class of this process's own error: the others may have failed for another reason
            absent = all_take_for(error, CheckpointNotFound, self._alone)
            damaged = all_take_for(error, CheckpointCorrupt, self._alone)
            if damage is not None and absent:
                # only the local tier has the step, or had it: a writer may delete it while others read
                vanished = isinstance(damage.__cause__, CheckpointNotFound)
                reads_alone = self._local is not None and self._local.reads_alone
                raise (error if vanished and reads_alone else damage) from None
            if not (absent or damaged) or damage is not None:
                raise
            if self._local is None or step not in self._local.complete:
                raise
            token = self._local.complete[step]  # an older save, but whole
            found = self._local.restore(step, targets, request)
            if isinstance(found, RestoredStep):
                return found, token
            raise
        ours = opened[-1]
        return restored, ours.record.token if isinstance(ours, NativeCheckpoint) else ""
