"""Work in the background: what Orbax's asynchronous calls return, and futures for handlers of your own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_logger = logging.getLogger("ckpt_orbax")


def in_thread(work: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Runs ``work`` in a thread of its own, with the caller's Context; the exit of the program waits for it."""
    thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
    try:
        return thread.submit(contextvars.copy_context().run, work)
    finally:
        thread.shutdown(wait=False)  # ends with its work


class AsyncResponse(Generic[T]):
    """Work in the background: ``result`` waits for it, ``on_complete`` calls a function after it. ``finished`` is called when
    it has succeeded, whether anyone calls ``result`` or not.
    """

    def __init__(
        self, wait: Callable[[float | None], T], finished: Callable[[], None] | None = None
    ) -> None:
        self._wait, self._finished = wait, finished
        self._lock = threading.Lock()
        if finished is not None:
            self.on_complete(lambda _: None)

    def result(self, timeout: float | None = None) -> T:
        """Blocks until the work has ended; raises its error at every call, and TimeoutError while it goes on."""
        value = self._wait(timeout)
        with self._lock:  # whoever comes second waits for the function, too
            finished, self._finished = self._finished, None
            if finished is not None:
                finished()
        return value

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Calls ``callback(result)`` in a thread of its own when the work has succeeded."""

        def wait_and_call() -> None:
            try:
                value = self.result()
            except Exception:
                # result() raises it too, but it may be that nobody calls that
                _logger.exception("work in the background failed")
                return
            callback(value)

        threading.Thread(target=wait_and_call, name="ckpt-on-complete", daemon=True).start()


def CommitFutureAwaitingContractedSignals(
    coro: Coroutine[Any, Any, Any], *, name: str | None = None, **_: Any
) -> concurrent.futures.Future[Any]:
    """Runs a coroutine in a thread of its own; what ``async_save`` of a handler may return. Orbax's signals between its parts
    are of no effect.
    """
    return in_thread(lambda: asyncio.run(coro), name or "ckpt-commit")
