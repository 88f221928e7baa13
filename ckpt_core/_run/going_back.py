"""Removes steps of a run in all tiers: one, or all that are newer than one. All processes make the same calls."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_core._directory import check_step
from ckpt_core._errors import CheckpointNotFound, agreed_kind
from ckpt_core._run import history
from ckpt_core._run.history import Identity, Trail
from ckpt_core._run.in_flight import settle_all
from ckpt_core._run.run import Run
from ckpt_core._run.run_file import parse_run_file


def delete(run: Run, step: int) -> None:
    """Deletes a step in all tiers, after running saves."""
    run.refuse_unless_open("delete")
    step = check_step(step)

    def delete_it(held: Mapping[int, str]) -> dict[str, Any]:
        run.tiers.refuse_unread(step)
        return run.disk.delete_step(step, held)

    def after(before: Trail, standing: set[int], _: Mapping[str, Any]) -> Trail:
        return history.deleted(before, step, standing)

    _remove(run, f"delete step {step}", delete_it, functools.partial(operator.eq, step), after)


def rollback_to(run: Run, step: int) -> list[int]:
    """Deletes every step newer than ``step``; returns them."""
    run.refuse_unless_open("rollback_to")
    step = check_step(step)

    def after(before: Trail, _: set[int], said: Mapping[str, Any]) -> Trail:
        if not said:
            return history.rolled_back(before, step, None)
        target = said["target"] and Identity(*said["target"])
        return history.rolled_back(before, target.step if target else -1, target)

    newer = functools.partial(operator.lt, step)
    settle_all(run.slots)  # a running save ends with retention
    local = {*filter(newer, () if run.local is None else run.local.standing)}
    work = functools.partial(run.disk.delete_newer, step)
    said = _remove(run, f"roll back to step {step}", work, newer, after, claims=True)
    return sorted({*said["gone"], *local})  # also those that could not be read


def _remove(
    run: Run,
    call: str,
    work: Callable[[Mapping[int, str]], dict[str, Any]],
    gone: Callable[[int], bool],
    after: Callable[[Trail, set[int], Mapping[str, Any]], Trail],
    *,
    claims: bool = False,
) -> dict[str, Any]:
    """What ``work`` gives, which removes persistent steps on process 0; then each process removes its local ones that are
    ``gone``. Nothing changes before all have announced the same ``call``. ``work`` gets the tokens of local steps, and
    gives the run file as ``run``; ``after`` makes the new trail of the steps that were there and what ``work`` gave. With
    ``claims`` local directories are claimed first: later they might be a newer writer's.
    """
    settle_all(run.slots)
    before = run.apply_outcomes()
    together = run.directory.processes.round(call, run.directory.options.timeout_secs)
    there = together.decide("", lambda _: json.dumps(run.tiers.all()))
    local = run.local
    if claims and local is not None:
        local.claim()
    held = {} if local is None else local.complete
    # Already before the removal, as an interrupt may come at any moment. A step that is forgotten though
    # it exists makes way for the next save of its number; one that is gone and not forgotten would
    # never be saved again.
    standing = {*json.loads(there)}  # retention has taken others
    run.trail = after(before, standing, {})
    removed = (before.own - run.trail.own) & standing
    run.decision.forget()
    try:
        said = together.first(lambda: work(held))
        run.trail = after(before, standing, said)
        if local is not None:
            local.delete(parse_run_file(said["run"].encode(), run.directory.path), gone)
    except BaseException as error:
        run.forget_stale_local()
        # only where all processes know of the failure, so that all go on from the same trail
        alone = run.directory.processes.count == 1
        agree = isinstance(error, Exception) and (alone or agreed_kind(error))
        if agree and run.on_first("look for steps", lambda: run.tiers.have(removed)):
            absent = isinstance(error, CheckpointNotFound)  # raised before anything was changed
            run.trail = before if absent else replace(before, lineage="")
        raise
    return said
