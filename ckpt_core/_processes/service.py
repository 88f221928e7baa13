"""Keys at jax's coordination service: what a process says, and answers that stay until all have read them.

An answer of process 0 must not go before the slowest has read it, and must go afterwards. Nobody
sends a message for that alone: every process notes what it has read, and tells it once for many.
Left at the service are therefore at most ``MOST_KEPT`` answers, few in most runs, and of each process
one or two notes of what it has read.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

from ckpt_core._lazy import jax

TELL_EVERY = 64
"""After so many answers a process tells which it has read, and process 0 removes those that all have."""
MOST_KEPT = 4096
"""With so many answers that somebody has not read, process 0 waits before it decides anything more."""
_LOOK_SECS = 0.05
_NOTES = "ckpt/read/"


def wait_for(client: Any, key: str, wait_secs: float) -> str | None:
    """The value of a key as soon as it is set; None where it is not set in time."""
    try:
        return client.blocking_key_value_get(key, max(1, int(wait_secs * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
    return None


def try_get(client: Any, key: str) -> str | None:
    """The value of a key, or None where it is not set."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
    return None


def listing(client: Any, folder: str) -> list[tuple[str, str]]:
    """What is set below a folder: the rest of each key, with its value."""
    return [(key.removeprefix(folder), value) for key, value in client.key_value_dir_get(folder)]


def answer_key(tag: str) -> str:
    """Where the answer to an agreement, or a decision, stands."""
    return f"ckpt/{tag}.answer"


def said_folder(tag: str) -> str:
    """Where the processes say what they have to say for an agreement, each below its index."""
    return f"ckpt/{tag}:/"


class Kept:
    """The answers of process 0 that others have yet to read.

    Args:
        count: of all processes.
    """

    def __init__(self, count: int) -> None:
        self._others = (1 << count) - 2  # bits of all but the first
        self._unread: dict[str, int] = {}  # by tag, bits of those who have not read it
        self._refused: set[str] = set()
        self._left: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._put = 0
        self._lock = threading.Lock()

    def put(self, client: Any, tag: str, text: str, *, refused: bool = False) -> None:
        """Gives an answer to all; removes what all have read, now and then.

        Args:
            refused: nobody looks at what the others say for it: it is removed with the answer.
        """
        client.key_value_set(answer_key(tag), text)
        with self._lock:
            self._put += 1
            self._unread[tag] = self._others & ~self._left.pop(tag, 0)
            self._refused |= {tag} if refused else set()
            if self._put % TELL_EVERY == 0:
                self._retire(client)

    def wait_for_room(self, client: Any, timeout_secs: float) -> list[int]:
        """Returns when there are fewer than the most that may be kept; or those who do not read them."""
        deadline = time.monotonic() + timeout_secs
        while len(self._unread) >= MOST_KEPT:
            with self._lock:
                self._retire(client)
                if len(self._unread) < MOST_KEPT:
                    break
                slow = next(iter(self._unread.values()))
            if time.monotonic() >= deadline:
                return [index for index in range(slow.bit_length()) if slow >> index & 1]
            time.sleep(_LOOK_SECS)
        return []

    def _retire(self, client: Any) -> None:
        """Removes what all have read, as they told."""
        for name, text in listing(client, _NOTES):
            client.key_value_delete(_NOTES + name)
            mine = 1 << int(name.partition("/")[0])
            for tag in text.split("\n"):
                if tag in self._unread:
                    self._unread[tag] &= ~mine
                else:  # given up before it was answered; it may never be
                    self._left[tag] = self._left.get(tag, 0) | mine
        for tag in [tag for tag, unread in self._unread.items() if not unread]:
            del self._unread[tag]
            client.key_value_delete(answer_key(tag))
            if tag in self._refused:
                self._refused.remove(tag)
                client.key_value_delete(said_folder(tag))
        while len(self._left) > MOST_KEPT:
            self._left.popitem(last=False)


class Read:
    """What one of the others has read, or will not read any more.

    Args:
        index: of this process.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._tags: list[str] = []
        self._told = 0
        self._lock = threading.Lock()

    def note(self, client: Any, tag: str) -> None:
        """The answer is not needed here any more; told to process 0 together with many others."""
        with self._lock:
            self._tags.append(tag)
            if len(self._tags) < TELL_EVERY:
                return
            tags, self._tags = self._tags, []
            self._told += 1
            key = f"{_NOTES}{self._index}/{self._told}"
        client.key_value_set(key, "\n".join(tags))
