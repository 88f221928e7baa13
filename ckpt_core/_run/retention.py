"""Removes steps: those that no policy keeps, those that training leaves, and damaged ones that make room.

What is removed together is written down first, in one piece, so that a kill stands before or after.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from ckpt_core._directory import is_locked, why_immovable
from ckpt_core._errors import CheckpointError
from ckpt_core._format.record import RECORD_FILE
from ckpt_core._operation import Event, Kind, logger, tell
from ckpt_core._run.lease import Lease
from ckpt_core._run.policies import keep
from ckpt_core._run.run_file import RUN_FILE, Removal, RunFile
from ckpt_core._run.steps import Listing, RunDirectory, unless_wanted

DAMAGED = "damaged"
"""Directory, next to the steps, for steps that could not be restored."""
RETIRED = "retired"
"""Directory for steps of a branch that training left, or of a run that was taken over."""
_PAUSE_SECS = 0.05


@dataclass
class Retention:
    """Decides which steps of a directory stay (all without a policy), and deletes or moves the others."""

    run: RunDirectory
    policy: keep.KeepPolicy | None
    lease: Lease
    _unneeded_since: dict[int, float] = field(default_factory=dict[int, float])
    _known: dict[int, keep.StepFacts] = field(default_factory=dict[int, keep.StepFacts])
    _said_no_metric: bool = False

    def apply(self, saved: int, listing: Listing, but: Set[int], damaged: Set[int]) -> None:
        """Deletes the steps that no policy keeps, but for ``saved`` and those ``but`` names. A failed deletion is only logged."""
        self._known.pop(saved, None)
        steps = [step for step in listing.committed() if step not in but]
        for step in self._due(steps, listing, damaged):
            try:
                self._delete(step, listing)
            except BlockingIOError:
                path = self.run.steps.path(step, listing)
                logger.info("%s is being read, or waited for, and stays for now", path)
            except (OSError, CheckpointError) as error:
                logger.warning("could not delete %s: %s", self.run.steps.path(step, listing), error)
                self._send_event("delete_failed", step, error)

    def clean(self) -> None:
        """Removes the temporary directories that dead writers left of unfinished saves; on process 0 alone."""
        removed = self.run.backend.clean(self.run.path)
        if removed:
            logger.info("%s: removed %d unfinished saves", self.run.path, len(removed))

    def removals_of(
        self, steps: Iterable[int], listing: Listing, into: str | None
    ) -> list[Removal]:
        """The steps of a listing among ``steps``, under every directory name that they have; ``into`` None deletes them."""
        return [
            Removal(name, step, self.run.steps.saved(name).token, into)
            for step in steps
            for name in listing.directories(step)
        ]

    def refuse_read(self, steps: Sequence[Removal]) -> None:
        """Raises CheckpointError if one of the steps is being read."""
        for one in steps:
            path = f"{self.run.path}/{one.name}"
            if self.run.local and is_locked(f"{path}/{RECORD_FILE}"):
                raise CheckpointError(
                    f"{path} is being read, by this process or another: try again when that has ended"
                )

    def remove(
        self, steps: Sequence[Removal], before: RunFile, after: RunFile, wait_secs: float = 0.0
    ) -> None:
        """Removes steps, and puts the run file ``after`` in place of ``before``: killed at any moment, all of that is done or
        nothing. Raises CheckpointError if a step is still being read after ``wait_secs``. If others are removed with it, it counts
        no more, and the next save removes it.
        """
        self._refuse_immovable(steps)
        newest_first = tuple(
            sorted(steps, key=lambda one: -one.step)
        )  # so no step goes before one that continues it
        noted = after != before or len(steps) > 1
        if noted:
            self._put(replace(after, removals=newest_first))
        self._remove_all(newest_first, wait_secs)
        if noted and steps:
            self._put(after)

    def finish(self, run: RunFile, wait_secs: float = 0.0) -> None:
        """Ends what ``remove`` began, perhaps in a writer that died."""
        if not run.removals:
            return
        found = (one for one in run.removals if self.run.steps.names.parse(one.name) == one.step)
        same = [one for one in found if self.run.steps.saved(one.name).token == one.token]
        self._remove_all(same, wait_secs)
        self._put(replace(run, removals=()))

    def _refuse_immovable(self, steps: Sequence[Removal]) -> None:
        """Raises PermissionError, before anything is removed, if a step is another user's who did not share it."""
        names = (name for one in steps for name in (one.name, one.into) if name)
        for path in (f"{self.run.path}/{name}" for name in names if self.run.local):
            if why := why_immovable(path):
                raise PermissionError(errno.EACCES, why, path)

    def _put(self, run: RunFile) -> None:
        self._refuse_after_takeover()
        if run == RunFile():
            self.run.backend.remove(self.run.path, RUN_FILE)
        else:
            self.run.backend.put(self.run.path, RUN_FILE, run.dump())

    def _remove_all(self, steps: Iterable[Removal], wait_secs: float) -> None:
        deadline = time.monotonic() + wait_secs
        for one in steps:
            self._refuse_after_takeover()
            self._drop(one, deadline)
        self._refuse_after_takeover()

    def _refuse_after_takeover(self) -> None:
        if self.lease.claimed:  # a tool or a deletion may do without
            self.lease.check()

    def _drop(self, removal: Removal, deadline: float) -> None:
        path = f"{self.run.path}/{removal.name}"
        self._forget(removal.step)
        while True:
            try:
                self.run.backend.delete(path, removal.into)
            except FileNotFoundError:
                return  # whoever began to remove it was further than it seemed
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{path} must be moved away first, but it is being read: try again when the read has ended"
                    ) from None
                time.sleep(_PAUSE_SECS)
            except (OSError, CheckpointError) as error:
                self._send_event("delete_failed", removal.step, error)
                raise
            else:
                break
        if removal.into == DAMAGED:
            logger.warning("%s is damaged, and was moved to %s", path, DAMAGED)
        elif removal.into is None:
            logger.info("deleted %s", path)
        self._send_event("deleted", removal.step)

    def _delete(self, step: int, listing: Listing) -> None:
        trash = self.run.options.trash_directory
        # the first name is the one that counts: it goes last, so that no older one counts in between
        for name in reversed(self._own(listing.directories(step))):
            path = f"{self.run.path}/{name}"
            with unless_wanted(path, self.run.local):
                self.run.backend.delete(path, trash)
            logger.info("deleted %s", path)
        self._forget(step)
        self._send_event("deleted", step)

    def _forget(self, step: int) -> None:
        self._unneeded_since.pop(step, None)
        self._known.pop(step, None)

    def _send_event(self, kind: Kind, step: int, error: Exception | None = None) -> None:
        path = self.run.steps.new_path(step)
        event = Event(kind=kind, path=path, step=step, error=error)
        tell(event, self.run.options.on_event)

    def explain(self, damaged: Set[int]) -> dict[int, str]:
        """For every step whether it stays, and why."""
        self._known.clear()  # another process may have written steps since
        listing = self.run.steps.look()
        steps = listing.committed()
        kept = self._kept(steps, listing, damaged)
        return {
            step: f"kept: {kept[step]}" if step in kept else "deleted: no policy keeps it"
            for step in steps
        }

    def _due(self, steps: list[int], listing: Listing, damaged: Set[int]) -> list[int]:
        """Those of the steps that no policy has kept for at least ``Options.delete_grace_secs``."""
        if len(steps) < 2:
            return []
        kept = self._kept(steps, listing, damaged)
        unneeded = [step for step in steps if step not in kept]
        now = time.monotonic()
        self._unneeded_since = {step: self._unneeded_since.get(step, now) for step in unneeded}
        grace_secs = self.run.options.delete_grace_secs
        return [step for step in unneeded if now - self._unneeded_since[step] >= grace_secs]

    def _facts(self, step: int, listing: Listing) -> keep.StepFacts | None:
        """The policy's input for a step; cached, since thousands of steps may stay."""
        facts = self._known.get(step)
        if facts is None:
            with contextlib.suppress(CheckpointError, OSError):  # what cannot be read stays
                facts = self.run.steps.facts(step, listing)
        if facts is not None:
            self._known[step] = facts
        return facts

    def _kept(self, steps: list[int], listing: Listing, damaged: Set[int]) -> dict[int, str]:
        # A damaged step must not count as one of the ``max_to_keep``: no run can resume from it.
        others = {step for step in steps if not self._own(listing.names[step])}
        whole = [step for step in steps if step not in damaged and step not in others]
        facts = {step: self._facts(step, listing) for step in whole}
        known = [entry for entry in facts.values() if entry is not None]
        kept = (self.policy or keep.all())(known)
        if self.policy is not None and self.policy.ranks_by:
            self._keep_unranked(self.policy, known, kept)
        for step, entry in facts.items():
            if entry is None:
                kept.setdefault(step, "its record cannot be read, so it is never deleted")
        for step in others:
            name = listing.names[step][0]
            kept[step] = f"{name} has another prefix than this run's steps, so no policy deletes it"
        for step in damaged & set(steps):
            kept[step] = "it is damaged, so it is never deleted"
        if known:
            # The newest intact step always stays: a run resumes from it.
            kept.setdefault(known[-1].step, "the newest step")
        return kept

    def _own(self, names: Iterable[str]) -> list[str]:
        """Of the directories of a step those whose prefix this run's steps have, or none: no policy deletes others."""
        other = self.run.steps.names.is_of_another_series
        return [name for name in names if not other(name)]

    def _keep_unranked(
        self, policy: keep.KeepPolicy, known: Sequence[keep.StepFacts], kept: dict[int, str]
    ) -> None:
        """Keeps steps that only their rank could delete, and that have none; warns once of a metric that no step has."""
        ranks_by, found = policy.ranks_by, {name for facts in known for name in facts.metrics}
        for facts in known:
            if policy.ranks_only and not ranks_by & facts.metrics.keys():
                missing = ", ".join(map(repr, sorted(ranks_by)))
                kept.setdefault(facts.step, f"it has no metric {missing}, so it has no rank")
        if (absent := sorted(ranks_by - found)) and len(known) > 1 and not self._said_no_metric:
            self._said_no_metric = True
            logger.warning(
                "%s: no step has the metric %s by which steps are kept, so none is kept or deleted for it: pass it "
                "to save(metrics=). The steps have %s. This is said once",
                self.run.path,
                ", ".join(map(repr, absent)),
                f"the metrics {', '.join(map(repr, sorted(found)))}" if found else "no metrics",
            )
        odd = [one for one in known if one.metrics and not ranks_by & one.metrics.keys()]
        if odd and not absent and not self._said_no_metric:
            self._said_no_metric = True
            logger.warning(
                "%s: step %d has the metrics %s, and not %s by which steps are kept, so it has no rank, and is not "
                "deleted for one: pass it to save(metrics=). This is said once",
                self.run.path,
                odd[-1].step,
                ", ".join(map(repr, sorted(odd[-1].metrics))),
                ", ".join(map(repr, sorted(ranks_by))),
            )
