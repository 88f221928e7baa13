"""Take a directory over from an older writer, and move steps that training does not continue from.

A writer claims the directory before it lists the steps to restore. A step that another run commits
after that claim was already past its last ownership check when the claim was made; such a step is
called a stranger here. Strangers, and steps newer than the restored one, do not belong to the
history that this writer continues. The first save moves them away, not the restore, because a
process that restores may only want to look.
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
from ckpt_core._run.steps import Listing
from ckpt_core._run.tiers import LocalTier, Run, find_run, next_run

_READER_SECS = 30.0
"""Maximum time that a save waits for readers of a step that it has to move away."""
_PAUSE_SECS = 0.05


class Branch:
    """The branch of a run's history that this writer continues.

    Process 0 decides and changes the directory; the other processes receive its result.

    Args:
        run: directory of the run.
        fence: this writer's claim on that directory.
        retention: moves and deletes steps.
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
        self._looks_later = not run.local
        self._claimed = False
        self._steps_at_claim: set[int] | None = None  # None: this writer has not claimed it yet
        self._restored: set[int] = set()
        self._attempted: set[int] = set()  # steps that this writer began to save persistently
        self._settled = False
        self._told_of_repeat = False

    def set_local(self, local: LocalTier) -> None:
        """Adds a local tier, whose lineage then follows this branch."""
        self._local = local
        self._looks_later = True

    # ------------------------------------------------------------------------------- restores

    def begin_restore(self) -> None:
        """Claims the directories, unless read-only; then all processes list the local steps."""
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

    def note_listed(self, steps: list[int]) -> list[int]:
        """Returns ``steps``; remembers the first list after the claim, to recognize strangers."""
        if self._claimed and self._steps_at_claim is None:
            self._steps_at_claim = set(steps)
        return steps

    def restored(self, step: int | None) -> None:
        """Notes that ``step`` was restored, so the next save may continue from it."""
        if step is not None:
            self._restored.add(step)
            self._settled = False

    # ---------------------------------------------------------------------------------- saves

    def make_room(self, step: int, overwrite: bool, persists: bool, older: bool = False) -> None:
        """Called on all processes before a save: moves steps that ``step`` does not continue.

        Args:
            step: number of the step about to be saved.
            overwrite: the save may replace a step of this number.
            persists: the save also writes to the persistent directory.
            older: the step may be older than steps that are there, which is logged.

        Raises:
            CheckpointExists: this number, or newer steps (without ``older``), are on disk, and this
                writer has neither restored an older step nor seen those appear after its claim.
            CheckpointError: another writer has taken the directory over.
        """
        if self._settled and not persists:
            return
        if self._local is not None and not self._settled:
            self._local.claim()
        base = self._goes_on_from(step)
        result = self._on_first(
            lambda: self._clear(step, overwrite, base, older), "make way for a step"
        )
        if "run" in result and self._local is not None:
            self._local.begin_lineage(Run(*result["run"]), -1 if base is None else base)
        self._damaged.difference_update(result["gone"])
        self._settled = True
        if persists:
            self._attempted.add(step)

    def log_repeat(self, step: int) -> None:
        """Logs, once per Checkpointer, that a step which it already saved is not saved again."""
        if not self._told_of_repeat:
            self._told_of_repeat = True
            logger.info(
                "%s: step %d was saved by this Checkpointer already: it is neither compared nor saved again "
                "(overwrite=True does that), and save() gives False. This is said once",
                self._directory,
                step,
            )

    def guard(self, step: int, overwrite: bool, older: bool) -> Guard:
        """The ownership check for one save, whose ``make_room`` has returned.

        On a disk and without ``overwrite``, it also moves away a step of the same number that the previous
        writer committed after ``make_room`` looked. In an object store, and beneath local directories, it does
        what ``make_room`` left out, on the thread that writes.
        """
        base = self._goes_on_from(step)
        return Guard(
            self._fence,
            at_begin=(lambda: self._make_way(step, overwrite, base, older))
            if self._looks_later
            else None,
            at_commit=(lambda: self._move_same_step(step))
            if self._run.local and not overwrite
            else None,
        )

    def committed(self, step: int) -> None:
        """After a commit, on process 0: moves newer strangers away, then applies retention.

        If another writer has claimed the directory, deletes nothing: the steps there may be that
        writer's.
        """
        try:
            self._fence.check()
            listing = self._steps.look()
            strangers = {other for other in self._strangers(listing, -1, step) if other > step}
            self._move(strangers, step, wait_secs=0)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: nothing is deleted: %s", self._directory, error)
            return
        self._retention.apply(step, sorted({*listing.committed()} - strangers))

    def _goes_on_from(self, step: int) -> int | None:
        return max((s for s in self._restored | self._mine if s < step), default=None)

    def _clear(self, step: int, overwrite: bool, base: int | None, older: bool) -> dict[str, Any]:
        self._claim()
        if self._settled and self._looks_later:
            # A listing takes the time of a round trip, and where local directories take every save, the
            # caller never waits for this one: the thread that writes makes it (`guard`).
            known = (self._steps_at_claim or set[int]()) | (self._attempted & self._mine)
            there = known & {step} if older else known
            self._steps.refuse_taken(step, there, overwrite, self._damaged)
            return {"gone": []}
        result: dict[str, Any] = {"gone": sorted(self._make_way(step, overwrite, base, older))}
        if not self._settled:
            result["run"] = self._next_run(base)
        return result

    def _make_way(self, step: int, overwrite: bool, base: int | None, older: bool) -> set[int]:
        """Moves the steps away that ``step`` does not continue; returns them. See ``make_room``."""
        listing = self._steps.look()
        if self._steps_at_claim is None:
            self._steps_at_claim = {*listing.committed()}
        moving = set[int]()
        if not (overwrite and listing.has(step)):  # an overwrite moves no other step
            moving = self._strangers(listing, step, base) | self._left_behind(listing, step, base)
        if moving or not self._settled:
            self._fence.check()
        there = {*listing.committed(at_least=step)}
        if self._local is not None and base is None:
            there |= {other for other in self._local.from_earlier_run if other >= step}
        self._steps.refuse_taken(step, there - moving, overwrite, self._damaged, older)
        self._move(moving, base, _READER_SECS)
        return moving

    def _claim(self) -> None:
        self._fence.take()
        self._claimed = True

    def _strangers(self, listing: Listing, step: int, base: int | None) -> set[int]:
        """Steps that another run committed after this writer's claim; see the module docstring."""
        known = (self._steps_at_claim or set()) | (self._attempted - {step}) | self._damaged
        newer = -1 if base is None or self._run.local else base
        found = {other for other in listing.names if other > newer} - known
        return {*filter(listing.has, found)}

    def _left_behind(self, listing: Listing, step: int, base: int | None) -> set[int]:
        """Steps of a branch that training left when this writer restored an older step."""
        at_claim = self._steps_at_claim or set[int]()
        found = self._damaged & {step} if self._run.local else set[int]()
        if base is not None and any(restored < step for restored in self._restored):
            # Damaged steps are moved too, where a move is possible; an object store could only
            # delete them, and they may become readable again.
            damaged = self._damaged if self._run.local else set[int]()
            found |= {other for other in (at_claim - self._damaged) | damaged if other > base}
        return {*filter(listing.has, found)}

    def _move(self, steps: set[int], base: int | None, wait_secs: float) -> None:
        """Moves steps away, newest first: an interruption leaves no gap among the others."""
        moved: list[int] = []
        for step in sorted(steps, reverse=True):
            self._fence.check()
            self._move_when_unread(step, wait_secs)
            if self._steps_at_claim is not None:
                self._steps_at_claim.discard(step)
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

    def _move_when_unread(self, step: int, wait_secs: float) -> None:
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
                        f"{self._steps.path(step)} must be moved away before this save, but it is being "
                        "read: try again when the read has ended"
                    ) from None
            time.sleep(_PAUSE_SECS)

    def _move_same_step(self, step: int) -> None:
        """Between ownership check and commit: moves away a committed step of this number.

        File systems only; an object store cannot rename.
        """
        if self._run.local and self._steps.has(step):
            self._move({step}, self._goes_on_from(step), _READER_SECS)

    def _next_run(self, base: int | None) -> Run:
        if self._local is None:
            # Without local directories this writer cannot see which steps those of other hosts
            # hold.
            return next_run(self._backend, self._directory, goes_on=False, make=False)
        if base is None:
            goes_on = self._local.goes_on_from(self._steps.latest())
        else:
            goes_on = max(self._local.complete, default=None) == base
        return next_run(self._backend, self._directory, goes_on=goes_on, make=True)

    # ------------------------------------------------------------------------------ deletions

    def before_delete_newer(self, step: int) -> None:
        """Called before the steps newer than ``step`` are deleted: begins a new lineage.

        Hosts that are offline may hold those steps in local directories; there they no longer
        count.
        """

        def leave() -> dict[str, Any]:
            self._claim()  # a run that still trains from the newest step must not commit any more
            self._fence.check()
            return {"run": self._new_lineage()}

        self._follow_lineage(self._on_first(leave, "leave newer steps"), step)

    def before_delete(self, step: int, newest: Callable[[], int | None]) -> None:
        """Called before ``step`` is deleted; if it is the newest, begins a new lineage.

        Otherwise a local copy of it, or of a later step, on a host that is offline could be
        restored.

        Raises:
            CheckpointError: another writer has taken the directory over.
        """

        def leave() -> dict[str, Any]:
            if self._claimed:
                self._fence.check()
            return {"run": self._new_lineage()} if newest() == step else {}

        self._follow_lineage(self._on_first(leave, "leave a step"), step)

    def forget(self, deleted: list[int]) -> list[int]:
        """Forgets the steps that are gone, so that their numbers can be saved again; gives them.

        A step whose deletion failed, because it is being read, is known as before: it is not a stranger.
        """
        gone = [step for step in deleted if not self._steps.has(step)]
        known = (self._damaged, self._restored, self._attempted, self._steps_at_claim or set[int]())
        for steps in known:
            steps.difference_update(gone)
        return gone

    def _new_lineage(self) -> Run:
        make = self._local is not None
        return next_run(self._backend, self._directory, goes_on=False, make=make)

    def _follow_lineage(self, result: Mapping[str, Any], up_to: int) -> None:
        if "run" in result and self._local is not None:
            self._local.begin_lineage(Run(*result["run"]), up_to)

    # -------------------------------------------------------------------------- one for all

    def _on_first(self, work: Callable[[], dict[str, Any]], call: str) -> dict[str, Any]:
        """The result of ``work``, which process 0 runs; if it fails, every process raises."""

        def failed(kind: str, text: str) -> Exception:
            if kind == "CheckpointExists":
                return CheckpointExists(f"process 0: {text}")
            return CheckpointError(f"process 0: {kind}: {text}")

        return self._processes.run_on_first(work, self._options.timeout_secs, call, failed)


class Guard:
    """Allows commits while this writer owns the directory; a ``ckpt_core._save.write.Guard``.

    Args:
        fence: the claim.
        at_begin: called after the claim, before the save writes anything.
        at_commit: called after the ownership check, right before the commit.
    """

    def __init__(
        self,
        fence: Fence,
        *,
        at_begin: Callable[[], object] | None = None,
        at_commit: Callable[[], object] | None = None,
    ) -> None:
        self._fence = fence
        self._at_begin = at_begin
        self._at_commit = at_commit

    def take(self) -> None:
        """Claims the directory; called before the save writes anything."""
        self._fence.take()
        if self._at_begin is not None:
            self._at_begin()

    def check(self) -> None:
        """Raises if another writer has claimed the directory; called right before the commit."""
        self._fence.check()
        if self._at_commit is not None:
            self._at_commit()
