"""Deleting the steps that no policy keeps."""

from __future__ import annotations

from ckpt_core._directory import Form
from ckpt_core._policies import keep
from ckpt_core._results import logger
from ckpt_core._steps import Steps


class Retention:
    """Which steps of a directory stay, and the removal of the others."""

    def __init__(self, steps: Steps, form: Form, policy: keep.KeepPolicy | None) -> None:
        self._steps = steps
        self._form = form
        self._policy = policy

    def apply(self) -> list[int]:
        """Deletes what no policy keeps, and gives it; a failure is reported and not fatal."""
        deleted: list[int] = []
        for step in self._to_delete():
            path = self._steps.path(step)
            try:
                self._form.delete(path)
            except OSError as error:
                logger.warning("could not delete %s: %s", path, error)
            else:
                logger.info("deleted %s", path)
                deleted.append(step)
        return deleted

    def explain(self) -> dict[int, str]:
        """For every step whether it stays, and why."""
        steps = self._steps.all()
        kept = self._kept(steps)
        return {
            step: f"kept: {kept[step]}" if step in kept else "deleted: no policy keeps it"
            for step in steps
        }

    def _to_delete(self) -> list[int]:
        steps = self._steps.all()
        if self._policy is None or len(steps) < 2:
            return []
        kept = self._kept(steps)
        return [step for step in steps if step not in kept]

    def _kept(self, steps: list[int]) -> dict[int, str]:
        facts = {step: self._steps.facts(step) for step in steps}
        known = [entry for entry in facts.values() if entry is not None]
        kept = (self._policy or keep.all())(known)
        for step, entry in facts.items():
            if entry is None:
                kept.setdefault(step, "its record cannot be read, so it is never deleted")
        if known:
            # the newest step that is whole: what a run resumes from
            kept.setdefault(known[-1].step, "the newest step")
        return kept
