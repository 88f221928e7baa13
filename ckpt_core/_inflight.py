"""The one save of a Checkpointer that may be running, and the failure it may have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._results import PendingSave


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

    def start(self, step: int, work: Callable[[], Any]) -> None:
        """Begins a save in a thread of its own."""
        self.step = step
        self._pending = PendingSave(f"{self._directory}: step {step}", work, "ckpt-save")

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

    def wait(self) -> None:
        """Returns when no save is running; raises what made it fail."""
        if self._pending is not None:
            self._pending.wait()
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
