"""A fast local tier over the persistent directory: the steps of both, and where each is read.

Each process keeps the newest steps in a directory of its own (``LocalTier``); the persistent
directory takes steps in the background. What is restored is complete across all processes, wherever
it lies.
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
from ckpt_core._run.tiers.local import local_root as local_root
from ckpt_core._run.tiers.save import StepToSave as StepToSave


class Tiers:
    """The steps of a run, wherever they lie.

    Args:
        persistent: the directory that all processes share.
        local: the local tier; None where there is none.
    """

    def __init__(self, persistent: Steps, local: LocalTier | None) -> None:
        self.directory = persistent.directory
        self._persistent = persistent
        self._local = local

    def all(self) -> list[int]:
        """Every step that is complete in one of the tiers, ascending."""
        if self._local is None:
            return self._persistent.all()
        return sorted({*self._persistent.all(), *self._local.complete})

    def latest(self) -> int | None:
        """The newest of them, or None."""
        newest = self._persistent.latest()
        if self._local is None or not self._local.complete:
            return newest
        return max(self._local.complete | ({newest} if newest is not None else set()))

    def open(self, step: int) -> Checkpoint:
        """A step's metadata; of the persistent directory, if it is there.

        Raises:
            CheckpointNotFound: with the steps that there are.
        """
        try:
            return self._persistent.open(step)
        except CheckpointNotFound:
            if self._local is None or step not in self._local.complete:
                raise
            return self._local.opening(step)()

    def opening(self, step: int) -> _load.Opening:
        """What opens a step later, where all processes can agree on whether it worked."""
        return lambda: self.open(step)

    def restore(self, step: int, targets: Mapping[str, Any], request: Any) -> Restored:
        """A step restored from local directories if it is whole there, else from the persistent one.

        Raises:
            CheckpointNotFound: it is in neither.
            CheckpointCorrupt: it is damaged, wherever it is.
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
            raise damage from None  # it was in local directories only
