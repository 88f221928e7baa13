"""Waits for new steps, as an evaluator does, and keeps the last one from retention meanwhile."""

from __future__ import annotations

import contextlib
import operator
import time

from ckpt_core._directory.locks import deleting, reading
from ckpt_core._format.orbax_write import STEP_METADATA
from ckpt_core._run.steps import Steps

_LOOK_SECS = 1.0


class Following:
    """The steps of a directory, one after the other.

    The lock is on another file than that of readers: a step that is wanted is not deleted by retention, but
    training that goes back need not wait for whoever evaluates a step that it leaves.

    Args:
        steps: of the directory.
        locks: whether it is in a file system.
    """

    def __init__(self, steps: Steps, locks: bool) -> None:
        self._steps = steps
        self._locks = locks
        self._wanted = contextlib.ExitStack()

    def wait(self, after: int | None, timeout_secs: float | None) -> int | None:
        """Blocks until the newest step is newer than ``after``; returns it, or None on timeout.

        No retention deletes it until the next call, or ``end``.
        """
        try:
            after = None if after is None else operator.index(after)
        except TypeError:
            raise TypeError(
                f"after must be the number of a step, or None, got {after!r}: pass what the last call gave"
            ) from None
        self.end()
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        while True:
            newest = self._steps.latest()
            if newest is not None and (after is None or newest > after) and self._want(newest):
                return newest
            left = _LOOK_SECS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(_LOOK_SECS, left))

    def _want(self, step: int) -> bool:
        """Keeps a step; whether it is still there."""
        listing = self._steps.look()
        names = listing.directories(step)
        if not names:
            return False
        if self._locks:
            try:
                path = f"{self._steps.directory}/{names[0]}/{STEP_METADATA}"
                self._wanted.enter_context(reading(path, b""))
            except FileNotFoundError:  # deleted meanwhile, or a step of Orbax without that file
                return self._steps.has(step)
        return True

    def end(self) -> None:
        """No step is wanted any more."""
        self._wanted.close()


def unless_wanted(path: str, locks: bool) -> contextlib.AbstractContextManager[None]:
    """A block in which nobody can begin to want the step at ``path``.

    Raises:
        BlockingIOError: somebody wants it.
    """
    return deleting(f"{path}/{STEP_METADATA}") if locks else contextlib.nullcontext()
