"""Serializes the calls that several threads make on one Checkpointer."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ckpt_core._errors import CheckpointError
from ckpt_core._fork import HOME_PID, forked
from ckpt_core._run.in_flight import InFlight

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """The lock of one object and the name of the running call; see ``in_turn``.

    Args:
        directory: for messages.
        saves: the object's background saves.
    """

    def __init__(self, directory: str, saves: Sequence[InFlight]) -> None:
        self.directory = directory
        self.saves = saves
        # RLock is implemented in C: a signal handler cannot interrupt its acquire or release.
        self.lock = threading.RLock()
        self.doing: str | None = None


class TakesTurns(Protocol):
    """An object whose methods may be called from any thread."""

    _turns: Turns


T = TypeVar("T", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorator: the method waits until no other thread is inside a decorated method of the object.

    Calls that would wait for themselves raise CheckpointError: a call from inside another call (in
    a signal handler, a listener or a policy), and a call from the thread of a background save.
    """
    name = method.__name__

    @functools.wraps(method)
    def taking_turns(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        if os.getpid() != HOME_PID:
            raise forked()  # a lock that was held at the fork stays locked forever in the child
        turns = self._turns  # pyright: ignore[reportPrivateUsage]
        if any(save.is_this_thread for save in turns.saves):
            raise _refusal(turns, name, "its save in the background")
        with turns.lock:
            if turns.doing is not None:
                raise _refusal(turns, name, f"{turns.doing}()")
            turns.doing = name
            try:
                return method(self, *args, **kwargs)
            finally:
                turns.doing = None

    return taking_turns


def _refusal(turns: Turns, name: str, inside: str) -> CheckpointError:
    return CheckpointError(
        f"{turns.directory}: {name}() was called from within {inside}, by a signal handler, a listener or "
        "a policy: this would deadlock. Set a flag there instead, and make the call after that one returns"
    )
