"""What the processes decide about local steps, from what each of them says: pure functions.

Which steps are whole, and which process keeps copies of whose parts.

A step is whole if every process has its own part of it with one token, or can get one that is as
good as its own. The token identifies the save that wrote the part, so parts of two saves with the
same step number are never taken for one checkpoint. A step that another number of processes saved is not
used: it is only named.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from ckpt_core._format.part import Runs, contains, progressions, runs_of
from ckpt_core._run.run_file import Order

_NAMED = 5
"""Maximum number of processes named in a message as lacking a step."""
_SOURCES = 3
"""Maximum number of processes from which one tries to fetch a part."""
Partners = Literal["host"] | Callable[[int, int], int] | None
"""``Options.partners``."""

# ---------------------------------------------------------------------- which steps are whole


class Seen(NamedTuple):
    """A part in a local directory that a process can read."""

    step: int
    token: str
    order: (
        Order  # of one step number, the save with the greatest order counts; see ``RunFile.order``
    )
    writer: int  # index of the process that wrote it
    serves: Runs  # the processes for which it is as good as their own
    own: bool  # it serves the process that sees it, and lies where that one has its own parts
    continues: bool = False  # the save continued another one, which was whole then


class Unread(NamedTuple):
    """A step that a process could not read, though nothing says that it is damaged."""

    step: int  # ``MAX_STEP`` if a folder could not be listed
    errno: int  # 0 if a later version of ckpt wrote it
    why: str
    process: int  # that met it


class Source(NamedTuple):
    """From where a process gets the part that it lacks."""

    process: int  # that sees it; possibly the one that lacks it, in another folder
    writer: int  # the process that wrote it


@dataclass(frozen=True)
class WholeStep:
    """A step that every process has or can get."""

    token: str
    # Process that lacks its part -> up to 3 places, the best first.
    sources: dict[int, list[Source]]
    twice: bool = False  # each part is in two places, so that the step survives the loss of one


@dataclass(frozen=True)
class Judgement:
    """Which steps are whole in the local directories."""

    steps: dict[int, WholeStep]  # the whole ones
    # All other steps, with up to 5 processes that cannot get their part.
    partial: dict[int, list[int]]
    # The newest partial one that continued another step: the run had steps, and not only a first save that never ended.
    lost: int | None = None
    unread: list[Unread] = field(default_factory=list[Unread])
    # Steps that other numbers of processes saved, and how many: no process has a part of its own.
    others: dict[int, int] = field(default_factory=dict[int, int])

    def dump(self, count: int, publish: Callable[[list[str]], str]) -> str:
        """As text for ``parse_judgement``: the same for all processes, and short. ``publish`` gives the name under which each
        process gets those of the rows that it needs.
        """
        sources: list[list[Any]] = [[] for _ in range(count)]
        steps: list[Any] = []
        for step, whole in self.steps.items():
            steps.append([step, whole.token, whole.twice])
            for process, found in whole.sources.items():
                sources[process].append([step, found])
        rows = publish([_dumps(mine) if mine else "" for mine in sources])
        partial, others = [*self.partial.items()], [*self.others.items()]
        return _dumps([rows, steps, partial, self.lost, self.unread, others])


@dataclass(frozen=True)
class StepHere:
    """A whole step, as one process knows it."""

    token: str
    # From where this process may get its part, the best first; empty if it has it.
    sources: Sequence[Source]
    twice: bool  # see ``WholeStep``


@dataclass(frozen=True)
class LocalSteps:
    """A judgement, as one process knows it."""

    steps: dict[int, StepHere]
    partial: dict[int, list[int]]
    lost: int | None
    unread: dict[int, Unread]
    others: dict[int, int]


def parse_judgement(text: str, index: int, row: Callable[[str, int], str]) -> LocalSteps:
    """What ``Judgement.dump`` gave, for process ``index``; ``row`` reads a published row, by the name of all and its number."""
    table, steps, partial, lost, unread, others = json.loads(text)
    lacking = dict(json.loads(row(table, index) or "[]"))
    here = {
        step: StepHere(token, [Source(*one) for one in lacking.get(step, ())], twice)
        for step, token, twice in steps
    }
    not_read = {one[0]: Unread(*one) for one in unread}
    return LocalSteps(here, dict(partial), lost, not_read, dict(others))


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _order(value: Sequence[Any]) -> Order:
    position, count = value
    return position, count


@dataclass(frozen=True)
class LocalParts:
    """What one process tells the others."""

    parts: Sequence[Seen]
    mends: bool  # whether it would write parts that it lacks; not if it is read-only
    unread: Sequence[Unread] = ()
    others: Sequence[tuple[int, int]] = ()  # steps of other numbers of processes, and how many

    def dump(self, index: int) -> str:
        """As text for ``judge``, the same for processes that see the like each in its place: relative to ``index``."""
        parts = [
            part._replace(writer=part.writer - index, serves=_packed(part.serves, index))
            for part in self.parts
        ]
        return _dumps([parts, self.mends, self.unread, self.others])

    @staticmethod
    def parse(text: str, index: int) -> LocalParts:
        """What ``dump`` gave."""
        parts, mends, unread, others = json.loads(text)

        def seen(
            step: int,
            token: str,
            order: Sequence[Any],
            distance: int,
            serves: Any,
            *rest: Any,
        ) -> Seen:
            serves = _unpacked(serves, index)
            return Seen(step, token, _order(order), distance + index, serves, *rest)

        some = [seen(*part) for part in parts]
        others = [(step, count) for step, count in others]
        return LocalParts(some, mends, [Unread(*one) for one in unread], others)


def _packed(runs: Runs, index: int) -> Any:
    """One process alone by its distance; many runs of one process each as arguments of ``range``: of a mesh, 128 are one."""
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return runs[0][0] - index
    if len(runs) < 4 or any(first != last for first, last in runs):
        return runs
    return [list(steps) for steps in progressions([first for first, _ in runs])]


def _unpacked(packed: Any, index: int) -> Runs:
    if isinstance(packed, int):
        return ((packed + index, packed + index),)
    if len(packed[0]) == 3:
        return runs_of(sorted(one for steps in packed for one in range(*steps)))
    return tuple((first, last) for first, last in packed)


def judge(
    everyone: Sequence[LocalParts], machines: Sequence[str], serving: Sequence[bool]
) -> Judgement:
    """The steps that are whole, and from where each process gets what it lacks. Each process has an entry in ``everyone``, in
    ``machines``, and in ``serving``: whether others can fetch from it.
    """
    saves: dict[int, dict[str, _Parts]] = {}
    for process, one in enumerate(everyone):
        for seen in one.parts:
            made = saves.setdefault(seen.step, {})
            made.setdefault(seen.token, _Parts(seen.order)).add(process, seen)
    steps: dict[int, WholeStep] = {}
    partial: dict[int, list[int]] = {}
    for step, made in sorted(saves.items()):
        for token in sorted(made, key=lambda token: (made[token].order, token), reverse=True):
            search = _Search(everyone, machines, serving, made[token])
            sources = search.sources()
            absent = [process for process, found in sources.items() if not found]
            if not absent:
                steps[step] = WholeStep(token, sources, search.twice())
                partial.pop(step, None)
                break
            partial.setdefault(step, absent[:_NAMED])
    seen = [part for one in everyone for part in one.parts if part.step in partial]
    lost = max((part.step for part in seen if part.continues), default=None)
    unread = {one.step: one for one in sorted(chain.from_iterable(one.unread for one in everyone))}
    others = dict(sorted({*chain.from_iterable(one.others for one in everyone)}))
    others = {step: count for step, count in others.items() if step not in steps}
    return Judgement(steps, partial, lost, [*unread.values()], others)


class _Parts:
    """The parts of one save: process that sees them -> what it sees."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.seen: dict[int, list[Seen]] = {}

    def add(self, process: int, seen: Seen) -> None:
        self.order = max(self.order, seen.order)
        self.seen.setdefault(process, []).append(seen)


class _Givers:
    """The processes that have one part, on each machine and on all; who asks takes them in turn, so that load spreads."""

    def __init__(self, sources: Sequence[Source], machines: Sequence[str]) -> None:
        self._all = deque(sources)
        self._near: dict[str, deque[Source]] = {}
        for source in sources:
            self._near.setdefault(machines[source.process], deque()).append(source)

    def add_to(self, found: list[Source], own: Collection[Source], machine: str) -> None:
        """Adds some until there are 3, those of a machine first; none of a process's own."""
        for among in (self._near.get(machine, self._all), self._all):
            for _ in range(min(len(among), _SOURCES + len(own))):
                if len(found) >= _SOURCES:
                    return
                source = among[0]
                among.rotate(-1)
                if source not in found and source not in own:
                    found.append(source)


class _Search:
    """Finds sources of one save's parts for the processes that lack theirs."""

    def __init__(
        self,
        everyone: Sequence[LocalParts],
        machines: Sequence[str],
        serving: Sequence[bool],
        parts: _Parts,
    ) -> None:
        self._everyone = everyone
        self._machines = machines
        self._parts = parts.seen
        self._offers: dict[Runs, list[Source]] = {}
        for process, some in self._parts.items():
            if serving[process] or len(everyone) == 1:
                for seen in some:
                    self._offers.setdefault(seen.serves, []).append(Source(process, seen.writer))

    def sources(self) -> dict[int, list[Source]]:
        """For each process that lacks its part, its sources; an empty list if there are none."""
        lacking = {
            process: list[_Givers]()
            for process in range(len(self._everyone))
            if not any(
                seen.own and contains(seen.serves, process) for seen in self._parts.get(process, ())
            )
        }
        if not lacking:
            return {}
        for serves, sources in self._offers.items():
            givers = _Givers(sources, self._machines)
            for process in _indices(serves):
                if process in lacking:
                    lacking[process].append(givers)
        return {process: self._of(process, givers) for process, givers in lacking.items()}

    def twice(self) -> bool:
        """Whether each process's part is on two machines; if there is one, with two processes."""
        places = self._machines if len(set(self._machines)) > 1 else range(len(self._machines))
        found: dict[Runs, set[object]] = {}
        for process, some in self._parts.items():
            for seen in some:
                if len(of_these := found.setdefault(seen.serves, set())) < 2:
                    of_these.add(places[process])
        held: list[set[object]] = [set() for _ in places]
        for serves, some in found.items():
            for process in _indices(serves):
                held[process] |= some
        return all(len(some) > 1 for some in held)

    def _of(self, process: int, givers: Sequence[_Givers]) -> list[Source]:
        if not self._everyone[process].mends:
            return []
        own = {
            Source(process, seen.writer): contains(seen.serves, process)
            for seen in self._parts.get(process, ())
        }
        found = [source for source, serves in own.items() if serves]
        found = found[: _SOURCES - 1]  # one elsewhere, should those be damaged
        for some in givers:
            some.add_to(found, own, self._machines[process])
        return found


def _indices(runs: Runs) -> Iterator[int]:
    return (n for first, last in runs for n in range(first, last + 1))


# ------------------------------------------------------------------------------------ copies


ChosenPartner = int | Literal["host"] | None
"""What one process says of its partner: its index, or that it is to be one on the next machine, or none."""


def choose_partner(partners: Partners, index: int, count: int) -> ChosenPartner:
    """What process ``index`` says of the process that keeps copies of its parts; ValueError if the user's function gives no other."""
    if partners is None or count == 1:
        return None
    if partners == "host":
        return "host"
    chosen = partners(index, count)
    if type(chosen) is not int or not 0 <= chosen < count or chosen == index:
        raise ValueError(
            f"Options.partners({index}, {count}) gave {chosen!r}: it must give the index of another "
            f"process, from 0 to {count - 1}"
        )
    return chosen


def all_partners(chosen: Sequence[ChosenPartner], machines: Sequence[str]) -> list[int | None]:
    """For each process, the one that keeps copies of its parts, from what ``choose_partner`` gave. On the next machine that
    is a process of the same place in it; with one machine, the next process.
    """
    count, of_machine, places = len(chosen), dict[str, list[int]](), list[int]()
    for index, machine in enumerate(machines):
        theirs = of_machine.setdefault(machine, [])
        places.append(len(theirs))
        theirs.append(index)
    ordered = list(of_machine)
    following = dict(zip(ordered, ordered[1:] + ordered[:1], strict=True))

    def on_next_machine(index: int) -> int:
        theirs = of_machine[following[machines[index]]]
        return (index + 1) % count if len(ordered) == 1 else theirs[places[index] % len(theirs)]

    return [on_next_machine(n) if one == "host" else one for n, one in enumerate(chosen)]


def inverted(partners: Sequence[int | None]) -> list[list[int]]:
    """For each process, those whose partner it is."""
    sources: list[list[int]] = [[] for _ in partners]
    for index, partner in enumerate(partners):
        if partner is not None:
            sources[partner].append(index)
    return sources


# without partners; has copied none, or could not; is copying; has copied
CopyState = Literal["off", "idle", "busy", "done"]
"""Of the copies that one process makes: of which step, see ``judge_copies``."""


def judge_copies(reports: Sequence[Any]) -> dict[str, Any]:
    """On process 0, before a save, from ``[state, step, token]`` of each process: ``copies``, whether the step to be saved is
    copied, and ``protected``, step and token that all have copied, or None. All copy the same steps, so that there is one
    with a copy of every part. While any process still copies, none begins with another step.
    """
    states = [state for state, _, _ in reports]
    same = all(one == reports[0] for one in reports)
    return {
        "copies": not {"off", "busy"} & set(states),
        "protected": reports[0][1:] if same and states[0] == "done" else None,
    }
