"""One save or load as it goes: what is being done, how many bytes, and the events that listeners get.

If it takes unexpectedly long, reports say where it is, whom it waits for, and at last the stacks of its threads.
One thread watches all of them. It touches no file and waits for nobody: what hangs may be the file system itself, so work that
is watched notes how far it is, and the watcher only reads that.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import logging
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from ckpt_core._fork import HOME
from ckpt_core._lazy import jax
from ckpt_core._processes import awaited
from ckpt_core._words import size

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
    """Sends an event to the listener and, unless it is a progress or slow event, to jax.monitoring:
    the duration ``/ckpt/<kind>`` and the scalar ``/ckpt/<kind>/bytes``. Their errors are only logged.
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
    except Exception:
        # A listener's error must not fail a save. A signal handler's exception is not the
        # listener's.
        logger.exception("%s raised at %s of %s", name, event.kind, event.path)


def _record(event: Event) -> None:
    if sys.modules.get("jax") is None:
        return  # nobody can listen before the program has imported it
    name = f"/ckpt/{event.kind}"
    jax.monitoring.record_event_duration_secs(name, event.secs)
    if event.bytes:
        jax.monitoring.record_scalar(f"{name}/bytes", event.bytes)


PROGRESS_SECS = 0.1
"""Minimum interval between two progress events."""
_STACKS_AT_REPORT = 5
"""This report shows the stacks, once: by then it is no slow disk any more."""
_OUR_THREADS = "ckpt-"


@dataclass(eq=False)
class Operation:
    """One save or load, as far as it has come; the thread that works writes it, the watcher reads it."""

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
    is_over: bool = False  # no further report is wanted
    _told_secs: float = 0.0  # when the last progress event was sent
    _reports: int = 0
    _told_bytes: int = 0
    _announced_bytes: int = 0  # in the last progress event
    _missed_until: float = 0.0

    def happened(
        self, kind: Kind, size_bytes: int = 0, error: BaseException | None = None
    ) -> float:
        """Sends one event; returns the seconds since the save or load was called."""
        secs = time.monotonic() - self.began
        event = Event(
            kind=kind, path=self.path, step=self.step, bytes=size_bytes, secs=secs, error=error
        )
        tell(event, self.listener)
        return secs

    def committed(self, written_bytes: int, blocking_secs: float) -> None:
        """Sends ``committed``, and writes the save's single line to the log."""
        secs = self.happened("committed", written_bytes)
        rate = written_bytes / max(secs, 1e-9) / 1e9
        text = "%s: %d bytes, blocked %.3f s, total %.3f s, %.2f GB/s"
        logger.info(text, self.path, written_bytes, blocking_secs, secs, rate)

    def tell_progress(self, done_bytes: int) -> None:
        """Sends a progress event, unless the last one was less than ``PROGRESS_SECS`` ago. The bytes never
        decrease, although a load reads ahead of what it has counted and a file of a save can shrink.
        """
        now = time.monotonic()
        if self.listener is None or now - max(self._told_secs, self.began) < PROGRESS_SECS:
            return
        self._told_secs = now
        done_bytes = self._announced_bytes = max(self._announced_bytes, done_bytes)
        event = Event(
            kind="progress",
            path=self.path,
            step=self.step,
            bytes=done_bytes,
            total_bytes=self.total_bytes,
            secs=now - self.began,
        )
        tell(event, self.listener)

    @contextlib.contextmanager
    def watched(self, phase: str) -> Generator[None]:
        """Reports on it while the block runs, if it takes long."""
        self.phase = phase
        if self.report_secs is None or os.getpid() != HOME.pid:
            yield
            return
        self.thread = threading.get_ident()
        # a save is watched twice: while it takes the snapshot, and while it writes
        self.is_over = False
        try:
            _watcher.add(self)
            yield
        finally:
            self.is_over = True

    @contextlib.contextmanager
    def failing(self, kind: Kind, phase: str) -> Generator[None]:
        """If the block raises, sends an event with the error; reports if it takes long."""
        try:
            with self.watched(phase):
                yield
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                _note_what_is_full(error, self.path)
            self.happened(kind, error=error)
            raise

    @property
    def due(self) -> float:
        """When the next report is, in monotonic seconds."""
        return max(self.began, self._missed_until) + (self.report_secs or 0.0)

    @property
    def asked(self) -> bool:
        """Whether a report is near, so that it is worth finding out how far the work is."""
        if self.report_secs is None:
            return False
        return time.monotonic() > self.due - self.report_secs / 2

    def report(self) -> None:
        """Logs one report, and sends it to the listener."""
        self._reports += 1
        now = time.monotonic()
        if (
            self.report_secs
        ):  # of multiples that passed while the process stood still, one is reported
            self._missed_until = now - (now - self.began) % self.report_secs
        newly, self._told_bytes = self.done_bytes - self._told_bytes, self.done_bytes
        absent, resident = awaited(), resident_bytes()
        logger.warning(
            "%s of %s has taken %.0f s: %s%s%s%s",
            self.what,
            self.path,
            now - self.began,
            self.phase,
            self._progress(newly),
            f"; waits for processes {list(absent)}" if absent else "",
            f"; this process uses {size(resident)}" if resident else "",
        )
        if self._reports == _STACKS_AT_REPORT:
            logger.warning("%s of %s: its threads are at\n%s", self.what, self.path, self._stacks())
        event = Event(
            kind="slow",
            path=self.path,
            step=self.step,
            bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            secs=now - self.began,
            phase=self.phase,
            waits_for=absent,
            resident_bytes=resident,
        )
        tell(event, self.listener)

    def _progress(self, newly: int) -> str:
        if not (self.total_bytes or self.done_bytes):
            return ""
        rate = (
            f"{size(newly / (self.report_secs or 1))}/s" if newly else "none since the last report"
        )
        whole = f" of {size(self.total_bytes)}" if self.total_bytes else ""
        return f", {size(self.done_bytes)}{whole}, {rate}"

    def _stacks(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks: list[str] = []
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] # the only way
        for ident, frame in frames.items():
            name = names.get(ident, "a thread without a name")
            if ident == threading.get_ident():
                continue  # the watcher
            if ident == self.thread or name.startswith(_OUR_THREADS):
                stacks.append(f"{name}:\n{''.join(traceback.format_stack(frame))}")
        return "\n".join(stacks)


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class _Watcher:
    """One thread that reports every overdue operation, and ends when nothing has been watched for a while. Threads that save or load take no
    lock here: a signal handler that raises between taking and releasing it would leave it held, and every later save would wait without end.
    """

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[weakref.ref[Operation]] = queue.SimpleQueue()
        self._runs = False

    def add(self, operation: Operation) -> None:
        self._new.put(weakref.ref(operation))
        if not self._runs:
            # Two threads that find this at once start two watchers, which share the queue: no harm.
            self._runs = True
            try:
                _thread.start_new_thread(self._launch, ())
            except RuntimeError:  # at interpreter exit: work goes on without reports
                self._runs = False

    def _launch(self) -> None:
        # a daemon: it holds nothing, and interpreter exit must not wait for it
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._run, name="ckpt-slow", daemon=True).start()
            return
        self._runs = False

    def _run(self) -> None:
        watched: list[weakref.ref[Operation]] = []
        while True:
            watched = [one for one in watched if _is_running(one)]
            due = min((found.due for one in watched if (found := one())), default=None)
            wait_secs = _IDLE_SECS if due is None else min(_IDLE_SECS, due - time.monotonic())
            try:
                watched.append(self._new.get(timeout=max(0.0, wait_secs)))
                continue
            except queue.Empty:
                if not watched and due is None:
                    self._runs = False
                    if self._new.empty():  # else one came before that was set, and nobody starts
                        return
                    self._runs = True
            for one in watched:
                _report_if_late(one)


def _is_running(watched: weakref.ref[Operation]) -> bool:
    operation = watched()
    return operation is not None and not operation.is_over


def _report_if_late(watched: weakref.ref[Operation]) -> None:
    operation = watched()
    if operation is None or operation.is_over or operation.due > time.monotonic():
        return
    try:
        operation.report()
    except (
        BaseException
    ):  # a report must not end the reports, nor may a listener that calls sys.exit
        logger.exception("could not report on %s", operation.path)


_IDLE_SECS = 5.0
"""So often the watcher looks whether anything is left to be watched."""
_watcher = _Watcher()


def _note_what_is_full(error: OSError, path: str) -> None:
    """Notes on an error of a full disk that bytes are free, and no inodes."""
    with contextlib.suppress(OSError, AttributeError):
        room = os.statvfs(os.path.dirname(path))
        if room.f_files and not room.f_favail:
            free = size(room.f_bavail * room.f_frsize)
            error.add_note(f"ckpt: {free} are free, and no inodes: too many files are on this disk")
