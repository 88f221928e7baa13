"""Cleans up after a ``fit`` that an exception ended: Keras does not tell callbacks about it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from ckpt_keras._session import Session


class Interrupted(Protocol):
    """The callback, which is notified as long as other code refers to it."""

    def interrupted(self, session: Session) -> None:
        """Called when the ``fit`` of this session is gone; its last save may still be running."""
        ...

    def closed(self, session: Session) -> None:
        """Called when that save has ended."""
        ...


def ending(run: Interrupted, session: Session) -> Callable[[], None]:
    """A function that ends a session whose ``fit`` is gone; it refers to the callback weakly."""
    held = weakref.ref(run)

    def close() -> None:
        session.abandon()
        owner = held()
        if owner is not None:
            owner.closed(session)

    def end() -> None:
        # In a new thread: garbage collection may call this in any thread, even the saving one.
        thread = threading.Thread(target=close, name="ckpt-keras-end")
        owner = held()
        if owner is not None:
            owner.interrupted(session)
        if not session.closed:
            with contextlib.suppress(
                RuntimeError
            ):  # at interpreter exit, where the core waits for saves
                thread.start()

    return end
