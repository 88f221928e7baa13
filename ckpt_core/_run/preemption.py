"""Whether this run was asked to stop: by a signal, or by jax's preemption service."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ckpt_core._fork import around_forks
from ckpt_core._operation import logger
from ckpt_core._options import Options
from ckpt_core._processes import Processes, preemption_service_listens, preemption_sync_point

_NEXT_SAVE_SECS = 10.0
"""So long after the signal a loop goes on for the next save, if the last step was declined just before it."""


_PID = os.getpid()
_listeners: weakref.WeakSet[Preemption] = weakref.WeakSet()
_previous: dict[int, list[Any]] = {}
"""The handlers in whose places ours was installed, also again over a later one; the first one first."""
_calls: dict[int, list[bool]] = {}
"""Of a signal, for each handler that is being called, whether all listeners had seen it before."""


def _listening(number: int) -> list[Preemption]:
    return [one for one in _listeners if number in one.numbers]


def _on_signal(number: int, frame: FrameType | None) -> None:
    listening, earlier, calls = _listening(number), _previous[number], _calls.setdefault(number, [])
    again = calls[-1] if calls else all([one.noticed_at is not None for one in listening])
    if not calls:
        for one in listening:
            one.noticed_at = one.noticed_at or time.monotonic()
        if any([one.passes_on for one in listening]):
            again = False  # the others of the run know of it, and this one must not be missing
            signal.raise_signal(signal.SIGTERM)
    previous = earlier[max(0, len(earlier) - 1 - len(calls))]
    ends = signal.getsignal(number) is _on_signal or os.getpid() != _PID
    if callable(previous):
        calls.append(again)
        try:
            previous(number, frame)
        finally:
            calls.pop()
    elif previous == signal.SIG_DFL and again and ends:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    elif listening:
        name = signal.Signals(number).name
        logger.warning("%s: the run is asked to stop after the next save", name)


def _restore(numbers: Iterable[int]) -> None:
    """Puts the earlier handlers back where nobody listens, and ours is the one that is installed."""
    if threading.current_thread() is threading.main_thread():  # no other may
        for number in numbers:
            if not _listening(number) and signal.getsignal(number) is _on_signal:
                signal.signal(number, _previous[number].pop())


def _begin_child() -> None:
    """The earlier handlers of a child, such as a data worker: it never saves."""
    _listeners.clear()
    _restore([*_previous])


around_forks(after_in_child=_begin_child)


class Preemption:
    """Whether the run was asked to stop: by a signal to this process or, with several, by agreement. Then jax's
    preemption service hears SIGTERM in each, and its sync point gives all the same step; a handler of ours would take
    SIGTERM away from it, so other signals alone are heard, and passed on as SIGTERM. A policy that ``listens`` makes this
    object listen: one handler, for all objects, also calls the one that was installed before. Where none was, the first
    signal is only recorded, so that the run can save; the second one, which all have seen, ends the process.
    """

    def __init__(self, processes: Processes, policy: object, options: Options) -> None:
        self._alone = processes.count == 1
        self.passes_on = not self._alone
        self._asked = bool(getattr(policy, "listens", False))
        self._others = [name for name in options.stop_signals if name != "SIGTERM"]
        heard = options.stop_signals if self._alone else self._others
        self.numbers = [signal.Signals[name] for name in heard]
        self.noticed_at: float | None = None  # time.monotonic() of the first signal
        self._agreed_at: float | None = None
        self.step = 0  # that the run has reached; all processes set it at each step
        self._asked_at_step: int | None = None
        self._closed = self._told_of_thread = self._told_of_no_service = False
        self._declined_unaware = False
        self._grace_secs = options.grace_secs
        # A Checkpointer dropped without close() must not keep swallowing signals.
        weakref.finalize(self, _restore, self.numbers).atexit = False
        if self._asked:
            self._listen()

    def _listen(self) -> None:
        """Installs the handler, unless installed or closed; warns once outside the main thread."""
        # without the service nobody would get what is passed on, and SIGTERM would end this process
        heard = self._alone or (self._others and preemption_service_listens())
        if not heard or self._closed or self in _listeners:
            return
        if threading.current_thread() is not threading.main_thread():
            if not self._told_of_thread:
                self._told_of_thread = True
                logger.warning(
                    "%s will not be noticed: Python lets only the main thread listen, and this is "
                    "%r. Make the Checkpointer, or ask should_stop once, there",
                    ", ".join(number.name for number in self.numbers),
                    threading.current_thread().name,
                )
            return
        _listeners.add(self)
        for number in self.numbers:
            if signal.getsignal(number) is not _on_signal:
                _previous.setdefault(number, []).append(signal.signal(number, _on_signal))

    @property
    def should_stop(self) -> bool:
        """Whether the signal came; starts listening. With several processes: whether all agreed."""
        self._listen()
        if not self._alone:
            return self._agreed(self.step)
        if self.noticed_at is None:
            return False
        # a step that was declined before the signal would be lost: the next one is saved first, if it comes soon
        waits = self._declined_unaware and time.monotonic() < self.noticed_at + _NEXT_SAVE_SECS
        return not waits

    def decided(self, saved: bool, preempted: bool) -> None:
        """Notes what the policy said about a step, and whether it knew then that the run will stop."""
        self._declined_unaware = self._alone and self._asked and not saved and not preempted

    def reached(self, step: int) -> bool:
        """Whether this is the step to stop at."""
        return self.should_stop if self._alone else self._agreed(step)

    def wants(self, step: int) -> bool:
        """For save policies: whether to save this step because the run will stop."""
        if self._alone:
            return self.noticed_at is not None
        return self._asked and self._agreed(step)

    @property
    def will_stop(self) -> bool:
        """Whether this process already knows that the run will stop; does not communicate."""
        return self.noticed_at is not None if self._alone else self._agreed_at is not None

    def _agreed(self, step: int) -> bool:
        # Ask the sync point once per step; once all agreed to stop, that is final.
        if self._agreed_at is None and step != self._asked_at_step:
            self._asked_at_step = step
            agreed = preemption_sync_point(step)
            if agreed:
                self._agreed_at = time.monotonic()
            elif agreed is None and not self._told_of_no_service:
                self._told_of_no_service = True
                logger.warning(
                    "%s will not be noticed: several processes agree when to stop through "
                    "jax's preemption service, and it is off. Set jax_enable_preemption_service "
                    "before jax.distributed.initialize",
                    ", ".join(["SIGTERM", *self._others]),
                )
        return self._agreed_at is not None

    def secs_left(self) -> float | None:
        """Seconds left of the grace period; None before the signal or without ``grace_secs``."""
        told_at = [at for at in (self.noticed_at, self._agreed_at) if at is not None]
        if self._grace_secs is None or not told_at:
            return None
        return max(0.0, min(told_at) + self._grace_secs - time.monotonic())

    def close(self) -> None:
        """Stops listening; restores the earlier handlers, beneath a later one or in another thread ours only calls on."""
        self._closed = True
        _listeners.discard(self)
        _restore(self.numbers)
