"""The steps that every load and restore takes: open, match, plan, read, assemble, apply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_core._load.agreement import LoadAgreement, identity_of
from ckpt_core._load.checkpoint import Checkpoint, SavedItem
from ckpt_core._load.differences import check_patterns, raise_mismatches
from ckpt_core._load.execute import execute, share_between, wanted_chunks
from ckpt_core._load.in_place import InPlace
from ckpt_core._load.live_objects import refuse_twice
from ckpt_core._load.matching import plan_item
from ckpt_core._load.outcomes import live_of
from ckpt_core._load.planned import ItemPlan
from ckpt_core._load.readers.wants import Reading
from ckpt_core._load.request import Request, Tally
from ckpt_core._load.session import progress, watched
from ckpt_core._storage import new_context

Opening = Callable[[], Checkpoint]
Chosen = Mapping[str, tuple[SavedItem, Any]]
"""For each item to load, by its name in the result: the saved item and its target."""


@dataclass(frozen=True)
class LoadJob:
    """What one load or restore has to do.

    Attributes:
        opening: function that opens the checkpoint.
        choose: function that picks the wanted items of the opened checkpoint.
        request: the arguments that all loads share.
        step: step number, reported in events; None outside a Checkpointer.
        restores: True for a restore, which sets live objects in place; a load sets copies of them.
    """

    opening: Opening
    choose: Callable[[Checkpoint], Chosen]
    request: Request
    step: int | None = None
    restores: bool = False


@dataclass(frozen=True)
class Loaded:
    """The result of a load or restore.

    Attributes:
        checkpoint: the checkpoint that was loaded.
        values: the value of each item, by its name in the result.
        plans: the executed plan of each item, for the report.
    """

    checkpoint: Checkpoint
    values: dict[str, Any]
    plans: Sequence[ItemPlan]


def run(job: LoadJob) -> Loaded:
    """Runs a load or restore; if it fails, live objects are set back or made unusable.

    Called on every process that takes part. Processes agree once after reading. A restore that sets objects
    while it reads also agrees after planning, so that no process changes an object while another cannot match
    the checkpoint; and so does a load that sends arrays between processes.

    If the checkpoint is replaced meanwhile, all processes load the new one.
    """
    request, loading = job.request, _Loading(job)
    agreement = LoadAgreement(request.options, request.round, alone=request.as_numpy)
    call = "load"
    if job.restores:
        call = "restore with atomic_restore" if request.options.atomic_restore else "restore"
    while True:
        agreement.identity = loading.identity
        try:
            if call == "restore" or request.options.broadcast:
                agreement.plan(loading.plan, call)
            agreement.read(loading.read, call)
            return agreement.set(loading.apply) if agreement.sets else loading.apply()
        except BaseException as error:
            loading.give_up(error)
            if not agreement.begins_anew(error):
                raise
        loading = _Loading(job)


class _Loading:
    """State of one load or restore. Its methods are called in the order in which they stand here.

    ``read`` calls ``plan`` itself if that has not been called before.
    """

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._watching = contextlib.ExitStack()
        self._in_place = InPlace(job.request.options.max_host_bytes) if job.restores else None
        self._plans: Sequence[ItemPlan] = ()
        self._leaves: list[list[Any]] = []
        self._planned = False

    def plan(self) -> None:
        """Opens the checkpoint and matches every item against its target; changes no object."""
        job = self._job
        with contextlib.ExitStack() as failing:
            self._checkpoint = job.opening()
            watching = watched(self._checkpoint, job.request.options, job.step)
            self._tally: Tally = self._watching.enter_context(watching)
            failing.push(self._watching)
            self._match()
            failing.pop_all()
        self._planned = True

    def _match(self) -> None:
        checkpoint, request = self._checkpoint, self._job.request
        self._context = new_context()
        chosen = self._job.choose(checkpoint)
        plans = [
            plan_item(checkpoint, saved, target, request, self._context)
            for saved, target in chosen.values()
        ]
        if self._in_place is not None:
            lives = [live_of(plan.outcome) for plan in plans]
            refuse_twice({name: target for name, (_, target) in chosen.items()}, lives)
        if request.rules.rename is not None or any(plan.mismatches for plan in plans):
            raise_mismatches(checkpoint, plans, request)
        if request.only is not None:
            check_patterns(checkpoint, plans, request)
        if checkpoint.gather is not None:
            checkpoint.gather(wanted_chunks(checkpoint, plans, request))
        options = request.options
        self._tally.progress = progress(checkpoint, plans, options, self._job.step)
        self._names, self._plans = list(chosen), plans

    def identity(self) -> str:
        """What all processes must load alike, as text: the save, and the leaves that lie on several of them.

        In a Checkpointer's directory they must load the same step in any case.
        """
        checkpoint = self._checkpoint
        alike = self._job.step is not None
        sets = self._in_place is not None and any(live_of(plan.outcome) for plan in self._plans)
        return identity_of(checkpoint.path, checkpoint.attempt, self._plans, alike, sets)

    def read(self, reading: Reading) -> None:
        """Reads and assembles all items' leaves; a restore sets NNX, Keras and torchax objects meanwhile."""
        if not self._planned:
            self.plan()
        with self._watching:
            if self._in_place is not None:
                for plan in self._plans:
                    self._in_place.begin(plan)
            self._leaves = [
                execute(
                    self._checkpoint,
                    plan,
                    self._job.request,
                    self._context,
                    self._tally,
                    reading,
                    self._in_place,
                )
                for plan in self._plans
            ]
            if self._checkpoint.shared:
                share_between(self._plans, self._leaves, self._checkpoint.shared)

    def apply(self) -> Loaded:
        """Builds the value of each item; a restore sets the live objects that are not set yet."""
        if self._in_place is not None:
            values = self._in_place.finish(self._plans, self._leaves)
        else:
            pairs = zip(self._plans, self._leaves, strict=True)
            values = [plan.outcome.make(leaves) for plan, leaves in pairs]
        named = dict(zip(self._names, values, strict=True))
        return Loaded(self._checkpoint, named, self._plans)

    def give_up(self, error: BaseException) -> None:
        """After a failure: releases the lock; sets live objects back or makes them unusable."""
        try:
            self._watching.__exit__(type(error), error, error.__traceback__)
        finally:
            if self._in_place is not None:
                self._in_place.give_up(error)
            # the error's traceback keeps this object alive, so it must release the old arrays
            self._plans, self._leaves = (), []
