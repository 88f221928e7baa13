"""Keys at jax's coordination service: process values, and answers kept until all have read them.

Process 0 may delete an answer only after the slowest process has read it. To save messages, each
process reports what it has read once per ``TELL_EVERY`` answers. The service therefore holds at
most ``MOST_KEPT`` answers, few in most runs, and one or two read reports per process.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import time
from typing import Any

from ckpt_core._lazy import jax

TELL_EVERY = 64
"""Number of answers after which a process reports its reads, and process 0 deletes read answers."""
MOST_KEPT = 4096
"""Maximum number of answers not read by all; at this number process 0 waits before the next one."""
_LOOK_SECS = 0.05
_NOTES = "ckpt/read/"


def wait_for(client: Any, key: str, wait_secs: float) -> str | None:
    """Blocks until a key is set and returns its value; None on timeout."""
    try:
        return client.blocking_key_value_get(key, max(1, int(wait_secs * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
    return None


def try_get(client: Any, key: str) -> str | None:
    """The value of a key, or None if it is not set."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
    return None


def listing(client: Any, folder: str) -> list[tuple[str, str]]:
    """The keys set below a folder, without the folder, and their values."""
    return [(key.removeprefix(folder), value) for key, value in client.key_value_dir_get(folder)]


def answer_key(tag: str) -> str:
    """Key of process 0's answer to an agreement or a broadcast."""
    return f"ckpt/{tag}.answer"


def values_folder(tag: str) -> str:
    """Folder of the processes' values for an agreement; each key ends in the process's index."""
    return f"ckpt/{tag}:/"


def left_folder(life: int) -> str:
    """Folder of what the processes said that left in a life; each key ends in the process's index."""
    return f"ckpt/left/{life}/"


class Rounds:
    """The rounds that the processes take together, counted from 0, and anew in each life. A life ends when a process
    leaves in the middle: the others learn of it where they wait for that process, maybe some rounds later. All count
    from 0 in the next one, so that they are together again.
    """

    def __init__(self) -> None:
        self.life = 0
        self._number = itertools.count()

    def next_tag(self) -> str:
        """The tag of the next round."""
        number = next(self._number)
        return f"{self.life}.{number}" if self.life else str(number)

    def end(self, life: int) -> None:
        """A life is over; does nothing if this process knows that already."""
        if life >= self.life:
            self.life, self._number = life + 1, itertools.count()


def life_of(tag: str) -> int:
    """The life in which a round was begun."""
    life, dot, _ = tag.partition("/")[0].partition(".")
    return int(life) if dot else 0


class UnreadAnswers:
    """On process 0: the answers that other processes have not read yet."""

    def __init__(self, count: int) -> None:
        self._others = (1 << count) - 2  # bit mask: all processes but 0
        self._unread: dict[str, int] = {}  # tag -> bit mask of the processes that have not read it
        self._refused: set[str] = set()
        self._left: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._put = 0
        self._lock = threading.Lock()

    def put(self, client: Any, tag: str, text: str, *, refused: bool = False) -> None:
        """Publishes an answer; every ``TELL_EVERY`` calls, deletes the answers that all have read. If it is
        ``refused``, process 0 gave the agreement up and did not collect the others' values: they are deleted with the
        answer.
        """
        client.key_value_set(answer_key(tag), text)
        with self._lock:
            self._put += 1
            self._unread[tag] = self._others & ~self._left.pop(tag, 0)
            self._refused |= {tag} if refused else set()
            if self._put % TELL_EVERY == 0:
                self._retire(client)

    def wait_for_room(self, client: Any, timeout_secs: float) -> list[int]:
        """Blocks while ``MOST_KEPT`` answers are unread; on timeout returns the slow processes."""
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
        """Collects the read reports, and deletes the answers that all processes have read."""
        for name, text in listing(client, _NOTES):
            client.key_value_delete(_NOTES + name)
            mine = 1 << int(name.partition("/")[0])
            for tag in text.split("\n"):
                if tag in self._unread:
                    self._unread[tag] &= ~mine
                else:  # the process gave up before the answer, which may never come
                    self._left[tag] = self._left.get(tag, 0) | mine
        for tag in [tag for tag, unread in self._unread.items() if not unread]:
            del self._unread[tag]
            client.key_value_delete(answer_key(tag))
            if tag in self._refused:
                self._refused.remove(tag)
                client.key_value_delete(values_folder(tag))
        while len(self._left) > MOST_KEPT:
            self._left.popitem(last=False)


class ReadReports:
    """On the other processes: the answers that this process has read, or will never read."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._tags: list[str] = []
        self._told = 0
        self._lock = threading.Lock()

    def note(self, client: Any, tag: str) -> None:
        """Notes that this process no longer needs an answer; reports once per ``TELL_EVERY``."""
        with self._lock:
            self._tags.append(tag)
            if len(self._tags) < TELL_EVERY:
                return
            tags, self._tags = self._tags, []
            self._told += 1
            key = f"{_NOTES}{self._index}/{self._told}"
        client.key_value_set(key, "\n".join(tags))


# Kept for the client that is in use. It is the key itself, so it stays while its state is kept: the next client of a process
# that ends jax.distributed and begins it again often gets the same id.
@functools.lru_cache(1)
def rounds(client: Any) -> Rounds:
    """The rounds that the processes of this client take together."""
    return Rounds()


@functools.lru_cache(1)
def unread_answers(client: Any, count: int) -> UnreadAnswers:
    """On process 0: the answers that it has published through this client."""
    return UnreadAnswers(count)


@functools.lru_cache(1)
def read_reports(client: Any, index: int) -> ReadReports:
    """On the other processes: the answers that this one has read through this client."""
    return ReadReports(index)
