"""Messages between processes: a value with the call it belongs to, or the reason for a failure."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ckpt_core._errors import INTERRUPT, BarrierTimeout, CheckpointError

_DIGEST_LETTERS = 12


class NotTogether(CheckpointError):
    """Another process makes a different call or failed, so it will not reach the next agreement."""

    def __init__(self, text: str, ended: int | None = None) -> None:
        super().__init__(text)
        self.ended = ended  # the life of the rounds that is over, because a process left


class Message(NamedTuple):
    """A value of one process, or the answer of process 0."""

    call: str  # what the process is about to do; empty after the first agreement of a round
    text: str

    def dump(self) -> str:
        # Error texts contain paths, which may have undecodable bytes (surrogates).
        text = self.text.encode(errors="backslashreplace").decode()
        return f"={self.call}\n{text}"

    def value_for(self, call: str) -> str:
        """The text, for a process that makes the same call; raises NotTogether for another call."""
        if self.call != call:
            raise NotTogether(_differing([self.call, call], "here"))
        return self.text


class Failure(NamedTuple):
    """The reason why a process sends no value, or process 0 no answer."""

    call: str  # always empty: the process gave up its call
    text: str  # for the other processes
    absent: list[int] | None = None  # process 0 waited for these until the timeout
    ended: int | None = None  # the life of the rounds that is over, because a process left

    def dump(self) -> str:
        return f"!{self.call}\n{json.dumps([self.text, self.absent, self.ended])}"

    @staticmethod
    def of(index: int, error: BaseException) -> Failure:
        """The message that process ``index`` sends after ``error``."""
        if isinstance(error, NotTogether) and error.ended is not None:
            return Failure("", str(error), None, error.ended)
        absent = list(error.absent) if isinstance(error, BarrierTimeout) else None
        return Failure("", f"process {index} gave up: {type(error).__name__}: {error}", absent)

    def value_for(self, call: str) -> str:
        """Raises the failure in the process that received it."""
        if self.absent is not None:
            raise BarrierTimeout(self.text, absent=self.absent)
        raise NotTogether(self.text, self.ended)


class Common(NamedTuple):
    """What one process says where most say the same: the digest of that, and what it says for itself."""

    digest: str
    own: str

    def dump(self) -> str:
        return self.digest + self.own

    @staticmethod
    def parse(text: str) -> Common:
        """What ``dump`` gave."""
        return Common(text[:_DIGEST_LETTERS], text[_DIGEST_LETTERS:])


def digest(text: str) -> str:
    """12 letters; of two texts that processes of one job say they are equal only if the texts are."""
    found = hashlib.sha256(text.encode(errors="backslashreplace")).digest()
    return base64.b64encode(found)[:_DIGEST_LETTERS].decode()


def parse(text: str) -> Message | Failure:
    """The message that ``dump`` wrote."""
    head, _, rest = text[1:].partition("\n")
    if text.startswith("="):
        return Message(head, rest)
    return Failure(head, *json.loads(rest))


def answer_to(texts: Sequence[str], judge: Callable[[list[str]], str]) -> Message | Failure:
    """On process 0: the answer to the messages of all processes; a failure if the calls differ."""
    everyone = [parse(text) for text in texts]
    for one in everyone:
        if isinstance(one, Failure):
            return one
    calls = [one.call for one in everyone]
    other = next((index for index, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        return Failure("", _differing([calls[0], calls[other]], f"in process {other}"))
    return Message(calls[0], judge([one.text for one in everyone]))


def _differing(calls: Sequence[str], where: str) -> str:
    first, second = (call or "go on with another call" for call in calls)
    return (
        f"the processes make different calls: process 0 is about to {first}, and what was called "
        f"{where} is to {second}: all processes must make the same calls, in one order"
    )


def first_failure(texts: Sequence[str]) -> str:
    """``[index, text]`` of the first text with a leading ``!`` (an error), as JSON; else empty. An interrupt comes
    first, since its process takes part in no agreement on what to do next. Then comes an error that says nothing of
    the checkpoint: no older one may be taken instead. A checkpoint that one process no longer found was deleted, and
    what others miss of it is no damage.
    """
    failed = [(index, text[1:]) for index, text in enumerate(texts) if text.startswith("!")]
    order = ("CheckpointNotFound", "CheckpointCorrupt")

    def rank(one: tuple[int, str]) -> int:
        kind = kind_of(one[1])
        if kind == INTERRUPT:
            return -1
        return 1 + order.index(kind) if kind in order else 0

    return json.dumps(min(failed, key=rank)) if failed else ""


def text_of(error: BaseException) -> str:
    """An error as it is sent to the other processes: ``type: text``."""
    kind = "" if isinstance(error, Exception) else f"{INTERRUPT}: "
    return f"{kind}{type(error).__name__}: {error}"


def kind_of(text: str) -> str:
    """Name of the class of an error that was sent, or ``INTERRUPT``."""
    return text.partition(": ")[0]


def waiting_elsewhere(entries: Iterable[tuple[str, str]], absent: Sequence[int]) -> str:
    """In which calls the absent processes wait, as the end of a message; empty if in none. ``entries`` are keys and
    values at the coordination service.
    """
    found: list[str] = []
    for key, text in entries:
        tag, _, index = key.rpartition(":/")
        if tag and index.isdigit() and int(index) in absent:
            call = parse(text).call
            found.append(f"process {index} waits at {tag!r}{call and f', to {call}'}")
    where = ", ".join(sorted(found)[:5])
    return where and f"; meanwhile {where}: all processes must make the same calls, in one order"
