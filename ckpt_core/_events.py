"""What happens to checkpoints, told to the user's callback and to jax.monitoring."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckpt_core._errors import passed_a_handler
from ckpt_core._lazy import jax

logger = logging.getLogger("ckpt_core")

Kind = Literal[
    "save_started",
    "snapshot_taken",
    "committed",
    "save_failed",
    "restore_started",
    "restored",
    "restore_failed",
    "progress",
    "deleted",
    "delete_failed",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened to one checkpoint.

    Attributes:
        kind: ``save_started``, ``snapshot_taken`` (the caller may go on: ``secs`` is how long it was
            blocked), ``committed`` (durable), ``save_failed``, ``restore_started``, ``restored``,
            ``restore_failed``, ``progress`` (of a save or restore under way), ``deleted``, ``delete_failed``.
        path: of the checkpoint.
        step: its number in a Checkpointer's directory, else None.
        bytes: of arrays that this process wrote or read; of a progress event, so far.
        total_bytes: of a progress event, in the end.
        secs: since the save or restore was called.
        error: what failed, for the events that say so.
    """

    kind: Kind
    path: str
    step: int | None = None
    bytes: int = 0
    total_bytes: int = 0
    secs: float = 0.0
    error: BaseException | None = None


Listener = Callable[[Event], None]


def tell(event: Event, listener: Listener | None) -> None:
    """Tells jax.monitoring and the listener, which may fail without harm to the checkpoint.

    The names are ``/ckpt/<kind>`` with the seconds, and ``/ckpt/<kind>/bytes`` as a scalar.
    """
    if event.kind != "progress":
        _tell_one(_record, event, "a listener of jax.monitoring")
    if listener is not None:
        _tell_one(listener, event, "Options(on_event=)")


def each(*listeners: Listener) -> Listener:
    """A listener that tells all of these, in order; what one raises is logged."""

    def listen(event: Event) -> None:
        for listener in listeners:
            _tell_one(listener, event, "a listener of events.each()")

    return listen


def _tell_one(listener: Listener, event: Event, name: str) -> None:
    try:
        listener(event)
    except Exception as error:
        # whoever only watches must not cost a checkpoint; what a signal handler raises meanwhile is not theirs
        if passed_a_handler(error):
            raise
        logger.exception("%s raised at %s of %s", name, event.kind, event.path)


def _record(event: Event) -> None:
    name = f"/ckpt/{event.kind}"
    jax.monitoring.record_event_duration_secs(name, event.secs)
    if event.bytes:
        jax.monitoring.record_scalar(f"{name}/bytes", event.bytes)


PROGRESS_SECS = 0.1
"""How often, at most, somebody is told of progress."""


class Progress:
    """Counts the bytes of one save or restore, and tells of them now and then.

    Args:
        total_bytes: what it will come to.
    """

    def __init__(
        self, path: str, step: int | None, total_bytes: int, listener: Listener | None
    ) -> None:
        self.done_bytes = 0
        self._path = path
        self._step = step
        self._total_bytes = total_bytes
        self._listener = listener
        self._began = self._told = time.monotonic()

    def reached(self, done_bytes: int) -> None:
        """So many bytes are done by now."""
        self.done_bytes = done_bytes
        now = time.monotonic()
        if self._listener is None or now - self._told < PROGRESS_SECS:
            return
        self._told = now
        event = Event(
            kind="progress",
            path=self._path,
            step=self._step,
            bytes=done_bytes,
            total_bytes=self._total_bytes,
            secs=now - self._began,
        )
        tell(event, self._listener)
