"""Deletes the steps that no policy keeps, and moves damaged or superseded ones away."""

from __future__ import annotations

import time
from collections.abc import Set

from ckpt_core._errors import CheckpointError
from ckpt_core._events import Event, Kind, logger, tell
from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.policies import keep

DAMAGED = "damaged"
"""Directory, next to the steps, for steps that could not be restored."""
RETIRED = "retired"
"""Directory for steps of a branch that training left, or of a run that was taken over."""


class Retention:
    """Decides which steps of a directory stay, and deletes or moves the others.

    Args:
        run: directory of the run.
        policy: keep policy; None keeps all steps.
    """

    def __init__(
        self,
        run: RunDirectory,
        policy: keep.KeepPolicy | None,
    ) -> None:
        self._steps = run.steps
        self._backend = run.backend
        self._policy = policy
        self._options = run.options
        self._damaged: Set[int] = run.damaged  # shared: restores add to it
        self._unneeded_since: dict[int, float] = {}
        self._known: dict[int, keep.StepFacts] = {}

    def apply(self, saved: int, steps: list[int]) -> list[int]:
        """Deletes the steps that no policy keeps; returns them. A failed deletion is only logged.

        Args:
            saved: the step that was just committed; its cached facts are dropped.
            steps: every committed step, ascending.
        """
        self._known.pop(saved, None)
        deleted: list[int] = []
        for step in self._due(steps):
            try:
                self._remove(step)
            except BlockingIOError:
                logger.info("%s is being read, and stays for now", self._steps.path(step))
            except (OSError, CheckpointError) as error:
                logger.warning("could not delete %s: %s", self._steps.path(step), error)
                self._send_event("delete_failed", step, error)
            else:
                deleted.append(step)
        return deleted

    def delete(self, step: int) -> None:
        """Deletes a step.

        Raises:
            CheckpointNotFound: there is no step of this number.
            CheckpointError: a reader holds the step.
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
            self._send_event("delete_failed", step, error)
            raise

    def delete_newer(self, step: int) -> None:
        """Deletes all steps newer than ``step``, newest first: an interruption leaves no gap."""
        # Repeat, since a step can exist under several directory names.
        while newer := [other for other in self._steps.all() if other > step]:
            for other in reversed(newer):
                self.delete(other)

    def clean(self) -> None:
        """Removes the temporary directories of unfinished saves whose writers are dead."""
        removed = self._backend.clean(self._steps.directory)
        if removed:
            logger.info("%s: removed %d unfinished saves", self._steps.directory, len(removed))

    def set_aside(self, step: int) -> None:
        """Moves a damaged step to ``damaged``, so that its number can be saved again.

        Raises:
            CheckpointError: the directory is in an object store, which cannot rename.
        """
        path = self._steps.path(step)
        self._known.pop(step, None)
        if not self._backend.exists(path):
            return  # the damaged copy was only in a local directory
        self._backend.delete(path, DAMAGED)
        logger.warning("%s is damaged, and was moved to %s", path, DAMAGED)

    def retire(self, step: int, moves: bool) -> None:
        """Removes an intact step from the listing, under every directory name that it has.

        Args:
            step: number of the step.
            moves: True to move it to ``retired``; False, for object stores, which cannot rename, to
                delete it.

        Raises:
            BlockingIOError: a reader holds the step.
        """
        self._unneeded_since.pop(step, None)
        self._known.pop(step, None)
        while self._steps.has(step):
            path = self._steps.path(step)
            self._backend.delete(path, RETIRED if moves else self._options.trash_directory)
            self._send_event("deleted", step)

    def _remove(self, step: int) -> None:
        path = self._steps.path(step)
        self._backend.delete(path, self._options.trash_directory)
        self._unneeded_since.pop(step, None)
        self._known.pop(step, None)
        logger.info("deleted %s", path)
        self._send_event("deleted", step)

    def _send_event(self, kind: Kind, step: int, error: Exception | None = None) -> None:
        path = self._steps.path(step)
        event = Event(kind=kind, path=path, step=step, error=error)
        tell(event, self._options.on_event)

    def explain(self) -> dict[int, str]:
        """For every step whether it stays, and why."""
        self._known.clear()  # another process may have written steps since
        steps = self._steps.all()
        kept = self._kept(steps)
        return {
            step: f"kept: {kept[step]}" if step in kept else "deleted: no policy keeps it"
            for step in steps
        }

    def _due(self, steps: list[int]) -> list[int]:
        """Those of the steps that no policy has kept for at least ``Options.delete_grace_secs``."""
        if self._policy is None or len(steps) < 2:
            return []
        kept = self._kept(steps)
        unneeded = [step for step in steps if step not in kept]
        now = time.monotonic()
        self._unneeded_since = {step: self._unneeded_since.get(step, now) for step in unneeded}
        grace_secs = self._options.delete_grace_secs
        return [step for step in unneeded if now - self._unneeded_since[step] >= grace_secs]

    def _facts(self, step: int) -> keep.StepFacts | None:
        """The policy's input for a step; cached, since thousands of steps may stay."""
        facts = self._known.get(step) or self._steps.facts(step)
        if facts is not None:
            self._known[step] = facts
        return facts

    def _kept(self, steps: list[int]) -> dict[int, str]:
        # A damaged step must not count as one of the ``max_to_keep``: no run can resume from it.
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
            # The newest intact step always stays: a run resumes from it.
            kept.setdefault(known[-1].step, "the newest step")
        return kept
