"""Iterators that check their resume: the checkpoint holds a digest of the next element."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grain
import jax
import numpy as np

T = TypeVar("T")
_END = object()


class Proven(grain.DatasetIterator[T], Generic[T]):
    """An iterator that can look at its next element without returning it. A save takes the element from the pipeline,
    digests it, and keeps it for the next ``next``.
    """

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.iterator = iterator
        self._ahead: tuple[Any, Any] | None = None

    def __next__(self) -> T:
        if self._ahead is None:
            return next(self.iterator)
        _, element = self._ahead
        if element is _END:
            raise StopIteration
        self._ahead = None
        return element

    def peek(self, position_of: Callable[[Any], Any]) -> tuple[Any, str]:
        """The position before the next element, and the digest of that element."""
        if self._ahead is None:
            position = position_of(self.iterator)
            self._ahead = position, next(self.iterator, _END)
        position, element = self._ahead
        return position, "end" if element is _END else digest(element)

    def forget(self) -> None:
        """Drops the element that was looked at, because the position has changed."""
        self._ahead = None

    def get_state(self) -> Any:
        """Grain's state of the wrapped iterator, before the next element."""
        return self.iterator.get_state() if self._ahead is None else self._ahead[0]["grain"]

    def set_state(self, state: Any) -> None:
        """Sets the wrapped iterator to a Grain state, without a check."""
        self.forget()
        self.iterator.set_state(state)

    def start_prefetch(self) -> None:
        """Calls the wrapped iterator's method, if it has one."""
        if hasattr(self.iterator, "start_prefetch"):
            self.iterator.start_prefetch()

    def close(self) -> None:
        """Closes the wrapped iterator."""
        getattr(self.iterator, "_iterator", self.iterator).close()


def digest(element: Any) -> str:
    """SHA-256 of an element: its structure, and type, shape and bytes of its leaves."""
    found = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(element)
    for path, leaf in leaves:
        value = leaf if isinstance(leaf, (str, bytes)) else np.asarray(leaf)
        if isinstance(value, np.ndarray) and value.dtype != object:
            what, data = f"{value.dtype} {value.shape}", value.tobytes()
        else:
            what, data = type(leaf).__name__, repr(leaf).encode(errors="surrogatepass")
        found.update(f"{jax.tree_util.keystr(path)} {what} {len(data)}\n".encode() + data)
    return found.hexdigest()[:32]
