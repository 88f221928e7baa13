"""The steps of a fast local tier and of the persistent directory, and from which one each is read.

Each process keeps the newest steps in a directory of its own (``LocalTier``); a background thread
writes steps to the persistent directory. Only steps that are complete across all processes are
restored, from either tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core import _load
from ckpt_core._errors import CheckpointCorrupt, CheckpointNotFound
from ckpt_core._load.checkpoint import Checkpoint
from ckpt_core._results import Restored
from ckpt_core._run.steps import Steps
from ckpt_core._run.tiers.lineage import Run as Run
from ckpt_core._run.tiers.lineage import find_run as find_run
from ckpt_core._run.tiers.lineage import next_run as next_run
from ckpt_core._run.tiers.local import LocalTier as LocalTier
from ckpt_core._run.tiers.places import local_root as local_root
from ckpt_core._run.tiers.save import StepToSave as StepToSave


class Tiers:
    """The steps of a run in both tiers.

    Args:
        persistent: the directory that all processes share.
        local: the local tier, or None.
    """

    def __init__(self, persistent: Steps, local: LocalTier | None) -> None:
        self.directory = persistent.directory
        self._persistent = persistent
        self._local = local

    def all(self) -> list[int]:
        """Every step that is complete in at least one tier, ascending."""
        if self._local is None:
            return self._persistent.all()
        return sorted({*self._persistent.all(), *self._local.complete})

    def latest(self) -> int | None:
        """The newest step that is complete in at least one tier, or None."""
        newest = self._persistent.latest()
        if self._local is None or not self._local.complete:
            return newest
        return max(self._local.complete | ({newest} if newest is not None else set()))

    def open(self, step: int) -> Checkpoint:
        """A step with its metadata read; from the persistent directory if it has the step.

        Raises:
            CheckpointNotFound: no tier has it; the message lists steps of the persistent directory.
        """
        try:
            return self._persistent.open(step)
        except CheckpointNotFound:
            if self._local is None or step not in self._local.complete:
                raise
            return self._local.opening(step)()

    def opening(self, step: int) -> _load.Opening:
        """A function that opens a step later, inside the processes' agreement on the result."""
        return lambda: self.open(step)

    def restore(self, step: int, targets: Mapping[str, Any], request: Any) -> Restored:
        """Restores a step from the local tier if complete there, else from the persistent one.

        Raises:
            CheckpointNotFound: no tier has it.
            CheckpointCorrupt: every tier that has it holds a damaged copy.
        """
        damage: CheckpointCorrupt | None = None
        if self._local is not None and step in self._local.complete:
            found = self._local.restore(step, targets, request)
            if isinstance(found, Restored):
                return found
            damage = found
        opening = self._persistent.opening(step)
        try:
            return _load.restore_checkpoint(opening, targets, request, step)
        except CheckpointNotFound:
            if damage is None:
                raise
            raise damage from None  # only the local tier has the step
