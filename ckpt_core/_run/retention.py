"""Deleting the steps that no policy keeps."""

from __future__ import annotations

import time
from collections.abc import Set

from ckpt_core._errors import CheckpointError
from ckpt_core._events import Event, Kind, logger, tell
from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.policies import keep

DAMAGED = "damaged"
"""Name of the directory, beside the steps, for those that could not be restored."""
RETIRED = "retired"
"""Name of the one for steps of a branch that training left, or of a run that was taken over."""


class Retention:
    """Which steps of a directory stay, and the removal of the others."""

    def __init__(
        self,
        run: RunDirectory,
        policy: keep.KeepPolicy | None,
    ) -> None:
        self._steps = run.steps
        self._backend = run.backend
        self._policy = policy
        self._options = run.options
        self._damaged: Set[int] = run.damaged  # grows while the run finds more
        self._unneeded_since: dict[int, float] = {}
        self._known: dict[int, keep.StepFacts] = {}

    def apply(self, saved: int) -> list[int]:
        """Deletes what no policy keeps, and gives it; a failure is reported and not fatal.

        Args:
            saved: the step that was just committed; what was known of it no longer holds.
        """
        self._known.pop(saved, None)
        deleted: list[int] = []
        for step in self._due():
            try:
                self._remove(step)
            except BlockingIOError:
                logger.info("%s is being read, and stays for now", self._steps.path(step))
            except (OSError, CheckpointError) as error:
                logger.warning("could not delete %s: %s", self._steps.path(step), error)
                self._tell("delete_failed", step, error)
            else:
                deleted.append(step)
        return deleted

    def delete(self, step: int) -> None:
        """Deletes a step.

        Raises:
            CheckpointNotFound: there is none of this number.
            CheckpointError: it is being read.
        """
        self._steps.refuse_absent(step)
        try:
            self._remove(step)
        except BlockingIOError:
            raise CheckpointError(
                f"{self._steps.path(step)} is being read, by this process or another: try again "
                "when that has ended"
            ) from None
        except (OSError, CheckpointError) as error:
            self._tell("delete_failed", step, error)
            raise

    def delete_newer(self, step: int) -> None:
        """Deletes all steps after one, the newest first: at every moment those left are in order."""
        while newer := [other for other in self._steps.all() if other > step]:  # of every name
            for other in reversed(newer):
                self.delete(other)

    def clean(self) -> None:
        """Removes what dead writers left unfinished."""
        removed = self._backend.clean(self._steps.directory)
        if removed:
            logger.info("%s: removed %d unfinished saves", self._steps.directory, len(removed))

    def set_aside(self, step: int) -> None:
        """Makes room for a step whose number a damaged one has; that one is kept elsewhere.

        Raises:
            CheckpointError: an object store, which cannot rename.
        """
        path = self._steps.path(step)
        self._known.pop(step, None)
        if not self._backend.exists(path):
            return  # it lay in a local directory only
        self._backend.delete(path, DAMAGED)
        logger.warning("%s is damaged, and was moved to %s", path, DAMAGED)

    def retire(self, step: int, moves: bool) -> None:
        """Takes a whole step out of the way, under all its names.

        Args:
            moves: it is moved; an object store cannot rename, so there it is deleted.

        Raises:
            BlockingIOError: it is being read.
        """
        self._unneeded_since.pop(step, None)
        self._known.pop(step, None)
        while self._steps.has(step):
            path = self._steps.path(step)
            self._backend.delete(path, RETIRED if moves else self._options.trash_directory)
            self._tell("deleted", step)

    def _remove(self, step: int) -> None:
        path = self._steps.path(step)
        self._backend.delete(path, self._options.trash_directory)
        self._unneeded_since.pop(step, None)
        self._known.pop(step, None)
        logger.info("deleted %s", path)
        self._tell("deleted", step)

    def _tell(self, kind: Kind, step: int, error: Exception | None = None) -> None:
        path = self._steps.path(step)
        event = Event(kind=kind, path=path, step=step, error=error)
        tell(event, self._options.on_event)

    def explain(self) -> dict[int, str]:
        """For every step whether it stays, and why."""
        self._known.clear()  # whoever asks may not be the one who writes
        steps = self._steps.all()
        kept = self._kept(steps)
        return {
            step: f"kept: {kept[step]}" if step in kept else "deleted: no policy keeps it"
            for step in steps
        }

    def _due(self) -> list[int]:
        """What no policy keeps, and has not for as long as readers are given."""
        steps = self._steps.all()
        if self._policy is None or len(steps) < 2:
            return []
        kept = self._kept(steps)
        unneeded = [step for step in steps if step not in kept]
        now = time.monotonic()
        self._unneeded_since = {step: self._unneeded_since.get(step, now) for step in unneeded}
        grace_secs = self._options.delete_grace_secs
        return [step for step in unneeded if now - self._unneeded_since[step] >= grace_secs]

    def _facts(self, step: int) -> keep.StepFacts | None:
        """What is known of a step; read once, since thousands may stay."""
        facts = self._known.get(step) or self._steps.facts(step)
        if facts is not None:
            self._known[step] = facts
        return facts

    def _kept(self, steps: list[int]) -> dict[int, str]:
        # what nobody can resume from must take no place of what somebody can
        whole = [step for step in steps if step not in self._damaged]
        facts = {step: self._facts(step) for step in whole}
        known = [entry for entry in facts.values() if entry is not None]
        kept = (self._policy or keep.all())(known)
        for step, entry in facts.items():
            if entry is None:
                kept.setdefault(step, "its record cannot be read, so it is never deleted")
        for step in self._damaged & set(steps):
            kept[step] = "it is damaged, so it is never deleted"
        if known:
            # the newest step that is whole: what a run resumes from
            kept.setdefault(known[-1].step, "the newest step")
        return kept
