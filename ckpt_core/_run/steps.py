"""The committed steps in a directory: their numbers, directory names and metadata."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from ckpt_core._directory import Backend
from ckpt_core._directory.step_names import StepNames, check_step
from ckpt_core._errors import CheckpointError, CheckpointExists, CheckpointNotFound
from ckpt_core._events import logger
from ckpt_core._format import orbax_write
from ckpt_core._format.record import RECORD_FILE
from ckpt_core._load.checkpoint import Checkpoint, NativeCheckpoint
from ckpt_core._load.opening import open_checkpoint
from ckpt_core._options import Options
from ckpt_core._run.policies import keep


def refuse_one_checkpoint(backend: Backend, directory: str, local: bool) -> None:
    """Raises if ``directory`` is itself a checkpoint (ours or Orbax's), not a directory of steps.

    Args:
        backend: reads the directory.
        directory: path or URL.
        local: True in a file system.

    Raises:
        CheckpointExists: it is a checkpoint; the message says what to pass instead.
    """
    for name in (RECORD_FILE, orbax_write.STEP_METADATA, orbax_write.ITEM_METADATA):
        try:
            if local:
                found = backend.exists(f"{directory}/{name}")
            else:
                found = backend.read(directory, name) is not None
        except (OSError, CheckpointError):
            continue  # a later read or write raises the same error
        if found:
            parent = directory.rpartition("/")[0]
            raise CheckpointExists(
                f"{directory} is one checkpoint (it has {name}), not a directory of them, and steps would be "
                f"written into it: make the Checkpointer on {parent or '/'} if this is one of its steps, or "
                "load it with ckpt.load or ckpt.restore"
            )


@dataclass(frozen=True)
class Listing:
    """What one look at a directory of steps found; of an object store, also what is in each of them.

    Attributes:
        names: step -> names of directories that parse to it, the name that we would write first.
        is_checkpoint: tells of such a directory whether it is a committed checkpoint.
    """

    names: Mapping[int, list[str]]
    is_checkpoint: Callable[[str], bool]

    def has(self, step: int) -> bool:
        """Whether a step of this number is committed, under any of its possible names."""
        return any(map(self.is_checkpoint, self.names.get(step, [])))

    def committed(self, at_least: int = 0) -> dict[int, str]:
        """Committed step -> name of its directory, for steps from ``at_least``; opens each one."""
        found = {
            step: next(filter(self.is_checkpoint, self.names[step]), None)
            for step in self.names
            if step >= at_least
        }
        return {step: name for step, name in found.items() if name is not None}


class Steps:
    """The committed steps below a directory; every call lists the directory again.

    Attributes:
        directory: path or URL of the directory.
        names: names of the steps in it.
    """

    def __init__(
        self,
        directory: str,
        backend: Backend,
        names: StepNames,
        options: Options | None = None,
    ) -> None:
        self._options = options
        self.directory = directory
        self._backend = backend
        self.names = names

    def look(self) -> Listing:
        """Lists the directory."""
        found: dict[int, list[str]] = {}
        children, is_checkpoint = self._backend.look(self.directory)
        for name in children:
            step = self.names.parse(name)
            if step is None:
                continue
            names = found.setdefault(step, [])
            names.insert(0 if name == self.names.name(step) else len(names), name)
        return Listing(found, is_checkpoint)

    def all(self) -> list[int]:
        """Every committed step, ascending."""
        return sorted(self.look().committed())

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        listing = self.look()
        newest_first = sorted(listing.names, reverse=True)  # usually the first one is committed
        return next(filter(listing.has, newest_first), None)

    def has(self, step: int) -> bool:
        """Whether a step of this number is committed, under any of its possible names."""
        return self.look().has(step)

    def new_path(self, step: int) -> str:
        """The path to which a new step of this number is written."""
        return f"{self.directory}/{self.names.name(step)}"

    def path(self, step: int) -> str:
        """Path of an existing step, whatever its directory name; else where a new one would be."""
        name = self.names.name(step)
        if not self._backend.is_checkpoint(f"{self.directory}/{name}"):
            name = self.look().committed().get(step, name)
        return f"{self.directory}/{name}"

    def open(self, step: int) -> Checkpoint:
        """A step with its metadata read.

        Raises:
            CheckpointNotFound: no such step; the message lists up to 10 that exist.
        """
        try:
            return open_checkpoint(self.path(check_step(step)), self._options)
        except CheckpointNotFound:
            raise self._absent(step) from None

    def refuse_absent(self, step: int) -> None:
        """Raises CheckpointNotFound if there is no such step; damaged steps exist."""
        if step not in self.look().committed():
            raise self._absent(step)

    def _absent(self, step: int) -> CheckpointNotFound:
        known = ", ".join(map(str, self.all()[-10:])) or "none"
        return CheckpointNotFound(f"{self.directory} has no step {step}; it has: {known}")

    def opening(self, step: int) -> Callable[[], Checkpoint]:
        """A function that opens a step later, inside the processes' agreement on the result."""
        return lambda: self.open(step)

    def facts(self, step: int) -> keep.StepFacts | None:
        """The keep policy's input for a step; None if its record cannot be read."""
        try:
            opened = self.open(step)
        except (CheckpointError, OSError):
            return None
        ours = isinstance(opened, NativeCheckpoint)
        created = opened.record.created_unix_secs if ours else 0.0
        return keep.StepFacts(step, created, opened.metrics)

    def all_facts(self) -> list[keep.StepFacts]:
        """The keep policy's input for every step whose record can be read."""
        return [facts for step in self.all() if (facts := self.facts(step)) is not None]

    def refuse_taken(
        self,
        step: int,
        there: Set[int],
        overwrite: bool,
        damaged: Set[int] = frozenset(),
        older: bool = False,
    ) -> None:
        """Raises if ``step`` exists, or if a newer one does, from which a restart would resume.

        Args:
            step: number to be written.
            there: steps that exist and will stay.
            overwrite: an existing step of this number is no error.
            damaged: newer steps that are ignored, since no run can resume from them.
            older: newer steps are logged, and do not raise.

        Raises:
            CheckpointExists: the message names the existing steps.
        """
        if step in there and not overwrite:
            raise CheckpointExists(
                f"{self.directory}: step {step} is there already, and not from this Checkpointer: pass "
                "overwrite=True to replace it"
            )
        newer = sorted(other for other in there if other > step and other not in damaged)
        if newer and step not in there:
            shown = ", ".join(map(str, newer[:5]))
            if older:
                logger.warning(
                    "%s: step %d is saved with force=True, and is older than %s: restore_latest goes on from "
                    "the newest step, not from this one",
                    self.directory,
                    step,
                    shown,
                )
                return
            raise CheckpointExists(
                f"{self.directory}: step {step} is older than {shown}, which are there already: "
                f"restore_latest would resume from those. Call rollback_to({max(step - 1, 0)}) to retire "
                "them, save to another directory, or pass force=True to save it all the same"
            )

    def wait_for_newer(self, after: int | None, timeout_secs: float | None) -> int | None:
        """Blocks until the newest step is newer than ``after``; returns it, or None on timeout."""
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        while True:
            newest = self.latest()
            if newest is not None and (after is None or newest > after):
                return newest
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            time.sleep(1.0 if left is None else min(1.0, left))
