"""What processes say to each other: a value with the call that it belongs to, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ckpt_core._errors import BarrierTimeout, CheckpointError


class NotTogether(CheckpointError):
    """Another process does something else, or cannot take part: it will not come to what follows."""


class Said(NamedTuple):
    """A value, or an answer.

    Attributes:
        call: what the process is about to do; empty within a round.
        text: the value.
    """

    call: str
    text: str

    def dump(self) -> str:
        # errors tell of paths, which need not be text
        text = self.text.encode(errors="backslashreplace").decode()
        return f"={self.call}\n{text}"

    def taken(self, call: str) -> str:
        """The text, for a process that came for the same.

        Raises:
            CheckpointError: it belongs to another call.
        """
        if self.call != call:
            raise NotTogether(_differing([self.call, call], "here"))
        return self.text


class Failure(NamedTuple):
    """Why there is no value, or no answer.

    Attributes:
        call: empty; whatever the process wanted, it does not any more.
        text: what is said to the others.
        absent: for whom process 0 has waited in vain; None where that is not why.
    """

    call: str
    text: str
    absent: list[int] | None = None

    def dump(self) -> str:
        return f"!{self.call}\n{json.dumps([self.text, self.absent])}"

    @staticmethod
    def of(index: int, error: BaseException) -> Failure:
        """That of a process with this error."""
        absent = list(error.absent) if isinstance(error, BarrierTimeout) else None
        return Failure("", f"process {index} gave up: {type(error).__name__}: {error}", absent)

    def taken(self, call: str) -> str:
        """Raises what the others are told."""
        if self.absent is not None:
            raise BarrierTimeout(self.text, absent=self.absent)
        raise NotTogether(self.text)


def parse(text: str) -> Said | Failure:
    """What a process said, or process 0 answered."""
    head, _, rest = text[1:].partition("\n")
    if text.startswith("="):
        return Said(head, rest)
    return Failure(head, *json.loads(rest))


def judged(texts: Sequence[str], judge: Callable[[list[str]], str]) -> Said | Failure:
    """The answer to what all processes said, by index: what the judge says, if all came for one call."""
    everyone = [parse(text) for text in texts]
    for one in everyone:
        if isinstance(one, Failure):
            return one
    calls = [one.call for one in everyone]
    other = next((index for index, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        return Failure("", _differing([calls[0], calls[other]], f"in process {other}"))
    return Said(calls[0], judge([one.text for one in everyone]))


def _differing(calls: Sequence[str], where: str) -> str:
    first, second = (call or "go on with another call" for call in calls)
    return (
        f"the processes make different calls: process 0 is about to {first}, and what was called "
        f"{where} is to {second}: all processes must make the same calls, in one order"
    )


def first_failure(texts: Sequence[str]) -> str:
    """Index and text of the first that tells of an error, as JSON; empty where none does."""
    failed = [(index, text[1:]) for index, text in enumerate(texts) if text.startswith("!")]
    return json.dumps(failed[0]) if failed else ""


def meanwhile(entries: Iterable[tuple[str, str]], absent: Sequence[int]) -> str:
    """What the absent processes wait for, as the end of a sentence; empty where they do not.

    Args:
        entries: what stands at the service: keys with their values.
        absent: indices of processes.
    """
    found: list[str] = []
    for key, text in entries:
        tag, _, index = key.rpartition(":/")
        if tag and index.isdigit() and int(index) in absent:
            call = parse(text).call
            found.append(f"process {index} waits at {tag!r}{call and f', to {call}'}")
    where = ", ".join(sorted(found)[:5])
    return where and f"; meanwhile {where}: all processes must make the same calls, in one order"
