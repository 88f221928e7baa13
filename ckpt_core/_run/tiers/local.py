"""The local tier: each process keeps the newest steps in its own directory, on disk or tmpfs."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ckpt_core import _load
from ckpt_core._directory import MAX_STEP
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    NewerFormat,
    agreed_kind,
    counts_as,
    is_visible,
    mark_agreed,
)
from ckpt_core._operation import logger
from ckpt_core._results import RestoredStep
from ckpt_core._run.history import Identity, Saves
from ckpt_core._run.in_flight import SaveSlot, wait_for_others
from ckpt_core._run.run_file import RunFile
from ckpt_core._run.steps import RunSteps, agree_on_run_file, saved_by
from ckpt_core._run.tiers.ended import name_other_runs
from ckpt_core._run.tiers.folders import Folders, folder_of, local_root
from ckpt_core._run.tiers.judge import (
    Judgement,
    LocalParts,
    State,
    WholeStep,
    cause_of,
    damage_of,
    judge,
    judge_failure,
    misfit_of,
    unread_of,
    vote,
)
from ckpt_core._run.tiers.peers import OPENING, Table, exchange_addresses, fetch_first
from ckpt_core._run.tiers.save import Copier, LocalSave
from ckpt_core._save import RecordFields, SaveJob
from ckpt_core._saved import NativeCheckpoint

T = TypeVar("T")


def open_local(given: str | os.PathLike[str], steps: RunSteps) -> LocalTier:
    """A run's local tier; all processes must call it. If this one cannot have steps there, it raises and all hear of it."""
    processes, root, refusal = steps.processes, "", None
    try:
        root = local_root(given, steps.directory)
    except Exception as error:
        if processes.count == 1:
            raise
        refusal = error  # the others are about to find the run, and to meet
    run = agree_on_run_file(steps, make=not steps.read_only and refusal is None)
    try:
        if refusal is not None:
            raise refusal
        folders = Folders(folder_of(run, root, steps.directory), steps)
        if not steps.read_only:
            folders.clean()
    except BaseException as error:
        steps.round(OPENING).refuse(error)
        raise
    return LocalTier(folders, run, steps)


class LocalTier:
    """The steps of one run in local directories; all processes make the same calls. Without a name it has none yet."""

    def __init__(self, folders: Folders, run: RunFile, steps: RunSteps) -> None:
        processes, options = steps.processes, steps.options
        self._folders = folders
        self.directory = folders.path
        self.in_flight = SaveSlot(self.directory)
        self._processes = processes
        self._alone = processes.count == 1
        # its writer is at work meanwhile; it agrees with nobody
        self.reads_alone = steps.read_only and self._alone
        self._steps = steps
        self._run = run
        # The steps that all processes have, as of their last agreement, with the tokens of their saves.
        self.complete: dict[int, str] = {}
        self._opened: dict[int, NativeCheckpoint] = {}  # own parts, as the last look found them
        self._found = Judgement({}, {})  # by the last look
        self._has_saved = False
        shared = steps.directory if steps.local and not steps.read_only else None
        self._peers = peers = exchange_addresses(processes, options, folders.find, shared)
        self._judged = Table(processes, peers.folder, "judged")
        self._groups = Table(processes, peers.folder, "groups")
        weakref.finalize(self, peers.close).atexit = False  # the server's threads are daemons
        self._copier = Copier(peers, folders)
        # Equal on all processes: a step of which all have copies, and the one copied now or last.
        self._protected: int | None = None
        self._copied: int | None = None
        wait_for_others([self.in_flight], options.timeout_secs)
        self.look()
        if not self.complete:
            name_other_runs(os.path.dirname(folders.root), run.name, steps.directory)

    @property
    def taken_steps(self) -> set[int]:
        """The complete steps, and those that could not be read: no save begins in their place."""
        return {*self.complete, *self._found.unread} - {MAX_STEP}

    @property
    def saves(self) -> Saves:
        """What the parts of this process say of the complete steps, as the last look found them."""
        return {step: saved_by(opened.record) for step, opened in self._opened.items()}

    def refuse_older(self, newest: int) -> None:
        """Raises what kept a process from reading a local step that is newer than ``newest``, if anything did."""
        if (unread := max(self._found.unread, default=-1)) > newest:
            raise self._of_unread(
                unread,
                "and training does not go back to an older one by accident",
                "to go back to an older one, restore it by its number: restore(step, ...)",
            )

    def refuse_unread(self, step: int) -> None:
        """Raises why a step that is in no other place cannot be read from the local directories, if something is known."""
        for unread in (step, MAX_STEP):
            if unread in self._found.unread:
                so = "which says nothing about what was saved"
                raise self._of_unread(unread, so, "so does a new process")
        if step in self._found.counts:
            raise CheckpointError(self._of_another_number(step))

    def newer_of_another_number(self, step: int) -> str:
        """What is said of the newest local step of another number of processes, if it is newer than this one."""
        newest = max(self._found.counts, default=-1)
        return self._of_another_number(newest) if newest > step else ""

    def _of_another_number(self, step: int) -> str:
        saved, now = self._found.counts[step], self._processes.count
        return (
            f"{saved} process{'es' * (saved > 1)} saved the local step {step} in {self._folders.root} and {now} "
            f"run{'s' * (now == 1)} now; local steps are for as many as saved them. To go on from it, "
            f"start once with {saved}, before anything else is saved, and save(..., force=True) to {self._steps.directory}"
        )

    def _of_unread(self, step: int, so: str, advice: str) -> OSError | NewerFormat:
        _, number, why, process = self._found.unread[step]
        what = "the local steps" if step == MAX_STEP else f"the local step {step}"
        text = f"process {process}: {what} cannot be read, {so}: {why}. restore_latest() looks again; {advice}"
        return OSError(number, text) if number else NewerFormat(text)

    def refuse_lost_run(self, newest: Callable[[], int | None]) -> None:
        """Raises CheckpointCorrupt if no step is left of those that the run had; or what kept a process from reading."""
        found, lost = self._found, self._found.lost
        if self._steps.read_only or (lost is None and not found.unread and not found.counts):
            return
        if MAX_STEP not in found.unread and newest() is not None:
            return
        self.refuse_older(-1)
        why = self.newer_of_another_number(-1)
        if not why and lost is not None:
            why = (
                f"{self.directory}: step {lost} is not whole in the local directories: parts of processes "
                f"{found.partial[lost]} are not here. Start the run where they are"
            )
        root, name = os.path.split(self._folders.root)
        raise CheckpointCorrupt(
            f"{why}. There is no other step, and training does not start from scratch by accident; to begin anew, remove what "
            f"the run left on each host: ckpt rm --local {shlex.quote(root)} --run {name}"
        )

    def is_older(self, step: int, token: str | None) -> bool:
        """Whether the local copy of a complete step is an older save than the one with ``token``, if there is one."""
        return self._run.newer(step, token or "", than=self.complete[step])

    def claim(self) -> None:
        """Claims this process's directory: the next commit of an older writer there fails."""
        self._folders.claim()

    def begin_restore(self) -> None:
        """Looks anew, as process 0 sees the run now, and claims the folders of a writer; all processes must call it."""
        self._use(agree_on_run_file(self._steps, make=False))
        if not self._steps.read_only:
            if self._run.earlier and not os.path.isdir(self._folders.root):  # a save has begun
                logger.warning("%s is gone, with the steps that it alone had", self._folders.root)
            self.claim()
        self.look()

    def _use(self, run: RunFile) -> None:
        """Takes over which saves count, as another writer may have changed it."""
        if run.name:
            self._run = run

    def delete(self, run: RunFile, unwanted: Callable[[int], bool] | None = None) -> None:
        """Takes over which saves count, on all processes; deletes the ``unwanted`` steps, by default what counts no more."""
        self._use(run)
        last = self._run.earlier[-1][1] if self._run.earlier else MAX_STEP
        gone = unwanted or (lambda step: step > last)
        if unwanted is None and (left := [step for step in sorted(self.complete) if gone(step)]):
            logger.warning(
                "%s: deleted steps %s: training does not continue from them",
                self.directory,
                str(left)[1:-1],
            )
        self.complete = {step: one for step, one in self.complete.items() if not gone(step)}
        unread = {step: one for step, one in self._found.unread.items() if not gone(step)}
        counts = {step: count for step, count in self._found.counts.items() if not gone(step)}
        self._found = replace(self._found, unread=unread, counts=counts)
        self._copier.cancel()
        self._folders.delete(gone)

    def forget_uncounted(self) -> None:
        """After a removal that failed or was interrupted: forgets the steps that count no more, and deletes nothing."""
        with contextlib.suppress(OSError, CheckpointError):
            self._use(self._steps.run_file())
            order, steps = self._run.order, self.complete.items()
            self.complete = {s: token for s, token in steps if order(s, token) is not None}

    def refresh(self) -> None:
        """A reader alone looks again: its writer may have saved, left or replaced steps since."""
        if self.reads_alone:
            self._use(self._steps.run_file())
            self.look()

    def look(self) -> None:
        """Lists the parts that each process sees; all agree on the steps that every one has or can get."""
        together = self._steps.round("look at the local steps")
        try:
            places, unread, counts = self._folders.look(self._run)
        except BaseException as error:
            together.refuse(error)
            raise
        parts, serves = [seen for seen, _ in places], self._peers.server is not None
        seen = LocalParts(parts, not self._steps.read_only, serves, unread, counts)

        def judged(values: list[str]) -> str:
            found = judge([LocalParts.parse(text) for text in values], self._peers.machines)
            return found.dump(len(values), self._judged.publish)

        answer = together.decide(seen.dump(), judged)
        found = Judgement.parse(answer, self._processes.index, self._judged.row)
        partial, self._found = self._found.partial, found
        for step, absent in sorted(found.partial.items()):
            if self.reads_alone and partial.get(step) == absent:
                continue  # said before
            logger.warning(
                "step %d is not whole in the local directories, so it is not restored from them: parts of processes "
                "%s are lost, not readable, or of another save",
                step,
                absent,
            )
        self.complete = {step: whole.token for step, whole in found.steps.items()}
        self._opened = {
            seen.step: opened
            for seen, opened in places
            if seen.in_place and self.complete.get(seen.step) == seen.token
        }
        self._protected = max((s for s, whole in found.steps.items() if whole.twice), default=None)

    def opening(self, step: int) -> _load.Opening:
        """A function that opens this process's part of a step, and gets it before if it is lacking."""

        def open_part() -> Any:
            whole = self._found.steps.get(step)
            if whole and whole.sources and whole.token == self.complete.get(step):
                self._fetch_lost(step, whole)
            # a reader alone opens it anew the next time, as it may be replaced meanwhile
            found = (self._opened.pop if self.reads_alone else self._opened.get)(step, None)
            return self._folders.own.open(step) if found is None else found

        return open_part

    def _fetch_lost(self, step: int, whole: WholeStep) -> None:
        """Gets this process's part of a step, which it lacks or which is damaged; the others only serve files. Raises
        CheckpointNotFound if it may not be brought here, else what ``fetch_first`` does.
        """
        mine, target = self._processes.index, self._folders.own_target(step)
        lost = f"the part of process {mine} of step {step} is lost or damaged in its local directory, and could not be fetched"
        (sources,), save = whole.sources.values(), (step, whole.token)
        source, failures = fetch_first(save, sources, self._peers, target, lost)
        state, why = self._folders.left_out.pop(save, ("", ""))
        was = {"damaged": f"was damaged ({why})", "unread": f"could not be read ({why})"}
        there = f"process {source.process}"
        logger.warning(
            "%s: this process's part of the step %s; it was fetched from %s and verified%s",
            target.path,
            was.get(state, "was missing"),
            "another folder of this host" if source.process == mine else there,
            f", after failures {'; '.join(failures)}" if failures else "",
        )
        whole.sources.clear()

    def prepare(
        self,
        identity: Identity,
        parent: Identity | None,
        fields: RecordFields,
        *,
        replaced_first: bool = False,
    ) -> tuple[LocalSave, Callable[[], None]]:
        """A save for its snapshot, and what then runs it and deletes old steps; ``replaced_first``: after the persistent one."""
        (step, token), folders = identity, self._folders
        path = folders.own.new_path(step)
        folders.claim_again_if_emptied()
        job = SaveJob(
            path,
            True,
            folders.backend,
            fields,
            self._steps.options,
            self._processes,
            overwrite=True,
            own=True,
            step=step,
            token=token,
            parent=parent,
        )

        save = LocalSave(job, folders, self._peers, self._copier, self._groups)

        def save_and_retain() -> None:
            if step not in self.complete and folders.backend.exists(path):
                folders.discard(step)  # left by a failed save, or of another lineage
            # The processes replace their parts at different moments: meanwhile it is incomplete.
            before = self.complete.get(step)
            self.complete = {s: old for s, old in self.complete.items() if s != step}
            self._opened.pop(step, None)
            try:
                save.run()
            except BaseException as error:
                stands = not save.may_have_replaced or (self._alone and not is_visible(error))
                if before is not None and stands and not replaced_first:
                    self.complete = {**self.complete, step: before}
                raise
            # steps of another number of processes are not needed any more after a save
            self._found = replace(self._found, counts={})
            if folders.is_mine():
                if not self._has_saved:
                    folders.discard_leftovers(of_others=True)
                self._retain(save, step)
            self._has_saved = True

        return save, save_and_retain

    def _retain(self, save: LocalSave, step: int) -> None:
        """Keeps the newest complete steps and the saved one, and deletes other parts here. With partners it also keeps the
        newest step that all have copied, and the one that they copy: after the loss of a host only a copy is of use.
        """
        complete = {**self.complete, step: save.token}
        kept = {step, *sorted(complete)[-self._steps.options.local_max_to_keep :]}
        if self._peers.copies:
            if save.protected and save.protected in self.complete.items():  # not saved once more
                self._protected = save.protected[0]
            elif self._protected not in self.complete:
                self._protected = max(self.complete, default=None)
            if save.copies:
                self._copied = step
                self._copier.copy(step, save.token)
            kept |= complete.keys() & {self._protected, self._copied}
        self.complete = {one: complete[one] for one in kept}
        self._folders.retain(kept, step, self._peers.sources)

    def restore(
        self, step: int, load: Callable[[_load.Opening], RestoredStep]
    ) -> RestoredStep | CheckpointError | OSError:
        """Restores a step from the local directories, see ``read``."""
        found = self.read(step, load)
        newest = isinstance(found, RestoredStep) and step == max(self.complete)
        if newest and self._peers.copies:
            self._copied = step  # partners copy it where they lost their copies
            if self._folders.lease.claimed and self._copier.report[0] != "busy":
                self._copier.copy(step, self.complete[step])
        return found

    def read(
        self, step: int, load: Callable[[_load.Opening], T], first: _load.Opening | None = None
    ) -> T | CheckpointError | OSError:
        """What ``load`` makes of a step, whose first try is with ``first``; all processes must call it. Where parts are
        damaged, their processes get them from others, and all try once more. Gives the error if all agreed to try another
        copy, a Misfit if all parts are whole; raises one that the local files do not cause.
        """
        token, fetches = self.complete.get(step), not (self._alone or self._steps.read_only)
        unread: Exception | None = None
        state = functools.partial(self._folders.state, step, token)  # of this process's part
        try:
            while True:
                try:
                    return load(first or self.opening(step))
                except Exception as error:
                    if not self._alone and not agreed_kind(error):
                        # the other processes would not take part in another agreement
                        if isinstance(error, CheckpointCorrupt) and state() == "whole":
                            raise misfit_of(self.directory, step, error) from error
                        raise
                    elsewhere, first = first is not None, None
                    kinds = (CheckpointCorrupt, CheckpointNotFound, OSError)
                    if elsewhere and any(counts_as(error, kind, self._alone) for kind in kinds):
                        continue  # it may be the other tier's copy that cannot be read
                    verdict = self._agree_after(step, error, state)
                    if verdict == "raise":
                        raise
                    unread = unread or (error if verdict == "unread" else None)
                    if verdict in ("mend", "unread") and fetches:
                        fetches = False
                        self.look()  # without the parts that are of no use
                        if token is not None and self.complete.get(step) == token:
                            continue
                    logger.warning(
                        "step %d is not restored from local directories: %s", step, error
                    )
                    if unread is not None:
                        was, why = self._folders.left_out.get((step, token or ""), ("", ""))
                        why = why if was == "unread" else unread
                        found, kind = unread_of(step, why, unread), OSError.__name__
                        self._folders.try_again()
                        if not self._alone:
                            self.look()  # it is there as before
                    else:
                        self.complete.pop(step, None)
                        fits = self._alone or verdict != "other"
                        made = damage_of if fits else misfit_of
                        found = made(self.directory, step, error)
                        kind = type(found).__name__
                    found.__cause__ = unread or error
                    mark_agreed(found, kind)  # by the agreement on it
                    return found
        finally:
            self._folders.try_again()

    def _agree_after(self, step: int, error: Exception, state: Callable[[], State]) -> str:
        """If one process fails, all fail: they agree to mend it, to try another copy, or to raise."""
        try:
            there = self._folders.backend.exists(self._folders.own.path(step))
            mine = vote(error, there, (lambda: "whole") if self._alone else state)
        except OSError as other:
            # its folder cannot be listed any more, and the others wait for the vote
            mine = "unread" if cause_of(other) == "disk" else "raise"
        return self._steps.round("give up a local step").decide(mine, judge_failure)

    def close(self, secs_left: float | None = None) -> None:
        """Releases the claim, when partners have copies of the last step or no grace period is left."""
        limit_secs = self._steps.options.timeout_secs
        try:
            self._copier.close(self.complete, limit_secs if secs_left is None else secs_left)
        finally:
            self._peers.withdraw()
            self._folders.close()
