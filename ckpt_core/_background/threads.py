"""Waits that no signal handler can break, and work spread over a few threads.

Python runs signal handlers in the main thread, between any two steps of the code there. What a
handler raises (KeyboardInterrupt, ``sys.exit`` on SIGTERM) comes out of whatever the main thread was
doing, and where that is a method of ``threading`` or ``concurrent.futures``, which are written in
Python, their locks may stay locked for ever; up to CPython 3.12 an interrupted ``Thread.join`` even says
of a running thread that it has ended. Hence what the main thread calls here are locks, queues and
starts of threads of the interpreter's own, each of which happens or does not.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_LOOK_SECS = 1.0
"""How often a wait looks at the flag itself: its lock may have been lost by an interrupted wait."""


class Flag:
    """Something that happens once; whoever waits for it may be interrupted, and wait again."""

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """It has happened; called once."""
        self.is_set = True
        self._lock.release()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Whether it happened in time."""
        until = None if timeout_secs is None else time.monotonic() + timeout_secs
        while not self.is_set:
            left_secs = _LOOK_SECS if until is None else min(_LOOK_SECS, until - time.monotonic())
            if left_secs <= 0:
                break
            if self._lock.acquire(timeout=left_secs):
                self._lock.release()
        return self.is_set


class Job:
    """One call that a thread makes for another; see ``Workers.submit``."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = Flag()

    def run(self) -> None:
        """Makes the call."""
        try:
            if self._work is not None:
                self._value = self._work()
        except BaseException as error:
            self._error = error
        self._work = None
        self._ended.set()

    def result(self) -> Any:
        """What the call gave, or raises what it raised; blocks until then."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Workers:
    """A few threads that do jobs, while the ``with`` block runs; the block's end waits for them.

    Where the interpreter ends and starts no more threads, jobs are done where they are handed in: a
    save that is pending at exit, or that is begun by a handler of ``atexit``, needs them too.

    Args:
        count: of threads; they start with the first job.
        name: of the threads; begins with ``ckpt-``.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ends = [Flag() for _ in range(count)]
        self._began = self._inline = False

    def submit(self, work: Callable[[], Any]) -> Job:
        """The job that does the work."""
        job = Job(work)
        if not self._began:
            owner: weakref.ref[Workers] = weakref.ref(self)
            try:
                _thread.start_new_thread(_launch, (owner, self._jobs, self._ends, self._name))
                # after it: if an interrupt comes between, there is no job yet that __exit__ could wait for
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
            end.wait()

    def _drop_jobs(self) -> None:
        """Nobody waits for those that have not begun."""
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                return


def _launch(
    owner: weakref.ref[Workers],
    jobs: queue.SimpleQueue[Job | None],
    ends: list[Flag],
    name: str,
) -> None:
    """In a thread that no signal handler interrupts: starts the others."""
    left = list(ends)
    try:
        while left:
            threading.Thread(
                target=_work, args=(owner, jobs, left[-1]), name=f"{name}-{len(left)}", daemon=True
            ).start()
            left.pop()
    except RuntimeError:  # no more threads: this one does what those would have
        for end in left[1:]:
            end.set()
        _work(owner, jobs, left[0])


def _work(owner: weakref.ref[Workers], jobs: queue.SimpleQueue[Job | None], end: Flag) -> None:
    try:
        while (
            owner() is not None
        ):  # else it was interrupted before it could say that this is the end
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
    """What the function gives for each thing, in order, worked out in several threads."""
    with Workers(threads, name) as workers:
        jobs = [workers.submit(lambda thing=thing: function(thing)) for thing in things]
        return [job.result() for job in jobs]
