"""The steps of a fast local tier and of the persistent directory, and from which one each is read.

A tier is a place where copies of a save lie. Each process keeps the newest steps in a directory of its own
(``LocalTier``); a background thread writes steps to the persistent directory. Only steps that are complete
across all processes are restored, from either tier, and of one number the newest save counts in both.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from ckpt_core import _load
from ckpt_core._directory import MAX_STEP, check_step, why_immovable
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, counts_as
from ckpt_core._format.record import Record
from ckpt_core._operation import logger
from ckpt_core._results import RestoredStep
from ckpt_core._run.policies.keep import StepFacts
from ckpt_core._run.steps import Listing, RunDirectory, facts_of, stray_text
from ckpt_core._run.tiers.judge import Misfit, Stray
from ckpt_core._run.tiers.local import LocalTier, open_local
from ckpt_core._run.tiers.save import StepToSave
from ckpt_core._saved import Checkpoint, NativeCheckpoint

T = TypeVar("T")

_FROM_RESTORE = 7  # frames from the caller of ``restore`` to a warning of ``Tiers.restore``
_FROM_LATEST = 7  # the same of ``restore_latest`` and ``Tiers._say_newer``
_LOOKS = 3  # times to list the directory, if every listed step is deleted before it is read


class Tiers:
    """The steps of a run in both tiers: in local directories, if there are any, and in the persistent one that all share."""

    def __init__(self, directory: RunDirectory, local: LocalTier | None) -> None:
        self.directory, self._persistent = directory.path, directory.steps
        self._alone = directory.processes.count == 1
        self._first = directory.processes.index == 0
        self._changes_files = self._first and directory.local and not directory.read_only
        self._local = local

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

    def candidates(self) -> list[tuple[int, bool | None]]:
        """The steps, ascending, each with whether its local copy is tried first; None: ``prefers_local`` knows."""
        local, listing = self._local_steps(), self._persistent.look()
        if self._local is None and listing.run.name and self._changes_files:
            logger.warning(
                "%s: this run had local directories, which may hold newer steps: pass local_directory= again, or they "
                "count no more after the next save",
                self.directory,
            )
        persistent = {*listing.committed()}
        steps = sorted({*persistent, *local})
        if self._local is not None:
            self._local.refuse_older(max(steps, default=-1))
            self.refuse_lost_run()
        both = persistent & local.keys()
        found = [(step, None if step in both else step in local) for step in steps]
        if both and max(both) == steps[-1]:  # of the newest alone, as that reads its record
            found[-1] = steps[-1], self.prefers_local(steps[-1], listing)
        return found

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

    def load(self, step: int, load: Callable[[_load.Opening], T]) -> T:
        """What ``load`` makes of a step, from the tier that ``open`` takes; raises what ``restore`` does."""
        step = check_step(step)

        def opening() -> Checkpoint:  # later, inside the processes' agreement on the result
            return self.open(step)

        if self._local is None or step not in self._local.complete:
            return load(opening)
        found = self._local.read(step, load, opening)
        if isinstance(found, (CheckpointError, OSError)):
            raise found
        return found

    def restore(
        self,
        step: int,
        local_first: bool,
        read: Callable[[_load.Opening], RestoredStep],
        *,
        by_number: bool,
    ) -> tuple[RestoredStep, str]:
        """What ``read`` makes of a step in the tier that counts, else in the other; also gives the token of the save.
        ``local_first`` is what ``prefers_local`` said on process 0. CheckpointCorrupt: every copy is damaged;
        CheckpointError: only the local directories have it, and not for these shardings; OSError: this process could not
        read it, which is no damage.
        """
        failed: CheckpointError | OSError | None = None
        if self._local is not None and local_first:
            found = self._local.restore(step, read)
            if isinstance(found, tuple):
                return found
            failed = found
        opened = list[tuple[Checkpoint, Listing, str]]()

        def opening() -> Checkpoint:
            beside = () if self._local is None else self._local.complete
            listing = self._persistent.look()
            found = self._persistent.open(step, listing, beside)
            stray = ""
            if self._first and isinstance(found, NativeCheckpoint) and found.record.parent:
                stray = self._stray(step, found.record, listing, by_number)
            opened.append((found, listing, stray))
            return found

        try:
            restored = read(opening)
        except Exception as error:
            # not by the class of this process's own error: the others may have failed for another reason
            absent = counts_as(error, CheckpointNotFound, self._alone)
            damaged = counts_as(error, CheckpointCorrupt, self._alone)
            unread = failed is not None and counts_as(failed, OSError, self._alone)
            if failed is not None and (absent or (damaged and unread)):
                # only the local tier has the step, or had it: a writer may delete it while others read
                vanished = isinstance(failed.__cause__, CheckpointNotFound)
                reads_alone = self._local is not None and self._local.reads_alone
                raise error if vanished and reads_alone else failed  # noqa: B904
            if absent and failed is None and self._local is not None:
                self._local.refuse_unread(step)
            if not (absent or damaged) or failed is not None:
                raise
            if self._local is None or step not in self._local.complete:
                raise
            found = self._local.restore(step, read)  # an older save, but whole
            if isinstance(found, tuple):
                return found
            if counts_as(found, OSError, self._alone):
                raise found  # noqa: B904
            raise
        ours, listing, stray = opened[-1]
        if stray:
            _warn(stray, _FROM_RESTORE)
        writable = self._changes_files and os.access(self.directory, os.W_OK)
        for one in sorted(one for one in listing.names if writable and one >= step):
            path = ours.path if one == step else self._persistent.path(one, listing)
            if not os.access(path, os.W_OK):  # the next save moves what is newer
                why = why_immovable(path)
                logger.warning("%s: step %d is restored, but %s", self.directory, step, why)
                break
        return restored, ours.record.token if isinstance(ours, NativeCheckpoint) else ""

    def _stray(self, step: int, opened: Record, listing: Listing, by_number: bool) -> str:
        """On process 0, what is wrong with a step's ancestors; Stray if training went on beneath it, unless ``by_number``."""
        local = {} if self._local is None else self._local.saves
        if (other := self._persistent.not_continued(step, opened, listing, local)) is None:
            return ""
        text = f"{self.directory}: step {step} {stray_text(other)}"
        if by_number:
            return f"{text}. If step {other} is the one to go on from, restore({other}, ...): the next save retires what is newer"
        raise Stray(f"{text}. To go on from it all the same, restore({step}, ...)")

    def restore_newest(
        self,
        restore: Callable[[int, bool | None], RestoredStep],
        strict_latest: bool,
        list_steps: Callable[[], Sequence[tuple[int, bool | None]]],
        damaged: Callable[[int], None],
    ) -> RestoredStep | None:
        """The result of ``restore`` for the newest step that it can restore; None if there is no step. All processes try
        the steps of ``list_steps``; ``damaged`` is called for each that is skipped. CheckpointCorrupt: there are steps,
        and none can be loaded, or with ``strict_latest`` not the newest.
        """
        for look in range(_LOOKS):
            candidates, misfit, stray = list_steps(), None, None
            if strict_latest and self._local is not None:
                newest = max((step for step, _ in candidates), default=-1)
                if newer := self._local.newer_of_another_number(newest):
                    raise CheckpointError(newer)
            failures: list[tuple[int, CheckpointError]] = []
            try:
                for step, local_first in reversed(candidates):
                    try:
                        restored = restore(step, local_first)
                        self._say_newer(step, misfit)
                        return restored
                    except Misfit as error:
                        if strict_latest or not counts_as(error, Misfit, self._alone):
                            raise
                        misfit = misfit or error
                    except CheckpointError as error:
                        if counts_as(error, Stray, self._alone):
                            stray = stray or CheckpointError(str(error))
                            if strict_latest:
                                raise stray from error
                            _warn(f"{error}. It is left out, and the next save retires it")
                            continue
                        if not isinstance(error, CheckpointCorrupt | CheckpointNotFound):
                            raise
                        # as all processes take it: where they failed for different reasons, they must not go different ways
                        if counts_as(error, CheckpointNotFound, self._alone):
                            listed = {found for found, _ in list_steps()}
                            if step in listed:
                                raise
                            logger.info("%s: step %d was deleted meanwhile", self.directory, step)
                            if look < _LOOKS - 1 and max(listed, default=-1) > candidates[-1][0]:
                                break  # newer ones took its place, and an older one is not the newest
                            continue
                        if strict_latest or not counts_as(error, CheckpointCorrupt, self._alone):
                            raise
                        failures.append((step, error))
                        damaged(step)
                        _warn(f"{self.directory}: step {step} is damaged and skipped: {error}")
                else:
                    if misfit is not None:
                        raise misfit
                    if failures:
                        raise _none_loads(self.directory, failures)
                    if stray is not None:
                        raise stray
                    if not candidates:
                        self._say_newer(-1, None)
                        return None
            except Exception as error:
                _note(error, failures)
                raise
        raise CheckpointNotFound(
            f"{self.directory}: the steps in it are deleted faster than they can be read: does its "
            "writer keep at least the latest two, or give readers time (Options.delete_grace_secs)?"
        )

    def _say_newer(self, step: int, misfit: Misfit | None) -> None:
        """Warns of a newer local step than the restored one, if it is of another number of processes or other shardings."""
        found = "" if self._local is None else self._local.newer_of_another_number(step)
        if found := found or (misfit and str(misfit)):
            restored = "no step" if step < 0 else f"step {step}"
            _warn(f"{restored} is restored, and not the newest: {found}", _FROM_LATEST)


def _warn(message: str, level: int = 6) -> None:
    """Warns the caller of Checkpointer: past restore_newest, the method and its in_turn wrapper."""
    logger.warning(message)
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _note(error: Exception, failures: Sequence[tuple[int, Exception]]) -> None:
    """Adds to an error what failed restores noted: which objects they have set."""
    for note in {note: None for _, one in failures for note in getattr(one, "__notes__", ())}:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _none_loads(directory: str, failures: list[tuple[int, CheckpointError]]) -> CheckpointCorrupt:
    step, error = failures[0]
    numbers = ", ".join(str(failed) for failed, _ in failures)
    newest = CheckpointCorrupt(
        f"{directory}: none of the steps {numbers} can be loaded, and training does not start from scratch by "
        f"accident. Newest, step {step}: {error}",
        file=getattr(error, "file", None),
        leaf=getattr(error, "leaf", None),
    )
    newest.__cause__ = error
    return newest
