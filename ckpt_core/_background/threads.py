"""Worker threads and their CPU priority. All are daemons: the interpreter ends though one waits for a disk that hangs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckpt_core._errors import drop_locals
from ckpt_core._platform import LINUX

_LOWEST_NICE = 19
T = TypeVar("T")
R = TypeVar("R")
Job = tuple["Future[Any]", Callable[[], Any]]


class Workers:
    """A thread pool for the duration of a ``with`` block, which waits for the threads at its end, or of several. Where no thread can start,
    as for a save that an ``atexit`` handler begins, ``submit`` makes each call itself.
    """

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


def give_way() -> None:
    """Gives this thread, and those that it starts, the lowest priority: on Linux, where each thread has its own."""
    if LINUX:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_NICE)
    else:
        _say_that_it_has_no_effect()


@functools.cache  # once for each process
def _say_that_it_has_no_effect() -> None:
    logging.getLogger("ckpt_core").warning(
        "Options.background_priority='low' has no effect on this system, where threads have no priority of their own: "
        "background saves take cores as the training step does"
    )
