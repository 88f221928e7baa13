"""The one save of a Checkpointer that may be running, and the failure it may have left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_core._background.pending import PendingSave
from ckpt_core._errors import CheckpointError, GraceExceeded

_LOOK_SECS = 0.5
"""How often, while waiting for a save, to see whether the run was told to stop."""


def wait_for_all(
    saves: Sequence[InFlight], secs_left: Callable[[], float | None] = lambda: None
) -> GraceExceeded | None:
    """Returns when none of them is running, well or not; or, where one is late, the error for that.

    What a signal handler raises meanwhile comes out as it is; the saves go on.
    """
    late: GraceExceeded | None = None
    for save in saves:
        late = save.wait(secs_left) or late
    return late


def settle_all(
    saves: Sequence[InFlight], secs_left: Callable[[], float | None] = lambda: None
) -> None:
    """Returns when none of them is running; raises what made one fail, if nobody was told."""
    raise_failures(saves, wait_for_all(saves, secs_left))


def raise_failures(saves: Sequence[InFlight], late: GraceExceeded | None = None) -> None:
    """Raises what made ended saves fail, once: the first, or that one is late, and notes of the others."""
    with saves[0].telling:
        failed = [save for save in saves if save.failure is not None]
        first = late or (failed.pop(0).failure if failed else None)
        if first is None:
            return
        for save in failed:
            error = save.failure
            first.add_note(f"ckpt: besides, {type(error).__name__}: {error}")
            save.forget_failure()
        error = None
        try:
            if late is not None:
                raise late
            for save in saves:
                save.raise_failure()
        finally:
            del first, late  # they know this frame, which must not know them


class InFlight:
    """At most one background save; its failure is raised once, by whoever asks first.

    Attributes:
        telling: held by the thread that raises failures.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._now: tuple[PendingSave, int] | None = None
        self.telling = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether a save is being written now."""
        now = self._now
        return now is not None and not now[0].done()

    @property
    def step(self) -> int | None:
        """The step of the save that is running now."""
        now = self._now
        return None if now is None or now[0].done() else now[1]

    @property
    def is_this_thread(self) -> bool:
        """Whether it is the save that asks, such as from a listener."""
        now = self._now
        return now is not None and now[0].is_this_thread()

    def start(
        self,
        step: int,
        work: Callable[[], Any],
        after: InFlight | None = None,
    ) -> None:
        """Begins a save in a thread of its own.

        Args:
            after: begin when the save that runs there has ended, well or not.
        """
        first = None if after is None or after._now is None else after._now[0]

        def work_then() -> None:
            if first is not None:
                first.wait()
            work()

        pending = PendingSave(f"{self._directory}: step {step}", work_then, "ckpt-save")
        try:
            self._now = pending, step
            pending.start()
        except BaseException:
            # whoever waits next must wait for a save that goes on, and not for one that never began
            if pending.abandon():
                self._now = None
            raise

    @property
    def failure(self) -> BaseException | None:
        """What made the save fail that ended, if nobody was told."""
        now = self._now
        return None if now is None else now[0].untold

    def raise_failure(self) -> None:
        """Raises what made an ended save fail, if nobody was told; the next save may then begin."""
        now = self._now
        if now is not None:
            now[0].raise_untold(
                f"while saving step {now[1]} to {self._directory} in the background"
            )

    def forget_failure(self) -> None:
        """The failure was told together with another."""
        if self._now is not None:
            self._now[0].take_error()

    def wait(self, secs_left: Callable[[], float | None]) -> GraceExceeded | None:
        """Returns when the save that is running now has ended, well or not, or is late.

        Args:
            secs_left: the rest of the grace period of a run that was told to stop; asked again and
                again, as that may happen meanwhile.
        """
        now = self._now
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
                    f"{self._directory}: the save of step {step} did not end within the grace period "
                    "(Options.grace_secs): if the process is killed now, that step is lost and the ones "
                    "before it are not. Save more often, or ask for a longer grace period"
                )

    def refuse_if_running(self) -> None:
        """For callers that do not want to wait.

        Raises:
            CheckpointError: a save is running.
        """
        if self.running:
            raise CheckpointError(
                f"{self._directory}: the save of step {self.step} is still running, and "
                "Options(on_pending='fail') does not wait"
            )
