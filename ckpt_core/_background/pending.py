"""Work in threads of its own, and the end of the interpreter, which waits for what is being saved."""

from __future__ import annotations

import _thread
import atexit
import copy
import functools
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Generator
from typing import Any

from ckpt_core._background.threads import Flag
from ckpt_core._errors import CheckpointError, drop_locals
from ckpt_core._fork import HOME_PID, forked

_HEAD_START_SECS = 0.1
"""How long a thread waits for its starter to go on; an interrupt may have kept it from saying so."""


class Pending:
    """Work in a thread of its own; whether it is done says the thread itself.

    The thread is no daemon, and the end of the interpreter waits for it. A failure is told once, to
    whoever asks first, and then nobody here holds what it holds.

    Args:
        path: for messages.
        work: called once, in the thread.
        name: of the thread; begins with ``ckpt-``.
    """

    def __init__(self, path: str, work: Callable[[], Any], name: str) -> None:
        self.path = path
        self._work: Callable[[], Any] | None = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._told = self._failed = False
        self._claim = threading.Lock()  # whoever takes it does the work, or sees that nobody will
        self._abandoned = self._launched = False
        self._ident: int | None = None
        self._caller_left, self._ended = Flag(), Flag()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    def start(self) -> None:
        """Begins the work; where the interpreter ends and starts no more threads, does it here.

        Whatever this raises (``RuntimeError`` where the system has no more threads, or what a signal
        handler raised), the caller asks ``abandon`` whether the work goes on.
        """
        _remember(self)
        if _last_call_over():
            self._run_here()
            _report_failures()
            return
        try:
            # one call of the interpreter's own; Thread.start waits, in Python, for the thread to be there
            self._launched = True
            _thread.start_new_thread(self._launch, ())
        except RuntimeError:
            if not _main_has_ended():
                raise
            self._run_here()
        self._caller_left.set()

    def abandon(self) -> bool:
        """Keeps work that has not begun from ever beginning; whether it never will."""
        if self._claim.acquire(blocking=False):
            self._abandoned = self._told = self._failed = True
            self._error = CheckpointError(f"{self.path}: was never begun")
            self._work = None
            _all.discard(self)
            self._ended.set()
        return self._abandoned

    def _launch(self) -> None:
        """In a thread that no signal handler interrupts: starts the one that does the work."""
        try:
            self._thread.start()
        except (
            RuntimeError
        ):  # the interpreter ends, or these are all threads: then this one does it
            self._run_here()

    def _run_here(self) -> None:
        if self._claim.acquire(blocking=False):
            self._do()

    def _run(self) -> None:
        # the caller gets the interpreter back at once: otherwise it waits for a switch of threads
        self._caller_left.wait(_HEAD_START_SECS)
        self._run_here()

    def _do(self) -> None:
        self._ident = threading.get_ident()
        try:
            if self._work is not None:
                self._value = self._work()
        except BaseException as error:
            drop_locals(error)
            self._error, self._failed = error, True
        finally:
            self._work = None
            if self._error is None or isinstance(self, PendingLoad):
                _all.discard(self)  # nothing is left to be told at exit
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Whether it ended in time; raises nothing of its own.

        Raises:
            CheckpointError: called by the work itself, such as by a listener, which would wait for ever.
            ForkedProcess: in a forked child, which does not have the thread.
        """
        if os.getpid() != HOME_PID and not self.done():
            raise forked()
        if self.is_this_thread():
            raise CheckpointError(
                f"{self.path}: {self._thread.name} would wait for itself: a listener or policy that is "
                "called in the background must not wait for the save that calls it"
            )
        return self._ended.wait(timeout_secs)

    def is_this_thread(self) -> bool:
        """Whether it is the work that asks."""
        return threading.get_ident() == self._ident and not self.done()

    @property
    def untold(self) -> BaseException | None:
        """The failure, if it has ended with one that nobody has been told of."""
        return None if self._told or not self.done() else self._error

    def raise_untold(self, note: str) -> None:
        """Raises the failure, if nobody has been told of it; nothing here holds it from then on.

        Args:
            note: added to it.
        """
        error = self.untold
        if error is None:
            return
        if note not in getattr(error, "__notes__", ()):  # not again after an interrupt
            error.add_note(note)
        try:
            # no call from here on, after which a signal handler could raise something else instead
            self._error, self._told = None, True
            raise error
        finally:
            del error  # it knows this frame, which must not know it

    def take_error(self) -> BaseException | None:
        """The failure, if nobody has been told of it; it is told now."""
        error, self._error = self.untold, None
        self._told = True
        return error

    def result(self, timeout_secs: float | None = None) -> Any:
        """What the work gave; blocks until it ended.

        Raises:
            TimeoutError: it did not end in time; it goes on.
            Exception: whatever the work raised, with its own type.
        """
        if not self.wait(timeout_secs):
            raise TimeoutError(f"{self.path}: not done after {timeout_secs:g} s; it goes on")
        error = self._error
        if error is None:
            return self._value
        for_the_next = _again(error)
        try:
            self._error, self._told = for_the_next, True  # as above
            raise error
        finally:
            del error

    def __init_subclass__(cls) -> None:
        # Python's own messages name a method after the class that users know
        for name in ("result", "done", "wait"):
            method: Any = getattr(cls, name)
            own: Any = types.FunctionType(
                method.__code__, method.__globals__, name, method.__defaults__, method.__closure__
            )
            functools.update_wrapper(own, method)
            del own.__wrapped__
            own.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, own)

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio  # whoever awaits has it already

        return asyncio.to_thread(self.result).__await__()

    def __repr__(self) -> str:
        state = "running"
        if self.done():
            state = "failed" if self._failed else "done"
        return f"<{type(self).__name__} {self.path}: {state}>"


class PendingSave(Pending):
    """A save in the background: ``.result()`` returns when it is durable.

    The end of the interpreter waits for it. A failure that nobody asked about is printed then, and
    ends the process with code 1. ``await`` gives the result too.
    """


class PendingLoad(Pending):
    """A load in the background: ``.result()`` gives what ``load`` would have; so does ``await``.

    At the end of the interpreter nobody can ask any more: the load then ends with what it is
    reading, and says nothing.
    """


def _again(error: BaseException) -> BaseException:
    """The same failure for whoever asks again, without what held the first one since it was raised."""
    try:
        again = copy.copy(error)
    except Exception:  # a class whose constructor wants more than it keeps
        return error
    if type(again) is not type(error):
        return error
    again.__cause__, again.__suppress_context__ = error.__cause__, error.__suppress_context__
    return again.with_traceback(error.__traceback__)


# ---- the end of the interpreter -----------------------------------------------------------------

_all: set[Pending] = set()
"""What runs, and failures that nobody was told of."""
_at_exit: list[str] = []
"""Which of the two calls at exit are registered, and whether the last one is over."""


def _remember(pending: Pending) -> None:
    if "early" not in _at_exit:
        # besides the call that was registered first and comes last: this one comes before jax, which
        # was imported meanwhile, puts its devices away
        _at_exit.append("early")
        atexit.register(_finish)
    for other in list(_all):
        if other._told:  # pyright: ignore[reportPrivateUsage]
            _all.discard(other)
    _all.add(pending)


def _last_call_over() -> bool:
    return "over" in _at_exit


def _main_has_ended() -> bool:
    return not threading.main_thread().is_alive()


def nobody_is_left() -> bool:
    """Whether the interpreter ends and no thread but ours goes on, so that no load is wanted any more."""
    if not _main_has_ended():
        return False
    return all(
        thread.daemon or thread.name.startswith("ckpt-") or thread is threading.main_thread()
        for thread in threading.enumerate()
    )


def _finish() -> None:
    """Returns when nothing is being saved or loaded any more.

    A first interrupt (Ctrl-C, a handler that calls ``sys.exit``) is told what it would cost; a second
    one gives up what is still being saved.
    """
    if os.getpid() != HOME_PID:
        return  # a forked child: what is being saved is its parent's
    interrupted = False
    while running := [one for one in list(_all) if _is_running(one)]:
        try:
            running[0].wait()
        except BaseException:
            saves = [one.path for one in running if isinstance(one, PendingSave)]
            if interrupted:
                _give_up(saves)
            interrupted = True
            for path in saves:
                print(
                    f"ckpt: {path} is still being saved; interrupt again to end without it",
                    file=sys.stderr,
                )


def _is_running(pending: Pending) -> bool:
    # one that was never started never ends
    return pending._launched and not pending.done()  # pyright: ignore[reportPrivateUsage]


def _finish_last() -> None:
    _finish()
    if os.getpid() == HOME_PID:
        _report_failures()
    _at_exit.append("over")


def _report_failures() -> None:
    failed = [
        (pending.path, error)
        for pending in list(_all)
        if isinstance(pending, PendingSave) and (error := pending.untold) is not None
    ]
    if not failed:
        return
    for path, error in failed:
        print(f"ckpt: {path} was not saved:", file=sys.stderr)
        traceback.print_exception(error)
    _exit_with_failure()


def _give_up(paths: list[str]) -> None:
    for path in paths:
        print(f"ckpt: {path} was not saved: interrupted at exit", file=sys.stderr)
    _exit_with_failure()


def _exit_with_failure() -> None:
    """Ends the process with code 1, which an exit handler cannot set in any other way."""
    import logging

    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(1)


atexit.register(_finish_last)
