"""Taking a directory over, the step that training goes on from, and what makes way for the next one.

A writer claims the directory before it looks which step to restore, so whatever appears there later is
by a run that had passed its last check before: a stranger. Strangers, and the steps that are newer
than the restored one, are of another branch than the one that is about to grow. They are moved out of
the way by the first save and not by the restore: who only looks moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core._errors import CheckpointError, CheckpointExists, raised_by_a_handler
from ckpt_core._events import logger
from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.fence import Fence
from ckpt_core._run.retention import RETIRED, Retention
from ckpt_core._run.tiers import LocalTier, Run, find_run, next_run

_READER_SECS = 30.0
"""How long a save waits for whoever reads a step that has to make way."""
_PAUSE_SECS = 0.05


class Branch:
    """The branch of a run's history that one writer goes on with. Process 0 decides, and tells.

    Args:
        run: its directory.
        fence: this writer's claim on it.
        retention: moves and removes steps.
    """

    def __init__(
        self,
        run: RunDirectory,
        fence: Fence,
        retention: Retention,
    ) -> None:
        self._run = run
        self._steps = run.steps
        self._directory = run.path
        self._backend = run.backend
        self._fence = fence
        self._retention = retention
        self._processes = run.processes
        self._options = run.options
        self._mine = run.mine
        self._damaged = run.damaged
        self._local: LocalTier | None = None
        self._claimed = False
        self._before: set[int] | None = None  # what was there when the directory was claimed
        self._restored: set[int] = set()
        self._tried: set[int] = set()  # to be saved in the persistent directory
        self._settled = False
        self._told_of_repeat = False

    def set_local(self, local: LocalTier) -> None:
        """Steps lie in local directories, too."""
        self._local = local

    # ------------------------------------------------------------------------------- restores

    def begin_restore(self) -> None:
        """Claims the directories of a writer, and then looks into the local ones."""
        if not self._run.read_only and self._processes.index == 0:
            try:
                self._claim()
            except (OSError, CheckpointError) as error:
                if raised_by_a_handler(error) is not None:
                    raise
                logger.warning(
                    "%s could not be claimed, so a run that still saves there is not stopped: %s",
                    self._directory,
                    error,
                )
        if self._local is None:
            return
        self._local.follow(
            find_run(self._backend, self._directory, self._processes, self._options, make=False)
        )
        if not self._run.read_only:
            self._local.claim()
        self._local.look()

    def saw(self, steps: list[int]) -> list[int]:
        """The same steps, which are those that there are after the claim."""
        if self._claimed and self._before is None:
            self._before = set(steps)
        return steps

    def restored(self, step: int | None) -> None:
        """A step was restored: what is saved next may go on from it."""
        if step is not None:
            self._restored.add(step)
            self._settled = False

    # ---------------------------------------------------------------------------------- saves

    def make_room(self, step: int, overwrite: bool, persists: bool) -> None:
        """Before a save: whatever is no past of this step makes way, or the step is refused.

        Raises:
            CheckpointExists: there are steps that this writer neither restored nor left behind.
            CheckpointError: another writer has taken the directory over.
        """
        if self._settled and not persists:
            return
        if self._local is not None and not self._settled:
            self._local.claim()
        base = self._goes_on_from(step)
        told = self._told(lambda: self._clear(step, overwrite, base), "make way for a step")
        if "run" in told and self._local is not None:
            self._local.begin_lineage(Run(*told["run"]), -1 if base is None else base)
        self._damaged.difference_update(told["gone"])
        self._settled = True
        if persists:
            self._tried.add(step)

    def tell_of_repeat(self, step: int) -> None:
        """A save of a step that this writer has saved does nothing, whatever it holds: said once."""
        if not self._told_of_repeat:
            self._told_of_repeat = True
            logger.info(
                "%s: step %d was saved by this Checkpointer already: it is neither compared nor saved again "
                "(overwrite=True does that), and save() gives False. This is said once",
                self._directory,
                step,
            )

    def guard(self, step: int, overwrite: bool) -> Guard:
        """Asked by a save who may commit; a step that a run which is stopped now just managed to commit
        makes way even then."""
        return Guard(self._fence, None if overwrite else lambda: self._step_aside(step))

    def committed(self, step: int) -> None:
        """After a commit, on process 0: what appeared meanwhile makes way, and what is not kept goes.

        Nothing is touched once another writer has the directory: its steps are not ours to judge.
        """
        try:
            self._fence.check()
            strangers = {other for other in self._strangers(-1, step) if other > step}
            self._move(strangers, step, wait_secs=0)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: nothing is deleted: %s", self._directory, error)
            return
        self._retention.apply(step)

    def _goes_on_from(self, step: int) -> int | None:
        return max((s for s in self._restored | self._mine if s < step), default=None)

    def _clear(self, step: int, overwrite: bool, base: int | None) -> dict[str, Any]:
        self._claim()
        if self._before is None:
            self._before = set(self._steps.all())
        replaces = overwrite and self._steps.has(step)  # which leaves all others as they are
        way = set[int]() if replaces else self._strangers(step, base) | self._left(step, base)
        if way or not self._settled:
            self._fence.check()
        elsewhere = self._local.foreign if self._local is not None and base is None else set[int]()
        self._steps.refuse_taken(step, overwrite, self._damaged, elsewhere, way)
        self._move(way, base, _READER_SECS)
        told: dict[str, Any] = {"gone": sorted(way)}
        if not self._settled:
            told["run"] = self._next_run(base)
        return told

    def _claim(self) -> None:
        self._fence.take()
        self._claimed = True

    def _strangers(self, step: int, base: int | None) -> set[int]:
        """Steps that a run committed which was stopped: it had passed its last check before."""
        known = (self._before or set()) | (self._tried - {step}) | self._damaged
        newer = -1 if base is None or self._run.local else base
        found = {other for other in self._steps.numbers() if other > newer} - known
        return {other for other in found if self._steps.has(other)}

    def _left(self, step: int, base: int | None) -> set[int]:
        """Steps of a branch that training has left, by restoring an older one than these."""
        before = self._before or set[int]()
        found = self._damaged & {step}
        if base is not None and any(restored < step for restored in self._restored):
            # what is damaged hides nothing, but may be whole again some day
            damaged = self._damaged if self._run.local else set[int]()
            found |= {other for other in (before - self._damaged) | damaged if other > base}
        return {other for other in found if self._steps.has(other)}

    def _move(self, steps: set[int], base: int | None, wait_secs: float) -> None:
        """Moves steps out of the way, the newest first: at every moment those left are in order."""
        moved: list[int] = []
        for step in sorted(steps, reverse=True):
            self._fence.check()
            self._when_not_read(step, wait_secs)
            if self._before is not None:
                self._before.discard(step)
            if step not in self._damaged:
                moved.insert(0, step)
        if moved:
            logger.warning(
                "%s: training goes on from %s, of which %s no continuation: %s %s",
                self._directory,
                "the beginning" if base is None else f"step {base}",
                f"step {moved[0]} is" if len(moved) == 1 else f"steps {str(moved)[1:-1]} are",
                "moved to" if self._run.local else "deleted from",
                f"{self._directory}/{RETIRED}" if self._run.local else "the object store",
            )

    def _when_not_read(self, step: int, wait_secs: float) -> None:
        deadline = time.monotonic() + wait_secs
        while True:
            try:
                if step in self._damaged:
                    self._retention.set_aside(step)
                else:
                    self._retention.retire(step, self._run.local)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{self._steps.path(step)} has to make way, and is being read: try again when "
                        "that has ended"
                    ) from None
            time.sleep(_PAUSE_SECS)

    def _step_aside(self, step: int) -> None:
        """Between the check and the commit, where a directory can be renamed."""
        if self._run.local and self._steps.has(step):
            self._move({step}, self._goes_on_from(step), _READER_SECS)

    def _next_run(self, base: int | None) -> Run:
        if self._local is None:
            # what lies in local directories, of whatever host, cannot be seen from here
            return next_run(self._backend, self._directory, goes_on=False, make=False)
        if base is None:
            goes_on = self._local.goes_on_from(self._steps.latest())
        else:
            goes_on = max(self._local.complete, default=None) == base
        return next_run(self._backend, self._directory, goes_on=goes_on, make=True)

    # ------------------------------------------------------------------------------ deletions

    def leave_newer(self, step: int) -> None:
        """Before the steps after one are deleted: hosts that are away may have them, too."""

        def leave() -> dict[str, Any]:
            self._claim()  # who goes on from the newest one must not go on
            self._fence.check()
            return {"run": self._new_lineage()}

        self._follow(self._told(leave, "leave newer steps"), step)

    def before_delete(self, step: int, newest: Callable[[], int | None]) -> None:
        """Before a step is deleted: if it is the newest, none that grew from it may come back.

        Raises:
            CheckpointError: another writer has taken the directory over.
        """

        def leave() -> dict[str, Any]:
            if self._claimed:
                self._fence.check()
            return {"run": self._new_lineage()} if newest() == step else {}

        self._follow(self._told(leave, "leave a step"), step)

    def forget(self, deleted: list[int]) -> None:
        """Steps were deleted: their numbers are free. What is still there is no stranger, though."""
        for steps in (self._mine, self._damaged, self._restored):
            steps.difference_update(deleted)
        gone = [step for step in deleted if not self._steps.has(step)]
        for steps in (self._tried, self._before or set[int]()):
            steps.difference_update(gone)

    def _new_lineage(self) -> Run:
        make = self._local is not None
        return next_run(self._backend, self._directory, goes_on=False, make=make)

    def _follow(self, told: Mapping[str, Any], up_to: int) -> None:
        if "run" in told and self._local is not None:
            self._local.begin_lineage(Run(*told["run"]), up_to)

    # -------------------------------------------------------------------------- one for all

    def _told(self, work: Callable[[], dict[str, Any]], call: str) -> dict[str, Any]:
        """What process 0 makes of the directory; its failure is one of all."""

        def failed(kind: str, text: str) -> Exception:
            if kind == "CheckpointExists":
                return CheckpointExists(f"process 0: {text}")
            return CheckpointError(f"process 0: {kind}: {text}")

        return self._processes.run_on_first(work, self._options.timeout_secs, call, failed)


class Guard:
    """Who may commit; see ``ckpt_core._save.write.Guard``."""

    def __init__(self, fence: Fence, make_way: Callable[[], None] | None) -> None:
        self._fence = fence
        self._make_way = make_way

    def take(self) -> None:
        """Before anything is written."""
        self._fence.take()

    def check(self) -> None:
        """Last before the commit."""
        self._fence.check()
        if self._make_way is not None:
            self._make_way()
