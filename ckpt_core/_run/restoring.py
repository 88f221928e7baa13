"""Restores steps of a run, and removes steps from all its tiers; all processes make the same calls."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_core import _adapters, _load
from ckpt_core._directory import check_step, why_immovable
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    agreed_kind,
    counts_as,
)
from ckpt_core._operation import logger
from ckpt_core._results import RestoredStep
from ckpt_core._run import history
from ckpt_core._run.history import Identity, Trail
from ckpt_core._run.in_flight import wait_and_raise
from ckpt_core._run.run import Run
from ckpt_core._run.run_file import parse_run_file
from ckpt_core._run.steps import Listing, stray_text
from ckpt_core._run.tiers import Misfit
from ckpt_core._saved import Checkpoint, NativeCheckpoint

Reads = Callable[[_load.Opening], RestoredStep]
_LOOKS = 3  # times to list the directory, if every listed step is deleted before it is read
_FROM_LATEST, _FROM_RESTORE = 5, 7
"""Frames from the caller of ``restore_latest``, or ``restore``, to ``warnings.warn``."""


class Stray(CheckpointError):
    """A step that is not of the history which the steps before it tell, as in a copy of a run that went back."""


def restore_latest(
    run: Run, targets: Mapping[str, Any], request: _load.Request, strict_latest: bool
) -> RestoredStep | None:
    """Restores the newest intact step; None if there is no step. CheckpointCorrupt: there are steps, and none can be
    loaded, or with ``strict_latest`` not the newest.
    """
    _load.refuse_no_targets(targets)
    _begin(run)
    directory, local, alone = run.steps.directory, run.local, run.steps.processes.count == 1
    for look in range(_LOOKS):
        steps, misfit, stray = _candidates(run), None, None
        newer = local.newer_of_another_number(max(steps, default=-1)) if local else ""
        if newer and strict_latest:
            raise CheckpointError(newer)
        failures: list[tuple[int, CheckpointError]] = []
        try:
            for step, local_first in reversed(steps.items()):
                try:
                    restored = _restore(run, step, local_first, targets, request, by_number=False)
                    if local and (newer := local.newer_of_another_number(step) or misfit):
                        _warn(f"step {step} is restored, and not the newest: {newer}")
                    return restored
                except Misfit as error:
                    if strict_latest or not counts_as(error, Misfit, alone):
                        raise
                    misfit = misfit or error
                except CheckpointError as error:
                    if counts_as(error, Stray, alone):
                        stray = stray or CheckpointError(str(error))
                        if strict_latest:
                            raise stray from error
                        _warn(f"{error}. It is left out, and the next save retires it")
                        continue
                    if not isinstance(error, CheckpointCorrupt | CheckpointNotFound):
                        raise
                    # as all processes take it: they may have failed for different reasons
                    if counts_as(error, CheckpointNotFound, alone):
                        listed = _candidates(run)
                        if step in listed:
                            raise
                        logger.info("%s: step %d was deleted meanwhile", directory, step)
                        if look < _LOOKS - 1 and max(listed, default=-1) > max(steps):
                            break  # newer ones took its place, and an older one is not the newest
                        continue
                    if strict_latest or not counts_as(error, CheckpointCorrupt, alone):
                        raise
                    failures.append((step, error))
                    run.trail = replace(run.trail, damaged=run.trail.damaged | {step})
                    _warn(f"{directory}: step {step} is damaged and skipped: {error}")
            else:
                if failed := misfit or (_none_loads(directory, failures) if failures else stray):
                    raise failed
                if not steps:
                    if newer:
                        _warn(f"no step is restored, and not the newest: {newer}")
                    # at the beginning, whatever it saved before
                    run.trail = Trail(may_retire=True, root=-1)
                    _adapters.notice(targets.values())
                    return None
        except Exception as error:
            _note(error, failures)
            raise
    raise CheckpointNotFound(
        f"{directory}: the steps in it are deleted faster than they can be read: does its "
        "writer keep at least the latest two, or give readers time (Options.delete_grace_secs)?"
    )


def _candidates(run: Run) -> dict[int, bool | None]:
    """The steps that a restore of the newest one tries, ascending, and whether their local copies are tried first, None if
    that is not known; raises where it may not fall back to these.
    """

    def find() -> list[tuple[int, bool | None]]:
        steps, local, listing = run.steps, run.local_steps(), run.steps.look()
        if run.local is None and listing.run.name and steps.local and not steps.read_only:
            logger.warning(
                "%s: this run had local directories, which may hold newer steps: pass local_directory= again, or they "
                "count no more after the next save",
                steps.directory,
            )
        persistent = {*listing.committed()}
        found = sorted({*persistent, *local})
        both = persistent & local.keys()
        first = [(step, None if step in both else step in local) for step in found]
        if run.local is not None:
            run.local.refuse_older(max(found, default=-1))
            run.local.refuse_lost_run(run.latest)
            if both and found[-1] in both:  # of the newest alone, as that reads its record
                first[-1] = found[-1], not run.local.is_older(found[-1], listing.token(found[-1]))
        return first

    return dict(run.steps.on_first("go through the steps", find))


def restore(
    run: Run, step: int, targets: Mapping[str, Any], request: _load.Request
) -> RestoredStep:
    """Restores one step."""
    step = check_step(step)
    _begin(run)
    local_first = None if run.local is not None and step in run.local.complete else False
    return _restore(run, step, local_first, targets, request, by_number=True)


def _begin(run: Run) -> None:
    """Claims the directories, unless read-only; then all processes list the local steps."""
    run.apply_outcomes()
    if not run.steps.read_only and run.steps.processes.index == 0:
        try:
            run.disk.lease.claim()
        except (OSError, CheckpointError) as error:  # a restore works without
            logger.warning(
                "%s could not be claimed, so a run that still saves there is not stopped, and saves may fail, too: %s",
                *(run.steps.directory, error),
            )
    if run.local is not None:
        run.local.begin_restore()


def _restore(
    run: Run,
    step: int,
    local_first: bool | None,
    targets: Mapping[str, Any],
    request: _load.Request,
    *,
    by_number: bool,
) -> RestoredStep:
    """Restores a step, and notes where the run stands then."""

    def read(opening: _load.Opening) -> RestoredStep:
        return _load.restore_checkpoint(opening, targets, request, step)

    try:
        restored, token = _from_tiers(run, step, local_first, read, by_number=by_number)
    except BaseException as error:
        if isinstance(error, CheckpointCorrupt):
            run.links.forget()
        run.unread.failed(targets, error)
        raise
    run.unread.watch(restored, targets, request.matching.unexpected)
    run.trail = history.restored(run.trail, Identity(step, token))
    return restored


def _from_tiers(
    run: Run, step: int, local_first: bool | None, read: Reads, *, by_number: bool
) -> tuple[RestoredStep, str]:
    """What ``read`` makes of a step in the tier that counts, else in the other; also gives the token of the save.
    CheckpointCorrupt: every copy is damaged; CheckpointError: only the local directories have it, and not for these
    shardings; OSError: this process could not read it, which is no damage.
    """
    local, steps, alone = run.local, run.steps, run.steps.processes.count == 1
    failed: RestoredStep | CheckpointError | OSError | None = None
    if local is not None and local_first is None:

        def counts() -> bool:  # unless the persistent copy is a newer save
            there = step in local.complete
            return there and not local.is_older(step, steps.look().token(step))

        local_first = steps.on_first(f"find step {step}", counts)
    if local is not None and local_first:
        failed = local.restore(step, read)
        if isinstance(failed, RestoredStep):
            return failed, local.complete[step]
    opened = list[tuple[Checkpoint, Listing, str]]()

    def opening() -> Checkpoint:
        listing = steps.look()
        found = steps.open(step, listing, () if local is None else local.complete)
        stray = ""
        first = steps.processes.index == 0
        if first and isinstance(found, NativeCheckpoint) and found.record.parent:
            stray = _stray(run, step, found, listing, by_number)
        opened.append((found, listing, stray))
        return found

    try:
        restored = read(opening)
    except Exception as error:
        # as all processes take it: they may have failed for different reasons
        absent = counts_as(error, CheckpointNotFound, alone)
        damaged = counts_as(error, CheckpointCorrupt, alone)
        if local is None or not (absent or damaged):
            raise
        if failed is not None:
            if not absent and not counts_as(failed, OSError, alone):
                raise
            # only the local tier has the step, or had it: its writer may delete it
            vanished = isinstance(failed.__cause__, CheckpointNotFound)
            raise error if vanished and local.reads_alone else failed  # noqa: B904
        if absent:
            local.refuse_unread(step)
        if step not in local.complete:
            raise
        found = local.restore(step, read)  # an older save, but whole
        if isinstance(found, RestoredStep):
            return found, local.complete[step]
        raise found if counts_as(found, OSError, alone) else error  # noqa: B904
    ours, listing, stray = opened[-1]
    if stray:
        _warn(stray, _FROM_RESTORE)
    writes = steps.processes.index == 0 and steps.local and not steps.read_only
    writes = writes and os.access(steps.directory, os.W_OK)
    for one in sorted(one for one in listing.names if writes and one >= step):
        path = ours.path if one == step else steps.path(one, listing)
        if not os.access(path, os.W_OK):  # the next save moves what is newer
            logger.warning(
                "%s: step %d is restored, but %s", steps.directory, step, why_immovable(path)
            )
            break
    return restored, ours.record.token if isinstance(ours, NativeCheckpoint) else ""


def _stray(run: Run, step: int, opened: NativeCheckpoint, listing: Listing, by_number: bool) -> str:
    """On process 0, what is wrong with a step's ancestors; Stray if training went on beneath it, unless ``by_number``."""
    local = {} if run.local is None else run.local.saves
    other = run.steps.not_continued(step, opened.record, listing, local)
    if other is None:
        return ""
    text = f"{run.steps.directory}: step {step} {stray_text(other)}"
    if by_number:
        return f"{text}. If step {other} is the one to go on from, restore({other}, ...): the next save retires what is newer"
    raise Stray(f"{text}. To go on from it all the same, restore({step}, ...)")


def _warn(message: str, level: int = _FROM_LATEST) -> None:
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


def load(run: Run, step: int, like: Any, item: str | None, arguments: dict[str, Any]) -> Any:
    """The saved tree of one step, from the tier that ``Run.open`` takes; raises what ``restore`` does."""
    arguments["options"] = arguments.get("options") or run.steps.options
    request = _load.request_from("load", like, arguments)
    step = check_step(step)

    def opening() -> Checkpoint:  # later, inside the processes' agreement on the result
        return run.open(step)

    def read(opening: _load.Opening) -> Any:
        return _load.load_checkpoint(opening, like, item, request, step)

    try:
        if run.local is None or step not in run.local.complete:
            found = read(opening)
        else:
            found = run.local.read(step, read, opening)
            if isinstance(found, (CheckpointError, OSError)):
                cause, reader = found.__cause__, run.local.reads_alone  # a writer deletes meanwhile
                raise cause if reader and isinstance(cause, CheckpointNotFound) else found
    except CheckpointCorrupt:
        run.links.forget()
        raise
    run.unread.took(step, item)
    return found


def delete(run: Run, step: int) -> None:
    """Deletes a step in all tiers, after running saves."""
    run.refuse_unless_open("delete")
    _remove(run, check_step(step), newer=False)


def rollback_to(run: Run, step: int) -> list[int]:
    """Deletes every step newer than ``step``; returns them."""
    run.refuse_unless_open("rollback_to")
    step = check_step(step)
    wait_and_raise(run.slots)  # a running save ends with retention
    local = (
        set[int]() if run.local is None else {one for one in run.local.taken_steps if one > step}
    )
    said = _remove(run, step, newer=True)
    return sorted({*said["gone"], *local})  # also those that could not be read


def _remove(run: Run, step: int, *, newer: bool) -> dict[str, Any]:
    """Removes a step, or all ``newer`` ones: the persistent copies on process 0, then on each process the local ones. Nothing
    changes before all have announced the same call. Gives what ``Disk`` does.
    """
    wait_and_raise(run.slots)
    before, local = run.apply_outcomes(), run.local
    together = run.steps.round(f"{'roll back to' if newer else 'delete'} step {step}")
    there = together.decide("", lambda _: json.dumps(run.all()))
    if newer and local is not None:
        local.claim()  # later they might be a newer writer's
    held = {} if local is None else local.complete
    standing = {*json.loads(there)}  # retention has taken others
    # Already before the removal, as an interrupt may come at any moment. A step that is forgotten though
    # it exists makes way for the next save of its number; one that is gone and not forgotten would
    # never be saved again.
    if newer:
        run.trail = history.rolled_back(before, step, None)
    else:
        run.trail = history.deleted(before, step, standing)
    removed = (before.own - run.trail.own) & standing
    run.decision.forget()

    def work() -> dict[str, Any]:
        if newer:
            return run.disk.delete_newer(step, held)
        run.refuse_unread(step)
        return run.disk.delete_step(step, held)

    try:
        said = together.first(work)
        if newer:
            target = said["target"] and Identity(*said["target"])
            run.trail = history.rolled_back(before, target.step if target else -1, target)
        if local is not None:
            left = parse_run_file(said["run"].encode(), run.steps.directory)
            local.delete(left, functools.partial(operator.lt if newer else operator.eq, step))
    except BaseException as error:
        if local is not None:
            local.forget_uncounted()
        # only where all processes know of the failure, so that all go on from the same trail
        alone = run.steps.processes.count == 1
        agree = isinstance(error, Exception) and (alone or agreed_kind(error))

        def stand() -> bool:
            with contextlib.suppress(OSError, CheckpointError):
                return removed <= {*run.all()}
            return False

        if agree and run.steps.on_first("look for steps", stand):
            absent = isinstance(error, CheckpointNotFound)  # raised before anything was changed
            run.trail = before if absent else replace(before, lineage="")
        raise
    return said
