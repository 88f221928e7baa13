"""What a Checkpointer is doing: the call that runs, and the background save of each tier."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckpt_core._background import PendingSave, unfinished, wait_for_saves
from ckpt_core._errors import ANSWERS, CheckpointError, GraceExceeded, at_the_call
from ckpt_core._fork import HOME, forked
from ckpt_core._processes import Round

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_SECS = 0.5  # interval at which a wait for a save checks whether the run was asked to stop


def wait_for_all(
    saves: Sequence[SaveSlot], secs_left: Callable[[], float | None] = lambda: None
) -> GraceExceeded | None:
    """Blocks until every save has ended; returns the error of one that outlasts the grace period."""
    late: GraceExceeded | None = None
    for save in saves:
        late = save.wait(secs_left) or late
    return late


def refuse_if_running(saves: Sequence[SaveSlot], together: Round) -> None:
    """For ``Options(on_pending="fail")``: CheckpointError on all processes if a save is running on one."""
    processes, one = together.processes, next((one for one in saves if one.running), None)
    mine = "" if one is None else f"{one.directory}: the save of step {one.step}"
    mine = f"{mine} in process {processes.index}" if mine and processes.count > 1 else mine
    if mine := together.decide(mine, lambda found: next(filter(None, found), "")):
        raise CheckpointError(
            f"{mine} is still running, and Options(on_pending='fail') does not wait"
        )


def wait_and_raise(
    saves: Sequence[SaveSlot], secs_left: Callable[[], float | None] = lambda: None
) -> None:
    """Blocks until every save has ended; raises an error that no caller has received yet."""
    raise_failures(saves, wait_for_all(saves, secs_left))


def raise_failures(saves: Sequence[SaveSlot], late: GraceExceeded | None = None) -> None:
    """Raises ``late``, or else the first error of the ended saves, each error once; other errors become notes on it."""
    with saves[0].raise_lock:
        first: BaseException | None = late
        try:
            for save in saves:
                first = save.take_failure(first)
            if first is not None:
                raise first
        finally:
            del first, late  # their tracebacks refer to this frame: break the reference cycle


def wait_for_others(saves: Sequence[SaveSlot], timeout_secs: float, name: str = "") -> None:
    """Blocks until nobody else in this process saves to the directories of these, or to what has this name in them."""
    own = [save.now and save.now[0] for save in saves]
    for save in saves if unfinished else ():
        wait_for_saves(f"{save.directory}/{name}" if name else save.directory, timeout_secs, own)


@dataclass
class SaveSlot:
    """At most one background save; its error is raised once, to the first caller that asks."""

    directory: str
    now: tuple[PendingSave, int] | None = None  # the last one, and its step
    # held while an error is raised, so only once
    raise_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def running(self) -> bool:
        """Whether a save is being written now."""
        return self.step is not None

    @property
    def step(self) -> int | None:
        """The step of the save that is running now."""
        now = self.now
        return None if now is None or now[0].ended else now[1]

    @property
    def is_this_thread(self) -> bool:
        """Whether the current thread is the one of the save, for example inside a listener."""
        now = self.now
        return now is not None and now[0].is_this_thread()

    def start(
        self,
        step: int,
        path: str,
        work: Callable[[], Any],
        after: SaveSlot | None = None,
        *,
        low: bool = False,
    ) -> None:
        """Starts a save to ``path`` in a thread; ``work`` runs once the save in ``after`` has ended, however that ended."""
        first = None if after is None or after.now is None else after.now[0]

        def work_then() -> None:
            if first is not None:
                first.wait()
            work()

        pending = PendingSave(path, work_then, "ckpt-save", low=low)
        try:
            self.now = pending, step
            pending.start()
        except BaseException:
            # Later waits must wait for a save whose thread runs, and not for one that never
            # started.
            if pending.abandon():
                self.now = None
            raise

    def take_failure(self, first: BaseException | None) -> BaseException | None:
        """``first``, with the error of the ended save as a note, or that error if there is none; nobody else gets it."""
        now = self.now
        if now is None or now[0].unreported is None:
            return first
        pending, step = now
        error = pending.take_error()
        if error is None or error is first:  # saves may share what failed, such as a snapshot
            return first
        if first is not None:
            first.add_note(f"ckpt: besides, {type(error).__name__}: {error}")
            return first
        error.add_note(f"while saving step {step} to {self.directory} in the background")
        return error

    def wait(self, secs_left: Callable[[], float | None]) -> GraceExceeded | None:
        """Blocks until the save has ended; gives an error if the grace period, which may begin meanwhile, ends first."""
        now = self.now
        if now is None:
            return None
        pending, step = now
        while True:
            limit_secs = secs_left()
            look_secs = _LOOK_SECS if limit_secs is None else min(limit_secs, _LOOK_SECS)
            if pending.wait(look_secs):
                return None
            if limit_secs is not None and limit_secs <= look_secs:
                return GraceExceeded(
                    f"{self.directory}: the save of step {step} did not end within the grace period "
                    "(Options.grace_secs): if the process is killed now, that step is lost and the ones "
                    "before it are not. Save more often, or ask for a longer grace period"
                )


def in_turn(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorator: the method waits until no other thread is in a decorated method of the object's run, and until others in
    this process have saved there, unless it closes, or is ``load``, which waits for its step alone. A call that would wait
    for itself raises CheckpointError: from a signal handler, a listener or a policy, or from a background save.
    """
    name, code = method.__name__, method.__code__
    waits = name not in ("close", "load")
    # an item may be called step, too
    unnamed_step = "step" in code.co_varnames[: code.co_posonlyargcount]

    @functools.wraps(method)
    def taking_turns(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        if unnamed_step and "step" in kwargs and not args:
            step = kwargs["step"]
            raise TypeError(f"the step comes first, without a name: write {name}({step!r}, ...)")
        if os.getpid() != HOME.pid:
            raise forked()  # a lock that was held at the fork stays locked forever in the child
        run = self._run
        if any(save.is_this_thread for save in run.slots):
            raise _refusal(run.steps.directory, name, "its save in the background")
        with run.lock:
            if run.doing:
                raise _refusal(run.steps.directory, name, f"{run.doing}()")
            run.doing = name
            try:
                if unfinished and waits:
                    wait_for_others(run.slots, run.steps.options.timeout_secs)
                return method(self, *args, **kwargs)
            except ANSWERS as error:
                raise at_the_call(error)  # noqa: B904
            finally:
                run.doing = ""

    return taking_turns


def _refusal(directory: str, name: str, inside: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: {name}() was called from within {inside}, by a signal handler, a listener or "
        "a policy: this would deadlock. Set a flag there instead, and make the call after that one returns"
    )
