"""Background saves and loads, each in its own thread, for which interpreter exit waits; and pools of worker threads.

All threads are daemons: the interpreter ends though one waits for a disk that hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckpt_core._errors import CheckpointError, drop_locals
from ckpt_core._fork import HOME, forked
from ckpt_core._platform import LINUX

_HEAD_START_SECS = 0.1  # maximum wait of a new thread for its starter to continue


class Pending:
    """Work in a daemon thread, of lowest priority if ``low``, for which interpreter exit waits: ``threading`` would lose
    a first Ctrl-C. The first caller that asks gets the error of the work; ``result`` keeps a copy for its next caller.
    """

    def __init__(self, path: str, work: Callable[[], Any], name: str, *, low: bool = False) -> None:
        self.path = path
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self.unreported: BaseException | None = None  # the error, until a caller has received it
        self.ended = self._failed = False  # ended: as done(), for those who ask often
        self._claim = threading.Lock()  # taken once: by the work's thread or by abandon
        self._abandoned = False
        self._ident: int | None = None
        self._low = low
        self._caller_left, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread; at interpreter exit runs the work here. After an error the caller must ask ``abandon``."""
        _remember(self)
        if "over" in _at_exit:
            self._run_here()
            _report_failures()
            return
        try:
            self._thread.start()
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise
            self._run_here()
        self._caller_left.set()

    def abandon(self) -> bool:
        """Cancels the work unless it has begun; True if it will never run."""
        if self._claim.acquire(blocking=False):
            self._abandoned = self._failed = True
            self._error = CheckpointError(f"{self.path}: was never started")
            del self._work
            unfinished.discard(self)
            self._end()
        return self._abandoned

    def _run(self) -> None:
        # Let the caller continue first: otherwise it may wait a whole GIL switch interval.
        self._caller_left.wait(_HEAD_START_SECS)
        if self._low:
            take_lowest_priority()
        self._run_here()

    def _run_here(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self._ident = threading.get_ident()
        try:
            self._value = self._work()
        except BaseException as error:
            drop_locals(error)
            self._error = self.unreported = error
            self._failed = True
        finally:
            del self._work
            if self._error is None or isinstance(self, PendingLoad):
                unfinished.discard(self)  # nothing to report at exit
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._ended.set()

    def done(self) -> bool:
        """Whether the work has ended, successfully or not."""
        return self.ended

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Blocks until the work has ended or the timeout; returns whether it has ended, and does not raise its error.
        Raises CheckpointError in the thread of the work, as in a listener: a deadlock; ForkedProcess in a forked
        child, where the thread does not exist.
        """
        if self.ended:
            return True
        if os.getpid() != HOME.pid:
            raise forked()
        if self.is_this_thread():
            raise CheckpointError(
                f"{self.path}: {self._thread.name} would wait for itself: a listener or policy that is "
                "called in the background must not wait for the save that calls it"
            )
        return self._ended.wait(timeout_secs)

    def is_this_thread(self) -> bool:
        """Whether the current thread is the one that runs the work."""
        return threading.get_ident() == self._ident and not self.ended

    def take_error(self) -> BaseException | None:
        """Returns the error, if no caller has received it, and marks it as received."""
        error = self.unreported
        self._error = self.unreported = None
        return error

    def result(self, timeout_secs: float | None = None) -> Any:
        """Blocks until the work has ended; its result or error. After a TimeoutError the work continues."""
        if not self.wait(timeout_secs):
            raise TimeoutError(f"{self.path}: not done after {timeout_secs:g} s; it goes on")
        error = self._error
        if error is None:
            return self._value
        for_the_next = _copied(error)
        try:
            self._error, self.unreported = for_the_next, None
            raise error
        finally:
            del error

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # already imported by code that awaits

        return asyncio.to_thread(self.result).__await__()

    def __repr__(self) -> str:
        state = "running"
        if self.done():
            state = "failed" if self._failed else "done"
        return f"<{type(self).__name__} {self.path}: {state}>"


class PendingSave(Pending):
    """A background save: ``.result()``, or ``await``, returns when the checkpoint is durable.

    Interpreter exit waits for it, and if it failed and no caller has received the error, prints that and ends the
    process with code 1.

    Example:
        >>> import ckpt_core as ckpt, numpy as np, tempfile
        >>> pending = ckpt.save_async(tempfile.mkdtemp() + "/checkpoint", {"w": np.zeros(3)})
        >>> pending.result()  # raises the error of the save, if it failed
        >>> pending.done()
        True
    """


class PendingLoad(Pending):
    """A background load: ``.result()``, or ``await``, returns what ``load`` would. At interpreter exit it stops silently."""


def _copied(error: BaseException) -> BaseException:
    """A copy of the error for a next caller: raising the original would keep its callers' locals alive."""
    try:
        again = copy.copy(error)
    except Exception:  # its class cannot be copied, such as with extra constructor arguments
        return error
    if type(again) is not type(error):
        return error
    again.__cause__, again.__suppress_context__ = error.__cause__, error.__suppress_context__
    return again.with_traceback(error.__traceback__)


unfinished: set[Pending] = set()  # running work, and saves with an error that nobody has received


def wait_for_saves(place: str, timeout_secs: float, but: Collection[Pending | None] = ()) -> None:
    """Blocks until no background save of this process, but for these, writes at a path, above it or below."""
    saves = [one for one in list(unfinished) if isinstance(one, PendingSave) and not one.ended]
    if any(one.is_this_thread() for one in saves):
        return  # another save may wait for the one of this thread
    for one in saves:
        if one not in but and _overlap(place, one.path) and not one.wait(timeout_secs):
            raise CheckpointError(
                f"{one.path}: this process is still saving it after {timeout_secs:g} s (Options.timeout_secs): call "
                "result() of that save, or wait_until_finished() of its Checkpointer, first"
            )


def _overlap(one: str, other: str) -> bool:
    one, other = (f"{path if '://' in path else os.path.realpath(path)}/" for path in (one, other))
    return one.startswith(other) or other.startswith(one)


_at_exit: list[str] = []
"""``early``: the exit handler of _remember is registered; ``over``: _finish_last has returned."""


def _remember(pending: Pending) -> None:
    if "early" not in _at_exit:
        # Exit handlers run in reverse order of registration. _finish_last is registered when this
        # module is imported; this one later, so that it runs before jax releases its devices.
        _at_exit.append("early")
        atexit.register(_finish)
    for other in list(unfinished):
        if other.ended and other.unreported is None:
            unfinished.discard(other)
    unfinished.add(pending)


def nobody_is_left() -> bool:
    """Whether the interpreter exits and only ckpt's threads remain: no load is needed any more."""
    main = threading.main_thread()
    others = (one for one in threading.enumerate() if one is not main and not one.daemon)
    return not main.is_alive() and all(one.name.startswith("ckpt-") for one in others)


def _finish() -> None:
    """Exit handler: blocks until nothing is running. The first interrupt names the saves, the second one abandons them."""
    if os.getpid() != HOME.pid:
        return  # in a forked child: the saves belong to its parent
    interrupted = False
    while running := [one for one in list(unfinished) if not one.ended]:
        try:
            running[0].wait()
        except BaseException:
            said = "is still being saved; interrupt again to end without it"
            if interrupted:
                said = "was not saved: interrupted at exit"
            for save in running:
                if isinstance(save, PendingSave):
                    print(f"ckpt: {save.path} {said}", file=sys.stderr)
            if interrupted:
                _exit_with_failure()
            interrupted = True


def _finish_last() -> None:
    _finish()
    if os.getpid() == HOME.pid:
        _report_failures()
    _at_exit.append("over")


def _report_failures() -> None:
    failed = False
    for pending in list(unfinished):
        if isinstance(pending, PendingSave) and (error := pending.unreported) is not None:
            print(f"ckpt: {pending.path} was not saved:", file=sys.stderr)
            traceback.print_exception(error)
            failed = True
    if failed:
        _exit_with_failure()


def _exit_with_failure() -> None:
    """Ends the process with code 1; an exit handler can set the code only with os._exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(1)


atexit.register(_finish_last)


_LOWEST_NICE = 19
T = TypeVar("T")
R = TypeVar("R")
Job = tuple["Future[Any]", Callable[[], Any]]


class Workers:
    """Threads for a ``with`` block, which waits for them. Where none can start, as at exit, ``submit`` makes each call."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queues a call of ``work``."""
        job: Job = Future(), work
        if len(self._threads) < self._count:
            name = f"{self._name}-{len(self._threads)}"
            worker = threading.Thread(None, _work, name, (self._jobs,), daemon=True)
            self._threads.append(worker)  # an interrupt may come while it starts
            try:
                worker.start()
            except RuntimeError:
                self._threads.remove(worker)
        self._jobs.put(job)
        if not self._threads:
            self._jobs.put(None)
            _work(self._jobs)
            self._jobs.get()
        return job[0]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.end(drop=error is not None)

    def end(self, *, drop: bool) -> None:
        """Blocks until the threads have ended; with ``drop`` without the jobs that no thread has begun."""
        if drop:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
        self._jobs.put(None)
        for thread in self._threads:
            if thread.is_alive():  # else an interrupt came before it ran
                thread.join()
        self._threads, self._jobs = [], queue.SimpleQueue()


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        result, work = job
        try:
            result.set_result(work())
        except BaseException as error:
            drop_locals(error)
            result.set_exception(error)
        del job, result, work  # the error's traceback refers to this frame
    jobs.put(None)  # one ends them all, and a thread that starts late


def run_each(function: Callable[[T], R], things: Iterable[T], threads: int, name: str) -> list[R]:
    """The results of ``function`` for each of ``things``, in order, computed in several threads; of one, in this thread."""
    things = list(things)
    if len(things) < 2:
        return list(map(function, things))
    with Workers(min(threads, len(things)), name) as workers:
        jobs = [workers.submit(lambda thing=thing: function(thing)) for thing in things]
        return [job.result() for job in jobs]


def take_lowest_priority() -> None:
    """Gives this thread, and those that it starts, the lowest priority: on Linux, where each thread has its own."""
    if LINUX:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_NICE)
    else:
        _warn_once(
            "Options.background_priority='low' has no effect on this system, where threads have no priority of their own: "
            "background saves take cores as the training step does"
        )


_warn_once = functools.cache(logging.getLogger("ckpt_core").warning)
