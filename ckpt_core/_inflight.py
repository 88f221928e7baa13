"""The one save of a Checkpointer that may be running, and the failure it may have left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckpt_core._errors import CheckpointError, GraceExceeded
from ckpt_core._results import PendingSave

_LOOK_SECS = 0.5
"""How often, while waiting for a save, to see whether the run was told to stop."""


def wait_for_all(
    saves: Sequence[InFlight], secs_left: Callable[[], float | None] = lambda: None
) -> None:
    """Returns when none of them is running; raises the first failure, with a note of the others."""
    failures: list[BaseException] = []
    for save in saves:
        try:
            save.wait(secs_left)
        except BaseException as error:
            failures.append(error)
    if failures:
        for other in failures[1:]:
            failures[0].add_note(f"ckpt: besides, {type(other).__name__}: {other}")
        raise failures[0]


class InFlight:
    """At most one background save; its failure is raised once, by whoever asks first."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._pending: PendingSave | None = None
        self.step: int | None = None

    @property
    def running(self) -> bool:
        """Whether a save is being written now."""
        return self._pending is not None and not self._pending.done()

    def start(self, step: int, work: Callable[[], Any], after: InFlight | None = None) -> None:
        """Begins a save in a thread of its own.

        Args:
            after: begin when the save that runs there has ended, well or not.
        """
        first = None if after is None else after._pending

        def work_then() -> None:
            if first is not None:
                first.wait()
            work()

        self._pending = PendingSave(f"{self._directory}: step {step}", work_then, "ckpt-save")
        self.step = step

    def raise_failure(self) -> None:
        """Raises what made an ended save fail, with its own type; once.

        The Checkpointer may then be used again, and nothing of the failed save is left.
        """
        if self._pending is None or self.running:
            return
        error, step = self._pending.take_error(), self.step
        self._pending, self.step = None, None
        if error is not None:
            error.add_note(f"while saving step {step} to {self._directory} in the background")
            raise error

    def wait(self, secs_left: Callable[[], float | None] = lambda: None) -> None:
        """Returns when no save is running; raises what made it fail.

        Args:
            secs_left: the rest of the grace period of a run that was told to stop; asked again and
                again, as that may happen meanwhile.

        Raises:
            GraceExceeded: the save was not done by then; it goes on.
        """
        while self._pending is not None:
            limit_secs = secs_left()
            look_secs = _LOOK_SECS if limit_secs is None else min(limit_secs, _LOOK_SECS)
            if self._pending.wait(look_secs):
                break
            if limit_secs is None or limit_secs > look_secs:
                continue
            raise GraceExceeded(
                f"{self._directory}: the save of step {self.step} did not end within the grace period "
                "(Options.grace_secs): if the process is killed now, that step is lost and the ones "
                "before it are not. Save more often, or ask for a longer grace period"
            )
        self.raise_failure()

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
