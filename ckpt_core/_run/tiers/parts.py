"""Which local steps are whole, judged from the parts that all processes see: pure functions.

A step is whole if every process has its own part of it with one token, or can get one that is as
good as its own. The token identifies the save that wrote the part, so parts of two saves with the
same step number are never taken for one checkpoint. A step that another number of processes saved
is whole if the part of each of them is there, and they differ in regions of arrays alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_core._format.part import Runs, contains
from ckpt_core._run.lineage import Order

_NAMED = 5
"""Maximum number of processes named in a message as lacking a step."""
_SOURCES = 3
"""Maximum number of processes from which one tries to fetch a part."""


class Seen(NamedTuple):
    """A part in a local directory that a process can read.

    Attributes:
        step, token: of the save that wrote it.
        order: of the saves of one number, the one with the greatest order counts; see ``Lineage``.
        writer: index of the process that wrote it.
        serves: the processes for which it is as good as their own.
        own: whether it lies where the process that sees it has its own parts, and serves it.
        processes: number of processes of the save; 0 for as many as run now.
        alike: see ``Part``; asked only of other numbers of processes.
    """

    step: int
    token: str
    order: Order
    writer: int
    serves: Runs
    own: bool
    processes: int = 0
    alike: bool = False


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
        pieces: of a step of another number of processes, the parts that are not as good as another one:
            from where each may be fetched, in the order of their processes. Empty for all others.
    """

    token: str
    sources: dict[int, list[Source]]
    twice: bool = False
    pieces: list[list[Source]] = field(default_factory=list[list[Source]])


@dataclass(frozen=True)
class Judgement:
    """Which steps are whole in the local directories.

    Attributes:
        steps: the whole ones.
        partial: step -> up to 5 processes whose part cannot be had, for all other steps.
    """

    steps: dict[int, WholeStep]
    partial: dict[int, list[int]]


def _order(value: Sequence[Any]) -> Order:
    position, count, created = value
    return position, count, created


@dataclass(frozen=True)
class Sight:
    """What one process tells the others.

    Attributes:
        parts: what it sees.
        mends: whether it would write parts that it lacks; not if it is read-only.
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
        hashable = (
            one._replace(serves=tuple((a, b) for a, b in one.serves), order=_order(one.order))
            for one in seen
        )
        return Sight(list(hashable), mends)


def judge(texts: Sequence[str], machines: Sequence[str], serving: Sequence[bool]) -> str:
    """On process 0: the judgement, as text for ``parse_judgement``.

    Args:
        texts: for each process, its ``Sight``.
        machines: for each process, its machine.
        serving: for each process, whether the others can fetch from it.
    """
    everyone = [Sight.parse(text) for text in texts]
    saves: dict[int, dict[tuple[str, int], Order]] = {}
    for sight in everyone:
        for seen in sight.parts:
            found, save = saves.setdefault(seen.step, {}), (seen.token, seen.processes)
            found[save] = max(seen.order, found.get(save, seen.order))
    steps: dict[int, object] = {}
    partial: dict[int, list[int]] = {}
    for step, made in sorted(saves.items()):
        for token, count in sorted(made, key=lambda save: (made[save], save), reverse=True):
            search = _Search(everyone, machines, serving, step, token, count)
            sources = {} if count else search.sources()
            pieces, absent = search.pieces() if count else ([], [])
            absent += [process for process, found in sources.items() if not found]
            if not absent:
                twice = not count and search.twice()
                steps[step] = [token, list(sources.items()), twice, pieces]
                partial.pop(step, None)
                break
            partial.setdefault(step, absent[:_NAMED])
    return json.dumps([list(steps.items()), list(partial.items())])


def parse_judgement(text: str) -> Judgement:
    """The answer of ``judge``."""
    steps, partial = json.loads(text)
    whole = {
        step: WholeStep(
            token,
            {process: [Source(*one) for one in found] for process, found in sources},
            twice,
            [[Source(*one) for one in found] for found in pieces],
        )
        for step, (token, sources, twice, pieces) in steps
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
        count: int,
    ) -> None:
        self._everyone = everyone
        self._machines = machines
        self._count = count
        self._load: Counter[int] = Counter()
        self._parts = [
            [
                seen
                for seen in sight.parts
                if (seen.step, seen.token, seen.processes) == (step, token, count)
            ]
            for sight in everyone
        ]
        self._alike = all(seen.alike for parts in self._parts for seen in parts)
        self._offers = [
            (Source(process, seen.writer), seen.serves)
            for process, parts in enumerate(self._parts)
            if serving[process] or len(everyone) == 1
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

    def pieces(self) -> tuple[list[list[Source]], list[int]]:
        """Of a save of another number of processes: sources of each part, and whose parts are lacking."""
        found: dict[Runs, list[Source]] = {}
        if all(sight.mends for sight in self._everyone) and self._alike:
            for source, serves in self._offers:
                found.setdefault(serves, []).append(source)
        held = {n for runs in found for first, last in runs for n in range(first, last + 1)}
        absent = [process for process in range(self._count) if process not in held]
        return [found[runs] for runs in sorted(found)], absent
