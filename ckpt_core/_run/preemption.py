"""Whether this run was asked to stop: by a signal, or by jax's preemption service."""

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

from ckpt_core._fork import around_forks
from ckpt_core._operation import logger
from ckpt_core._options import Options
from ckpt_core._processes import Processes, preemption_service_listens, preemption_sync_point

_NEXT_SAVE_SECS = 10.0
"""So long after the signal a loop goes on for the next save, if the last step was declined just before it."""
_SEEN_BEFORE = [True]
"""Stack, one entry per nested handler call: True if every listener so far had seen the signal."""
_heard: set[int] = set()
"""Signals that somebody has listened for."""


class StopSignal:
    """Records SIGTERM (or the given signals) and calls the handler that was installed before. ``listen`` installs the
    handler, in the main thread only (a rule of Python). If there was no handler before, the first signal is only recorded, so
    that the run can save and exit; the second one ends the process. Several listening objects form a chain and act as one: a
    signal counts as the first one while any of them has seen none. A forked child gets the earlier handlers; there, and after
    ``close``, ours only calls the previous one. With ``passes_on`` each signal raises SIGTERM here, for which somebody else
    listens, and none ends the process.
    """

    def __init__(self, names: Sequence[str] = ("SIGTERM",), *, passes_on: bool = False) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self._passes_on = passes_on
        self._previous: dict[int, Any] = {}
        self._native: dict[int, int] = {}
        self._pid = os.getpid()
        self._closed = False
        self._warned_of_thread = False
        self.noticed_at: float | None = None  # time.monotonic() of the first signal

    def listen(self) -> None:
        """Installs the handlers, unless installed or closed; warns once outside the main thread."""
        if self._closed or self._previous:
            return
        if threading.current_thread() is not threading.main_thread():
            if not self._warned_of_thread:
                self._warned_of_thread = True
                logger.warning(
                    "%s will not be noticed: Python lets only the main thread listen, and this is "
                    "%r. Make the Checkpointer, or ask should_stop once, there",
                    ", ".join(number.name for number in self._numbers),
                    threading.current_thread().name,
                )
            return
        _heard.update(self._numbers)
        for number in self._numbers:
            native = _native_handler(number)
            self._previous[number] = signal.signal(number, self._on_signal)
            # If the native handler changed, the earlier one was not Python's own dispatcher: keep
            # it, because Python does not know it and cannot call it.
            if native not in (_DEFAULT, _IGNORE, _native_handler(number)):
                self._native[number] = native

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        chain = self.chain(number)
        listening = [listener for listener in chain if listener._is_active()]
        # Only a signal that every listener has already seen ends the process: a listener left open
        # by an earlier run must not end a run that began to listen later. _SEEN_BEFORE carries this
        # through foreign handlers that lie between two of our listeners.
        seen_before = (
            all([listener.noticed_at is not None for listener in listening]) and _SEEN_BEFORE[-1]
        )
        for listener in listening:
            if listener.noticed_at is None:
                listener.noticed_at = time.monotonic()
        if any([listener._passes_on for listener in listening]):
            seen_before = (
                False  # the others of the run know of it, and this one must not be missing
            )
            signal.raise_signal(signal.SIGTERM)
        first = chain[-1]
        previous = first._previous.get(number, signal.SIG_DFL)
        if number in first._native:  # jax's preemption service, installed without Python
            _call_native(first._native[number], number)
        elif callable(previous):
            _SEEN_BEFORE.append(seen_before)
            try:
                previous(number, frame)
            finally:
                _SEEN_BEFORE.pop()
        elif (
            previous == signal.SIG_DFL
            and seen_before
            and (listening or self._is_installed(number) or os.getpid() != first._pid)
        ):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif listening:
            name = signal.Signals(number).name
            logger.warning("%s: the run is asked to stop after the next save", name)

    def chain(self, number: int) -> list[StopSignal]:
        """This listener and the ones it replaced, newest first; may include closed ones."""
        chain: list[StopSignal] = [self]
        while number not in chain[-1]._native:
            owner = getattr(chain[-1]._previous.get(number), "__self__", None)
            if not isinstance(owner, StopSignal):
                break
            chain.append(owner)
        return chain

    def _is_active(self) -> bool:
        # A forked child, such as a data worker, never saves; where the user's handler calls this one, it is still there, and
        # the signal ends the child as usual.
        return not self._closed and os.getpid() == self._pid

    def _is_installed(self, number: int) -> bool:
        """Whether Python calls this handler directly: a closed one that only a later handler calls must not end the process."""
        # == and not `is`: each access creates a new bound method.
        return signal.getsignal(number) == self._on_signal

    def close(self) -> None:
        """Restores the earlier handlers. Outside of the main thread, or if a later handler still calls this one, it stays
        installed and only calls the previous handler.
        """
        self._closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in list(self._previous.items()):
            if self._is_installed(number):
                signal.signal(number, previous)
                if number in self._native:
                    ctypes.pythonapi.PyOS_setsig(number, ctypes.c_void_p(self._native[number]))
                del self._previous[number]


class _Blocked(threading.local):
    """The signals that a thread blocked before it began to fork; None if it does not."""

    mask: set[Any] | None = None


_blocked = _Blocked()


def _listeners() -> dict[int, StopSignal]:
    """Those that Python calls when a signal comes, by its number."""
    owners = {
        number: getattr(signal.getsignal(number), "__self__", None) for number in tuple(_heard)
    }
    return {number: one for number, one in owners.items() if isinstance(one, StopSignal)}


def _before_fork() -> None:
    """Python forgets a signal that reaches a child before it has begun: whoever ends his workers by one would wait for ever."""
    if listening := _listeners():
        # Asked first: a handler that raises in the second call would leave nobody who knows what to restore.
        _blocked.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, listening)


def _after_fork() -> None:
    mask, _blocked.mask = _blocked.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_child() -> None:
    """The earlier handlers of a child: it never saves, and one of ours does not end what waits for a lock."""
    try:
        for number, newest in _listeners().items():
            for one in newest.chain(number):
                one.close()
    finally:
        _after_fork()


around_forks(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_child)

_DEFAULT, _IGNORE = 0, 1


def _native_handler(number: int) -> int:
    """Address of the installed signal handler, whether Python or native code installed it."""
    get = ctypes.pythonapi.PyOS_getsig
    get.restype = ctypes.c_void_p
    return get(number) or _DEFAULT


def _call_native(address: int, number: int) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(number)


class Preemption:
    """Whether the run was asked to stop: by a signal to this process or, with several, by agreement. Then jax's preemption
    service listens for SIGTERM in each of them, and its sync point gives all the same step to stop at. A handler of ours
    would take SIGTERM away from that service, so none is installed for it; other signals are passed on as SIGTERM. A policy
    that ``listens`` makes this object listen at once.
    """

    def __init__(self, processes: Processes, policy: object, options: Options) -> None:
        self._alone = processes.count == 1
        self._asked = bool(getattr(policy, "listens", False))
        self._others = [name for name in options.stop_signals if name != "SIGTERM"]
        self._signal = (
            StopSignal(options.stop_signals)
            if self._alone
            else StopSignal(self._others, passes_on=True)
        )
        self._agreed_at: float | None = None
        self.step = 0  # that the run has reached; all processes set it at each step
        self._asked_at_step: int | None = None
        self._told_of_no_service = False
        self._declined_unaware = False
        self._grace_secs = options.grace_secs
        # A Checkpointer dropped without close() must not keep swallowing signals.
        weakref.finalize(self, self._signal.close).atexit = False
        if self._asked:
            self._listen()

    def _listen(self) -> None:
        # without the service nobody would get what is passed on, and SIGTERM would end this process
        if self._alone or (self._others and preemption_service_listens()):
            self._signal.listen()

    @property
    def should_stop(self) -> bool:
        """Whether the signal came; starts listening. With several processes: whether all agreed."""
        self._listen()
        if not self._alone:
            return self._agreed(self.step)
        noticed_at = self._signal.noticed_at
        if noticed_at is None:
            return False
        # If the signal came after the policy had declined this step, a loop that stops here would lose it: the next step
        # is saved first. A loop that does not save every step must not wait for that for long.
        waits = self._declined_unaware and time.monotonic() < noticed_at + _NEXT_SAVE_SECS
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
            return self._signal.noticed_at is not None
        return self._asked and self._agreed(step)

    @property
    def will_stop(self) -> bool:
        """Whether this process already knows that the run will stop; does not communicate."""
        return self._signal.noticed_at is not None if self._alone else self._agreed_at is not None

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
        told_at = [at for at in (self._signal.noticed_at, self._agreed_at) if at is not None]
        if self._grace_secs is None or not told_at:
            return None
        return max(0.0, min(told_at) + self._grace_secs - time.monotonic())

    def close(self) -> None:
        """Stops listening and restores the earlier handlers."""
        self._signal.close()
