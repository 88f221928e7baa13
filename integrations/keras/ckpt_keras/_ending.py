"""The end of a ``fit`` that an exception ended, of which no callback is told."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from ckpt_keras._session import Session


class Interrupted(Protocol):
    """What is told of it, as long as somebody else holds it."""

    def interrupted(self, session: Session) -> None:
        """The ``fit`` of this session is gone; its last save may still be written."""
        ...

    def closed(self, session: Session) -> None:
        """That save has ended."""
        ...


def ending(run: Interrupted, session: Session) -> Callable[[], None]:
    """What ends a session whose ``fit`` is gone; holds the callback only while somebody else does."""
    held = weakref.ref(run)

    def close() -> None:
        session.abandon()
        owner = held()
        if owner is not None:
            owner.closed(session)

    def end() -> None:
        # in a thread of its own: this may be the garbage collection of any, the saving one's too
        thread = threading.Thread(target=close, name="ckpt-keras-end")
        owner = held()
        if owner is not None:
            owner.interrupted(session)
        if not session.closed:
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and the core sees to it
                thread.start()

    return end
