"""Futures for handlers of your own: what ``async_save`` returns, and is waited for before the commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Future(Protocol):
    """Work that can be waited for."""

    def result(self, timeout: int | None = None) -> Any:
        """Blocks until the work has ended; returns its result or raises its error."""
        ...


class NoopFuture:
    """Nothing to wait for."""

    def result(self, timeout: int | None = None) -> None:
        """Returns at once."""


class CommitFuture:
    """Runs a coroutine in a thread of its own.

    Args:
        coro: what to run; begins at once.
        name: of the thread.
        **_: of Orbax's class: signals between its parts, which ckpt has not.

    Example:
        >>> import asyncio
        >>> from ckpt_orbax.v0 import future
        >>> future.CommitFuture(asyncio.sleep(0, "done")).result()
        'done'
    """

    def __init__(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, **_: Any
    ) -> None:
        self._ended: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(coro,), name=name)
        self._thread.start()

    def _run(self, coro: Coroutine[Any, Any, Any]) -> None:
        try:
            self._ended.append(asyncio.run(coro))
        except BaseException as error:
            self._error = error

    def result(self, timeout: int | None = None) -> Any:
        """Blocks until the coroutine has ended.

        Raises:
            TimeoutError: it has not after ``timeout`` seconds.
            Exception: its error.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"not done after {timeout} s; it goes on")
        if self._error is not None:
            raise self._error
        return self._ended[0]


CommitFutureAwaitingContractedSignals = CommitFuture


class ChainedFuture:
    """Several futures, then a function.

    Args:
        futures: waited for one after the other.
        cb: called when all have ended.
    """

    def __init__(self, futures: Sequence[Future], cb: Any) -> None:
        self._futures, self._callback = futures, cb

    def result(self, timeout: int | None = None) -> None:
        """Blocks until all have ended, and the function was called."""
        for one in self._futures:
            one.result(timeout)
        self._callback()


__all__ = [
    "ChainedFuture",
    "CommitFuture",
    "CommitFutureAwaitingContractedSignals",
    "Future",
    "NoopFuture",
]
