"""One save or load as it goes: what is being done, how many bytes, and the events that listeners get.

If it takes long, reports say where it is, whom it waits for, and at last the stacks of its threads. The thread that reports
touches no file and waits for nobody: what hangs may be the file system itself, so the work notes how far it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt_core._fork import HOME
from ckpt_core._lazy import jax
from ckpt_core._processes import awaited
from ckpt_core._words import size

logger = logging.getLogger("ckpt_core")

Kind = (
    Literal["save_started", "snapshot_taken", "committed", "save_failed"]
    | Literal["restore_started", "restored", "restore_failed"]
    | Literal["progress", "slow", "deleted", "delete_failed"]
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of one checkpoint.

    Attributes:
        kind: ``save_started``, ``snapshot_taken`` (the call returns: ``secs`` is how long it blocked), ``committed``
            (durable), ``save_failed``, ``restore_started``, ``restored``, ``restore_failed``, ``progress`` (of a
            running save or restore), ``slow`` (it has taken ``Options.report_secs``, or a multiple; from a thread of
            its own), ``deleted``, ``delete_failed``.
        path: path or URL of the checkpoint.
        step: step number in a Checkpointer's directory, else None.
        bytes: array bytes that this process wrote or read; in a progress event, so far; compressed ones as stored.
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
    """Sends an event to the listener and, but for ``progress`` and ``slow``, to jax.monitoring; their errors are only logged."""
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
    except Exception:
        # it must not fail a save; an exception of a signal handler is not the listener's
        logger.exception("%s raised at %s of %s", name, event.kind, event.path)


def _record(event: Event) -> None:
    if sys.modules.get("jax") is None:
        return  # nobody can listen before the program has imported it
    name = f"/ckpt/{event.kind}"
    jax.monitoring.record_event_duration_secs(name, event.secs)
    if event.bytes:
        jax.monitoring.record_scalar(f"{name}/bytes", event.bytes)


PROGRESS_SECS = 0.1  # minimum interval between two progress events
_STACKS_AT_REPORT = 5  # this report shows the stacks, once: by then it is no slow disk any more


@dataclass(eq=False)
class Operation:
    """One save or load, as far as it has come: the thread that works writes it, the one that reports reads it."""

    what: str  # ``save`` or ``load``
    path: str
    step: int | None
    report_secs: float | None  # None: no reports
    listener: Listener | None
    phase: str = ""  # what is done from here on, in words; whoever begins something else sets it
    done_bytes: int = 0
    total_bytes: int = 0  # of the arrays that this process writes or reads, as far as known
    began: float = field(default_factory=time.monotonic)  # monotonic seconds
    thread: int = 0  # ident of the one that works
    _announced_at: float = 0.0  # when the last progress event was sent
    _announced_bytes: int = 0  # in that event
    _reports: int = 0
    _reported_bytes: int = 0  # in the last report

    def happened(
        self, kind: Kind, size_bytes: int = 0, error: BaseException | None = None, **more: Any
    ) -> float:
        """Sends one event; returns the seconds since the save or load was called."""
        secs = time.monotonic() - self.began
        what: dict[str, Any] = {"kind": kind, "path": self.path, "step": self.step, "secs": secs}
        tell(Event(**what, bytes=size_bytes, error=error, **more), self.listener)
        return secs

    def committed(self, written_bytes: int, blocking_secs: float) -> None:
        """Sends ``committed``, and writes the save's single line to the log."""
        secs = self.happened("committed", written_bytes)
        rate = written_bytes / max(secs, 1e-9) / 1e9
        text = "%s: %d bytes, blocked %.3f s, total %.3f s, %.2f GB/s"
        logger.info(text, self.path, written_bytes, blocking_secs, secs, rate)

    def tell_progress(self, done_bytes: int) -> None:
        """Sends a progress event, unless one was sent less than ``PROGRESS_SECS`` ago; its bytes never decrease."""
        now = time.monotonic()
        if self.listener is None or now - max(self._announced_at, self.began) < PROGRESS_SECS:
            return
        self._announced_at = now
        self._announced_bytes = max(self._announced_bytes, done_bytes)
        self.happened("progress", self._announced_bytes, total_bytes=self.total_bytes)

    @contextlib.contextmanager
    def watched(self, phase: str) -> Generator[None]:
        """Reports on it while the block runs, from a thread of its own."""
        self.phase = phase
        if self.report_secs is None or os.getpid() != HOME.pid:
            yield
            return
        self.thread = threading.get_ident()
        over = threading.Event()
        given = over, self.report_secs
        try:
            # a daemon: it holds nothing, and the interpreter's exit must not wait for it
            with contextlib.suppress(RuntimeError):  # at that exit no thread starts: no reports
                threading.Thread(None, self._watch, "ckpt-slow", given, daemon=True).start()
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event, report_secs: float) -> None:
        """Reports at each multiple of ``report_secs`` until it is over; once for those that passed while nothing ran."""
        while not over.wait(report_secs - (time.monotonic() - self.began) % report_secs):
            try:
                self._report(report_secs)
            except BaseException:  # also of a listener that calls sys.exit
                logger.exception("could not report on %s", self.path)

    @contextlib.contextmanager
    def failing(self, kind: Kind, phase: str) -> Generator[None]:
        """If the block raises, sends an event with the error; reports if it takes long."""
        try:
            with self.watched(phase):
                yield
        except BaseException as error:
            self.happened(kind, error=error)
            raise

    def _report(self, report_secs: float) -> None:
        """Logs one report, and sends it to the listener."""
        self._reports += 1
        newly, self._reported_bytes = self.done_bytes - self._reported_bytes, self.done_bytes
        progress = ""
        if self.total_bytes or self.done_bytes:
            rate = f"{size(newly / report_secs)}/s" if newly else "none since the last report"
            whole = f" of {size(self.total_bytes)}" if self.total_bytes else ""
            progress = f", {size(self.done_bytes)}{whole}, {rate}"
        absent, resident = awaited(), _resident_bytes()
        secs, text = time.monotonic() - self.began, self.phase + progress
        text += f"; waits for processes {list(absent)}" if absent else ""
        text += f"; this process uses {size(resident)}" if resident else ""
        logger.warning("%s of %s has taken %.0f s: %s", self.what, self.path, secs, text)
        if self._reports == _STACKS_AT_REPORT:
            logger.warning("%s of %s: its threads are at\n%s", self.what, self.path, self._stacks())
        more: dict[str, Any] = {"total_bytes": self.total_bytes, "phase": self.phase}
        more |= {"waits_for": absent, "resident_bytes": resident}
        self.happened("slow", self.done_bytes, **more)

    def _stacks(self) -> str:
        """Where the thread that works and those of ckpt are, but for those that report."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] # the only way
        return "\n".join(
            f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
            for thread in threading.enumerate()
            if thread.ident in frames and thread.name != "ckpt-slow"
            if thread.ident == self.thread or thread.name.startswith("ckpt-")
        )


def _resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
