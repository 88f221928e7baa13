"""Futures for handlers of your own: what ``async_save`` returns, and is waited for before the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable

from ckpt_orbax._response import in_thread


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
        self._future = in_thread(lambda: asyncio.run(coro), name or "ckpt-commit")

    def result(self, timeout: int | None = None) -> Any:
        """Blocks until the coroutine has ended.

        Raises:
            TimeoutError: it has not after ``timeout`` seconds.
            Exception: its error.
        """
        try:
            return self._future.result(timeout)
        except TimeoutError:
            if self._future.done():
                raise  # the coroutine's own
            raise TimeoutError(f"not done after {timeout} s; it goes on") from None


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
