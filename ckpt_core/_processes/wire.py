"""What the processes write to each other at jax's coordination service: its keys, and the texts in them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpt_core._errors import (
    BarrierTimeout,
    CheckpointError,
    kind_of,
    mark_agreed,
    raised_by_another,
)
from ckpt_core._lazy import jax

_KEPT_ANSWERS = 4096  # process 0 deletes an answer when it has given so many more
MOST_AHEAD = 2048
"""After so many answers for which process 0 waited for nobody, it waits once: no answer is deleted before all have it."""


class NotTogether(CheckpointError):
    """The processes make different calls, or load different things: no two of them can go on together."""


class Said(NamedTuple):
    """The value of one process, or the answer to all; an error in the place of either."""

    call: str  # what the process is about to do
    text: str  # the value, or what the others say of the error
    failed: int = -1  # the process whose error it is
    kind: str = ""  # name of the error's class; empty for an interrupt
    absent: Sequence[int] = ()  # processes that did not come in time

    @staticmethod
    def error_of(index: int, call: str, error: BaseException) -> Said:
        """The error of process ``index``, as it is sent to the others."""
        if isinstance(error, NotTogether):
            return Said(call, str(error), index, "NotTogether")
        if isinstance(error, BarrierTimeout):
            return Said(call, str(error), index, "", [*error.absent])
        kind = kind_of(error)
        text = f"process {index} could not {call}: {kind}: {error}"
        return Said(call, text, index, kind if isinstance(error, Exception) else "")

    def dump(self) -> str:
        """As text: a value as it is, an error as JSON, since paths in it may have undecodable bytes."""
        return "!" + json.dumps(self) if self.failed >= 0 else f"={self.call}\n{self.text}"

    @staticmethod
    def parse(text: str) -> Said:
        """What ``dump`` wrote."""
        if text.startswith("!"):
            return Said(*json.loads(text[1:]))
        call, _, value = text[1:].partition("\n")
        return Said(call, value)

    def raised_here(self, where: str) -> CheckpointError:
        """The error to raise in a process that had none."""
        text = f"{where}: {self.text}" if where else self.text
        if self.absent:
            return BarrierTimeout(text, absent=self.absent)
        if self.kind == "NotTogether":
            return NotTogether(text)
        error = raised_by_another(self.kind, text)
        self.mark(error)
        return error

    def mark(self, error: BaseException) -> None:
        """Notes that all processes raise for this failure, unless they cannot go on together after it."""
        if self.kind and self.kind != "NotTogether":
            mark_agreed(error, self.kind)


def failure_of(everyone: Sequence[Said]) -> Said | None:
    """The error that all raise: an interrupt first, as its process agrees on nothing more; then what says nothing of the
    checkpoint, so that no older one is taken; then one that is not found, of which others may miss files.
    """
    ranks = {"": -1, "CheckpointNotFound": 1, "CheckpointCorrupt": 2}
    if failed := [one for one in everyone if one.failed >= 0]:
        return min(failed, key=lambda one: ranks.get(one.kind, 0))
    first = everyone[0]
    for index, one in enumerate(everyone):
        if one.call != first.call:
            return Said.error_of(
                index, one.call, different_calls(first.call, one.call, f"in process {index}")
            )
    return None


def different_calls(first: str, other: str, where: str) -> NotTogether:
    """The error of processes that make different calls at one moment."""
    return NotTogether(
        f"the processes make different calls: process 0 is about to {first}, and what was called "
        f"{where} is to {other}: all processes must make the same calls, in one order"
    )


def waiting_elsewhere(client: Any, absent: Sequence[int]) -> str:
    """The calls in which absent processes wait instead, to end a message; empty where the service does not say."""
    found, known = list[str](), dict[str, str]()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        known = {key.removeprefix("ckpt/"): text for key, text in client.key_value_dir_get("ckpt/")}
    for key, text in known.items():
        tag, _, index = key.rpartition(":/")
        if tag and f"{tag}.answer" not in known and index.isdigit() and int(index) in absent:
            said = Said.parse(text)
            waits = f"process {index} waits at {tag!r}, to {said.call}"
            found.append(waits if said.failed < 0 else said.text)
    where = ", ".join(sorted(found)[:5])
    return where and f"; meanwhile {where}: all processes must make the same calls, in one order"


def answer_key(tag: str) -> str:
    """Key of process 0's answer."""
    return f"ckpt/{tag}.answer"


def values_folder(tag: str) -> str:
    """Folder of the processes' values; each key ends in the process's index."""
    return f"ckpt/{tag}:/"


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


def arrived(client: Any, tag: str) -> dict[int, str]:
    """Process -> value, for the processes that have arrived."""
    folder = values_folder(tag)
    return {int(key.removeprefix(folder)): text for key, text in client.key_value_dir_get(folder)}


class Rounds:
    """The rounds that the processes of a client take together; on process 0 with the answers that stay until the others have
    surely read them.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self._kept: deque[str] = deque()
        self.ahead = 0  # for so many in turn process 0 has waited for nobody
        self._lock = threading.Lock()

    def put(self, client: Any, tag: str, text: str, waited: bool) -> None:
        """Publishes an answer; ``waited`` says whether the values of all had come."""
        client.key_value_set(answer_key(tag), text)
        with self._lock:
            self.ahead = 0 if waited else self.ahead + 1
            self._kept.append(tag)
            old = self._kept.popleft() if len(self._kept) > _KEPT_ANSWERS else None
        if old is not None:
            client.key_value_delete(answer_key(old))
            client.key_value_delete(values_folder(old))


# The key is the client, not its id, which the next client of a process often gets again.
@functools.lru_cache(1)
def rounds(client: Any) -> Rounds:
    """What this process knows of a client."""
    return Rounds()
