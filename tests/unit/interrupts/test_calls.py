"""What the library waits with, when a handler raises in the middle of a wait; and a way to raise at a given moment."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import pytest

from ckpt_core._background.threads import Flag

LIMIT_SECS = 60


class Stop(Exception):
    """What a user's handler raises: a class that nobody here knows."""


class AtMoment:
    """Raises at the n-th entry of a Python function or return of a C one inside of the block, and counts them."""

    def __init__(self, moment: int = -1, kind: type[BaseException] = Stop) -> None:
        self.moment = moment
        self.kind = kind
        self.seen = 0
        self.raised_in = ""

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.moment:
                sys.setprofile(None)
                self.raised_in = f"{event} {frame.f_code.co_qualname}"
                raise self.kind

    def __enter__(self) -> AtMoment:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def test_a_wait_that_lost_the_lock_still_ends() -> None:
    """An exception between taking the lock and giving it back leaves it taken: the flag counts."""
    flag = Flag()
    waiting = threading.Thread(target=flag.wait)
    waiting.start()
    flag.set()
    assert flag._lock.acquire(timeout=LIMIT_SECS)  # and never given back
    waiting.join(LIMIT_SECS)
    assert not waiting.is_alive() and flag.wait(0) and flag.wait()


def test_a_wait_that_was_interrupted_says_nothing_untrue() -> None:
    def handler(*_: Any) -> None:
        raise Stop

    flag, before = Flag(), signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            flag.wait(LIMIT_SECS)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not flag.is_set and not flag.wait(0)
    flag.set()
    assert flag.wait(0)
