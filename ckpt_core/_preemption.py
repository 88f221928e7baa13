"""Whether this run was told to stop: by a signal, or by jax's preemption service."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from ckpt_core._processes import Processes, preemption_sync_point
from ckpt_core._results import logger


class StopSignal:
    """Notices SIGTERM, and passes it on to whoever listened before.

    Handlers are installed by ``listen``, from the main thread only (Python allows no other). Where
    nobody listened before, the first SIGTERM is only noted, so that the run can save and end; a
    second one ends the process as ever.
    """

    def __init__(self) -> None:
        self._noticed = threading.Event()
        self._previous: Any = None
        self._listening = False

    @property
    def noticed(self) -> bool:
        """Whether the signal came."""
        return self._noticed.is_set()

    def listen(self) -> None:
        """Starts to listen, if it does not yet and may."""
        if self._listening or threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._listening = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self._noticed.is_set()
        self._noticed.set()
        if callable(self._previous):
            self._previous(number, frame)
        elif again and self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        else:
            logger.warning("SIGTERM: the run is told to stop after the next save")

    def close(self) -> None:
        """Puts the earlier handler back, unless somebody else has replaced ours."""
        if not self._listening or threading.current_thread() is not threading.main_thread():
            return
        # bound methods are equal when they are the same method of the same object
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)
        self._listening = False


class Preemption:
    """The signal of this process, or the agreement of all of them.

    Args:
        processes: of this run.
        policy: a save policy; one that asks for preemption makes this listen at once.
    """

    def __init__(self, processes: Processes, policy: object) -> None:
        self._alone = processes.count == 1
        self._asked = bool(getattr(policy, "listens", False))
        self._signal = StopSignal()
        if self._asked:
            self._signal.listen()

    @property
    def should_stop(self) -> bool:
        """Whether the signal came; listens from now on."""
        self._signal.listen()
        return self._signal.noticed

    def reached(self, step: int) -> bool:
        """Whether this is the step to stop at."""
        return self.should_stop if self._alone else preemption_sync_point(step)

    def wants(self, step: int) -> bool:
        """For save policies: whether this step is to be saved since the run will stop."""
        if self._alone or not self._asked:
            return self._signal.noticed
        return preemption_sync_point(step)

    def close(self) -> None:
        """Stops listening."""
        self._signal.close()
