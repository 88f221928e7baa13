"""Events of saves, restores and deletions, for the user's listener and jax.monitoring."""

from __future__ import annotations

import logging
import sys
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
    "slow",
    "deleted",
    "delete_failed",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of one checkpoint.

    Attributes:
        kind: ``save_started``, ``snapshot_taken`` (the call returns: ``secs`` is how long it
            blocked), ``committed`` (durable), ``save_failed``, ``restore_started``, ``restored``,
            ``restore_failed``, ``progress`` (of a running save or restore), ``slow`` (it has
            taken ``Options.report_secs``, or a multiple; from a thread of its own), ``deleted``,
            ``delete_failed``.
        path: path or URL of the checkpoint.
        step: step number in a Checkpointer's directory, else None.
        bytes: array bytes that this process wrote or read; in a progress event, so far. A compressed save stays at 0
            until TensorStore writes what it has compressed, in memory.
        total_bytes: in a progress event, the final value of ``bytes``; else 0.
        secs: seconds since the save or restore was called.
        error: the error, in the ``*_failed`` events.
        phase, waits_for, resident_bytes: in ``slow`` events, what is being done, the processes that this one waits for,
            and the memory that this process uses.
    """

    kind: Kind
    path: str
    step: int | None = None
    bytes: int = 0
    total_bytes: int = 0
    secs: float = 0.0
    error: BaseException | None = None
    phase: str = ""
    waits_for: tuple[int, ...] = ()
    resident_bytes: int = 0


Listener = Callable[[Event], None]


def tell(event: Event, listener: Listener | None) -> None:
    """Sends an event to jax.monitoring and to the listener; their errors are only logged.

    jax.monitoring gets the duration ``/ckpt/<kind>`` and the scalar ``/ckpt/<kind>/bytes``, and neither
    progress nor slow events.
    """
    if event.kind not in ("progress", "slow"):
        _call_listener(_record, event, "a listener of jax.monitoring")
    if listener is not None:
        _call_listener(listener, event, "Options(on_event=)")


def each(*listeners: Listener) -> Listener:
    """A listener that calls all of these, in order; an error of one is logged."""

    def listen(event: Event) -> None:
        for listener in listeners:
            _call_listener(listener, event, "a listener of events.each()")

    return listen


def _call_listener(listener: Listener, event: Event, name: str) -> None:
    try:
        listener(event)
    except Exception as error:
        # A listener's error must not fail a save. A signal handler's exception is not the
        # listener's.
        if passed_a_handler(error):
            raise
        logger.exception("%s raised at %s of %s", name, event.kind, event.path)


def _record(event: Event) -> None:
    if sys.modules.get("jax") is None:
        return  # nobody can listen before the program has imported it
    name = f"/ckpt/{event.kind}"
    jax.monitoring.record_event_duration_secs(name, event.secs)
    if event.bytes:
        jax.monitoring.record_scalar(f"{name}/bytes", event.bytes)
