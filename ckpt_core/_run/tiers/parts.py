"""Which local steps are whole, judged from the parts that all processes see: pure functions.

A step is whole if every process has its own part of it with one token, or can get one that is as
good as its own. The token identifies the save that wrote the part, so parts of two saves with the
same step number are never taken for one checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_core._format.part import Runs, contains

_NAMED = 5
"""Maximum number of processes named in a message as lacking a step."""
_SOURCES = 3
"""Maximum number of processes from which one tries to fetch a part."""


class Seen(NamedTuple):
    """A part in a local directory that a process can read.

    Attributes:
        step, token: of the save that wrote it.
        created: when, in Unix seconds.
        writer: index of the process that wrote it.
        serves: the processes for which it is as good as their own.
        own: whether it lies where the process that sees it has its own parts, and serves it.
    """

    step: int
    token: str
    created: float
    writer: int
    serves: Runs
    own: bool


class Source(NamedTuple):
    """From where a process gets the part that it lacks.

    Attributes:
        process: the process that sees it; possibly the one that lacks it, in another folder.
        writer: the process that wrote it.
    """

    process: int
    writer: int


@dataclass(frozen=True)
class WholeStep:
    """A step that every process has or can get.

    Attributes:
        token: of the save.
        sources: process that lacks its part -> from where it may get it, the best first.
        twice: whether each part is in two places, so that the step survives the loss of one.
    """

    token: str
    sources: dict[int, list[Source]]
    twice: bool = False


@dataclass(frozen=True)
class Judgement:
    """Which steps are whole in the local directories.

    Attributes:
        steps: the whole ones.
        partial: step -> up to 5 processes that cannot get their part, for all other steps.
    """

    steps: dict[int, WholeStep]
    partial: dict[int, list[int]]


@dataclass(frozen=True)
class Sight:
    """What one process tells the others.

    Attributes:
        parts: what it sees.
        mends: whether it would write a part that it lacks; not if it is read-only.
    """

    parts: Sequence[Seen]
    mends: bool

    def dump(self) -> str:
        """As text for ``judge``."""
        return json.dumps([self.parts, self.mends])

    @staticmethod
    def parse(text: str) -> Sight:
        """What ``dump`` gave."""
        parts, mends = json.loads(text)
        seen = (Seen(*part) for part in parts)
        hashable = (one._replace(serves=tuple((a, b) for a, b in one.serves)) for one in seen)
        return Sight(list(hashable), mends)


def judge(texts: Sequence[str], machines: Sequence[str], serving: Sequence[bool]) -> str:
    """On process 0: the judgement, as text for ``parse_judgement``.

    Args:
        texts: for each process, its ``Sight``.
        machines: for each process, its machine.
        serving: for each process, whether the others can fetch from it.
    """
    everyone = [Sight.parse(text) for text in texts]
    saves: dict[int, dict[str, float]] = {}
    for sight in everyone:
        for seen in sight.parts:
            tokens = saves.setdefault(seen.step, {})
            tokens[seen.token] = max(seen.created, tokens.get(seen.token, 0.0))
    steps: dict[int, object] = {}
    partial: dict[int, list[int]] = {}
    for step, tokens in sorted(saves.items()):
        for token in sorted(tokens, key=lambda token: (-tokens[token], token)):
            search = _Search(everyone, machines, serving, step, token)
            sources = search.sources()
            absent = [process for process, found in sources.items() if not found]
            if not absent:
                steps[step] = [token, list(sources.items()), search.twice()]
                partial.pop(step, None)
                break
            partial.setdefault(step, absent[:_NAMED])
    return json.dumps([list(steps.items()), list(partial.items())])


def parse_judgement(text: str) -> Judgement:
    """The answer of ``judge``."""
    steps, partial = json.loads(text)
    whole = {
        step: WholeStep(
            token, {process: [Source(*one) for one in found] for process, found in sources}, twice
        )
        for step, (token, sources, twice) in steps
    }
    return Judgement(whole, {step: processes for step, processes in partial})


class _Search:
    """Finds sources of one save's parts for the processes that lack theirs."""

    def __init__(
        self,
        everyone: Sequence[Sight],
        machines: Sequence[str],
        serving: Sequence[bool],
        step: int,
        token: str,
    ) -> None:
        self._everyone = everyone
        self._machines = machines
        self._load: Counter[int] = Counter()
        self._parts = [
            [seen for seen in sight.parts if (seen.step, seen.token) == (step, token)]
            for sight in everyone
        ]
        self._offers = [
            (Source(process, seen.writer), seen.serves)
            for process, parts in enumerate(self._parts)
            if serving[process]
            for seen in parts
        ]

    def sources(self) -> dict[int, list[Source]]:
        """For each process that lacks its part, its sources; an empty list if there are none."""
        return {
            process: self._of(process)
            for process, parts in enumerate(self._parts)
            if not any(seen.own and contains(seen.serves, process) for seen in parts)
        }

    def twice(self) -> bool:
        """Whether each process's part is on two machines; if there is one, with two processes."""
        places = self._machines if len(set(self._machines)) > 1 else range(len(self._machines))
        found: dict[Runs, set[object]] = {}
        for place, parts in zip(places, self._parts, strict=True):
            for seen in parts:
                if len(of_these := found.setdefault(seen.serves, set())) < 2:
                    of_these.add(place)
        held: list[set[object]] = [set() for _ in places]
        for serves, some in found.items():
            for process in (n for first, last in serves for n in range(first, last + 1)):
                held[process] |= some
        return all(len(some) > 1 for some in held)

    def _of(self, process: int) -> list[Source]:
        if not self._everyone[process].mends:
            return []
        near = [
            Source(process, seen.writer)
            for seen in self._parts[process]
            if contains(seen.serves, process)
        ]
        near = near[: _SOURCES - 1]  # one elsewhere, should those be damaged
        machine = self._machines[process]
        found = sorted(
            (self._machines[source.process] != machine, self._load[source.process], source)
            for source, serves in self._offers
            if source.process != process and contains(serves, process)
        )
        chosen = [source for _, _, source in found[: _SOURCES - len(near)]]
        if not near:
            self._load.update(source.process for source in chosen[:1])
        return near + chosen
