"""Waits that stay correct when a signal handler raises, and a small pool of worker threads.

Python runs signal handlers in the main thread, between any two bytecodes. An exception from a
handler (KeyboardInterrupt, ``sys.exit`` on SIGTERM) is raised in whatever the main thread was
executing. Inside ``threading`` or ``concurrent.futures``, which are written in Python, it can leave
a lock locked forever; up to CPython 3.12, an interrupted ``Thread.join`` even marks a running
thread as ended. Therefore the main thread uses only primitives implemented in C here (locks,
SimpleQueue, start_new_thread): each call either happens completely or not at all.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_LOOK_SECS = 1.0
"""Interval at which a wait rereads the flag: an interrupted wait may have kept its lock."""
_START_SECS = 5.0
"""A thread that has not begun by then was lost: without memory it ends before its first line, and nobody learns of it."""


class Flag:
    """A one-shot event; a wait may be interrupted by a signal handler and repeated."""

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Sets the flag; one thread alone does, and a second time has no effect."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Blocks until the flag is set or the timeout; whether it is set."""
        until = None if timeout_secs is None else time.monotonic() + timeout_secs
        while not self.is_set:
            left_secs = _LOOK_SECS if until is None else min(_LOOK_SECS, until - time.monotonic())
            if left_secs <= 0:
                break
            if self._lock.acquire(timeout=left_secs):
                self._lock.release()
        return self.is_set


def start_daemon(work: Callable[[], object], name: str) -> Flag:
    """Begins ``work`` in a daemon thread; the flag is set at its end. ``Thread.start`` waits for the thread in Python
    code, so a helper thread, which no signal handler interrupts, calls it. Raises RuntimeError if no thread can
    start.
    """
    ended = Flag()

    def run() -> None:
        try:
            work()
        finally:
            ended.set()

    def launch() -> None:
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except (RuntimeError, MemoryError):  # no more threads: this one does it
            run()

    _thread.start_new_thread(launch, ())
    return ended


class Job:
    """One function call that a worker thread makes; see ``Workers.submit``. A strong reference to the pool would keep
    it alive while its threads see the queue.
    """

    def __init__(self, work: Callable[[], Any], owner: weakref.ref[Workers]) -> None:
        self._work: Callable[[], Any] | None = work
        self._owner = owner
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = Flag()

    def run(self) -> None:
        """Calls the function and stores its result or error."""
        try:
            if self._work is not None:
                self._value = self._work()
        except BaseException as error:
            self._error = error
        self._work = None
        self._ended.set()

    def result(self) -> Any:
        """Blocks until the call has ended; returns its result or raises its error."""
        while not self._ended.wait(_LOOK_SECS):
            if (owner := self._owner()) is not None:
                owner.work_if_nobody_does()
        if self._error is not None:
            raise self._error
        return self._value


class Workers:
    """A thread pool for the duration of a ``with`` block, which waits for the threads at its end. At interpreter
    exit, when no thread can start, ``submit`` runs each job itself: a save that is pending at exit, or that an
    ``atexit`` handler begins, needs this pool too.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ends = [Flag() for _ in range(count)]
        self._begun: list[Flag] = []  # the ends of the workers that have begun
        self._began = self._inline = False
        self._since = 0.0
        self._self: weakref.ref[Workers] = weakref.ref(self)

    def submit(self, work: Callable[[], Any]) -> Job:
        """Queues a call of ``work``; returns its job."""
        job = Job(work, self._self)
        if not self._began:
            self._since = time.monotonic()
            try:
                _thread.start_new_thread(
                    _launch, (self._self, self._jobs, self._ends, self._begun, self._name)
                )
                # Set after the start: after an interrupt in between, no job is queued yet, and
                # __exit__ need not wait.
                self._began = True
            except RuntimeError as error:
                if "new thread" not in str(error):
                    raise
                self._began = self._inline = True
        if self._inline:
            job.run()
        else:
            self._jobs.put(job)
        return job

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self._began or self._inline:
            return
        try:
            if error is not None:
                self._drop_jobs()
        finally:
            for _ in self._ends:
                self._jobs.put(None)
        for end in self._ends:
            while not end.wait(_LOOK_SECS):
                if end not in self._begun and self._are_late():
                    break  # should it begin after all, it finds nothing to do

    def _are_late(self) -> bool:
        return time.monotonic() - self._since > _START_SECS

    def work_if_nobody_does(self) -> None:
        """Runs the queued jobs, if every worker was lost while it was started."""
        if self._begun or not self._are_late():
            return
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job.run()

    def _drop_jobs(self) -> None:
        """Removes the queued jobs: after an error in the block, no caller waits for them."""
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                return


def _launch(
    owner: weakref.ref[Workers],
    jobs: queue.SimpleQueue[Job | None],
    ends: list[Flag],
    begun: list[Flag],
    name: str,
) -> None:
    """Runs in a helper thread, which signal handlers cannot interrupt: starts the workers."""
    left = list(ends)
    try:
        while left:
            threading.Thread(
                target=_work,
                args=(owner, jobs, left[-1], begun),
                name=f"{name}-{len(left)}",
                daemon=True,
            ).start()
            left.pop()
    except (RuntimeError, MemoryError):  # no more threads: this one also works as one of them
        for end in left[1:]:
            end.set()
        _work(owner, jobs, left[0], begun)


def _work(
    owner: weakref.ref[Workers],
    jobs: queue.SimpleQueue[Job | None],
    end: Flag,
    begun: list[Flag],
) -> None:
    begun.append(end)
    try:
        while (
            owner() is not None
        ):  # None: the pool was garbage-collected without __exit__, after an interrupt
            try:
                job = jobs.get(timeout=_LOOK_SECS)
            except queue.Empty:
                continue
            if job is None:
                return
            job.run()
            del job
    finally:
        end.set()


def run_each(function: Callable[[T], R], things: Iterable[T], threads: int, name: str) -> list[R]:
    """The results of ``function`` for each of ``things``, in order, computed in several threads; of one, in this thread."""
    things = list(things)
    if len(things) < 2:
        return list(map(function, things))
    with Workers(min(threads, len(things)), name) as workers:
        jobs = [workers.submit(lambda thing=thing: function(thing)) for thing in things]
        return [job.result() for job in jobs]
