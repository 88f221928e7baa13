"""Whether this run was told to stop: by a signal, or by jax's preemption service."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ckpt_core._events import logger
from ckpt_core._options import Options
from ckpt_core._processes import Processes, preemption_sync_point

_AGAIN = [True]
"""Whether the signal that is handled now was heard before by all who called a handler in turn."""


class StopSignal:
    """Notices SIGTERM (and others), and passes it on to whoever listened before.

    Handlers are installed by ``listen``, from the main thread only (Python allows no other). Where
    nobody listened before, the first signal is only noted, so that the run can save and end; a
    second one ends the process as ever. Several that listen are one: the first signal is that which
    any of them has not noticed yet. In forked children, and once closed, it only passes on.

    Attributes:
        noticed_at: time.monotonic() of the first signal; None while there was none.
    """

    def __init__(self, names: Sequence[str] = ("SIGTERM",)) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self._previous: dict[int, Any] = {}
        self._native: dict[int, int] = {}
        self._pid = os.getpid()
        self._closed = False
        self._deaf = False
        self.noticed_at: float | None = None

    def listen(self) -> None:
        """Starts to listen, if it does not yet and may."""
        if self._closed or self._previous:
            return
        if threading.current_thread() is not threading.main_thread():
            if not self._deaf:
                self._deaf = True
                logger.warning(
                    "%s will not be noticed: Python lets only the main thread listen, and this is "
                    "%r. Make the Checkpointer, or ask should_stop once, there",
                    ", ".join(number.name for number in self._numbers),
                    threading.current_thread().name,
                )
            return
        for number in self._numbers:
            native = _native_handler(number)
            self._previous[number] = signal.signal(number, self._on_signal)
            # Python's own, which calls handlers such as ours, is the same before and after
            if native not in (_DEFAULT, _IGNORE, _native_handler(number)):
                self._native[number] = native

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        chain = self._chain(number)
        listening = [listener for listener in chain if listener._hears()]
        # one that was left open by something long over must not end a run that asks only now, nor
        # where somebody else's handler lies between the two and calls it
        again = all([listener.noticed_at is not None for listener in listening]) and _AGAIN[-1]
        for listener in listening:
            if listener.noticed_at is None:
                listener.noticed_at = time.monotonic()
        first = chain[-1]
        previous = first._previous.get(number, signal.SIG_DFL)
        if number in first._native:  # of jax's preemption service, which Python does not know
            _call_native(first._native[number], number)
        elif callable(previous):
            _AGAIN.append(again)
            try:
                previous(number, frame)
            finally:
                _AGAIN.pop()
        elif previous == signal.SIG_DFL and again and (listening or self._is_installed(number)):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif listening:
            name = signal.Signals(number).name
            logger.warning("%s: the run is told to stop after the next save", name)

    def _chain(self, number: int) -> list[StopSignal]:
        """This one and those whose place was taken, newest first; closed ones may be among them."""
        chain: list[StopSignal] = [self]
        while number not in chain[-1]._native:
            owner = getattr(chain[-1]._previous.get(number), "__self__", None)
            if not isinstance(owner, StopSignal):
                break
            chain.append(owner)
        return chain

    def _hears(self) -> bool:
        # a forked child (a data worker) ends when it is told to: nothing in it will ask us
        return not self._closed and os.getpid() == self._pid

    def _is_installed(self, number: int) -> bool:
        """Whether the system calls this one, and nobody who came later and calls it in turn.

        A closed one that is called by another has nothing to say: before it came, there was nobody.
        """
        # bound methods are equal when they are the same method of the same object
        return signal.getsignal(number) == self._on_signal

    def close(self) -> None:
        """Puts the earlier handlers back; one that somebody chained to theirs only passes on."""
        self._closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in list(self._previous.items()):
            if self._is_installed(number):
                signal.signal(number, previous)
                if number in self._native:
                    ctypes.pythonapi.PyOS_setsig(number, ctypes.c_void_p(self._native[number]))
                del self._previous[number]


_DEFAULT, _IGNORE = 0, 1


def _native_handler(number: int) -> int:
    """Address of the handler that the system calls, whoever installed it."""
    get = ctypes.pythonapi.PyOS_getsig
    get.restype = ctypes.c_void_p
    return get(number) or _DEFAULT


def _call_native(address: int, number: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(number)


class Preemption:
    """The signal of this process; where several run, what all of them agreed on.

    There jax's preemption service listens to the signal, in every process, and its sync point gives
    all the same step to stop at. A handler of ours would take the signal away from it.

    Args:
        processes: of this run.
        policy: a save policy; one that asks for preemption makes this listen at once.
        options: which signals, and how long the process lives after one.
    """

    def __init__(self, processes: Processes, policy: object, options: Options) -> None:
        self._alone = processes.count == 1
        self._asked = bool(getattr(policy, "listens", False))
        self._signal = StopSignal(options.stop_signals)
        self._agreed_at: float | None = None
        self._step = 0
        self._asked_at_step: int | None = None
        self._told_of_no_service = False
        self._grace_secs = options.grace_secs
        # a Checkpointer that was dropped without close() asks no more: it must swallow no signal
        weakref.finalize(self, self._signal.close).atexit = False
        if self._asked and self._alone:
            self._signal.listen()

    def is_at(self, step: int) -> None:
        """The run is at this step now: all processes say so, for each step."""
        self._step = step

    @property
    def should_stop(self) -> bool:
        """Whether the signal came; listens from now on. With several processes, for this step."""
        if not self._alone:
            return self._agreed(self._step)
        self._signal.listen()
        return self._signal.noticed_at is not None

    def reached(self, step: int) -> bool:
        """Whether this is the step to stop at."""
        return self.should_stop if self._alone else self._agreed(step)

    def wants(self, step: int) -> bool:
        """For save policies: whether this step is to be saved since the run will stop."""
        if self._alone:
            return self._signal.noticed_at is not None
        return self._asked and self._agreed(step)

    @property
    def known(self) -> bool:
        """Whether it is known already that the run will stop; asks nobody."""
        return self._signal.noticed_at is not None if self._alone else self._agreed_at is not None

    def _agreed(self, step: int) -> bool:
        # the sync point is one step, asked about once; what was agreed stays
        if self._agreed_at is None and step != self._asked_at_step:
            self._asked_at_step = step
            agreed = preemption_sync_point(step)
            if agreed:
                self._agreed_at = time.monotonic()
            elif agreed is None and not self._told_of_no_service:
                self._told_of_no_service = True
                logger.warning(
                    "SIGTERM will not be noticed: several processes agree when to stop through "
                    "jax's preemption service, and it is off. Set jax_enable_preemption_service "
                    "before jax.distributed.initialize"
                )
        return self._agreed_at is not None

    def secs_left(self) -> float | None:
        """How much of the grace period is left; None where nobody said to stop, or how long it is."""
        told_at = [at for at in (self._signal.noticed_at, self._agreed_at) if at is not None]
        if self._grace_secs is None or not told_at:
            return None
        return max(0.0, min(told_at) + self._grace_secs - time.monotonic())

    def close(self) -> None:
        """Stops listening."""
        self._signal.close()
