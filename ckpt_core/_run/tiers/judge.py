"""What the processes decide about local steps, from what each of them says: pure functions.

Which steps are whole, and which process keeps copies of whose parts.

A step is whole if every process has its own part of it with one token, or can get one that is as
good as its own. The token identifies the save that wrote the part, so parts of two saves with the
same step number are never taken for one checkpoint. A step that another number of processes saved
is whole if the part of each of them is there, and they differ in regions of arrays alone. So may one that as many saved be put
together, where other shardings are wanted than those of the save.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from ckpt_core._format.part import Runs, contains, progressions, runs_of
from ckpt_core._run.lineage import Order

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
    order: Order  # of one step number, the save with the greatest order counts; see ``Lineage``
    writer: int  # index of the process that wrote it
    serves: Runs  # the processes for which it is as good as their own
    own: bool  # it serves the process that sees it, and lies where that one has its own parts
    processes: int = 0  # number of them in the save; 0 if that is how many run now
    differ_in_shards_alone: bool = False  # see ``Part``
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
    # Process that lacks its part -> up to 3 places, the best first. The first may lack it as well, and gets it before.
    sources: dict[int, list[Source]]
    twice: bool = False  # each part is in two places, so that the step survives the loss of one
    # Of a step that is put together, the parts that are not as good as another one: where each is, in the order of their processes.
    pieces: list[list[Source]] = field(default_factory=list[list[Source]])
    # Process that lacks its part -> all that have it, where those of ``sources`` are not all.
    rest: dict[int, list[Source]] = field(default_factory=dict[int, list[Source]])


@dataclass(frozen=True)
class Judgement:
    """Which steps are whole in the local directories."""

    steps: dict[int, WholeStep]  # the whole ones
    # All other steps, with up to 5 processes that cannot get their part.
    partial: dict[int, list[int]]
    # The newest partial one that continued another step: the run had steps, and not only a first save that never ended.
    lost: int | None = None
    unread: list[Unread] = field(default_factory=list[Unread])

    def dump(self, count: int, publish: Callable[[list[str]], str]) -> str:
        """As text for ``parse_judgement``: the same for all processes, and short. ``publish`` gives the name under which each
        process gets those of the rows that it needs.
        """
        sources: list[list[Any]] = [[] for _ in range(count)]
        steps: list[Any] = []
        rows: list[str] = []
        for step, whole in self.steps.items():
            steps.append([step, whole.token, whole.twice, count + len(rows), len(whole.pieces)])
            rows += map(_dumps, whole.pieces)
            at: dict[int, int] = {}  # one row for all processes that have the same others
            for process, found in whole.sources.items():
                rest = whole.rest.get(process)
                if rest is not None and id(rest) not in at:
                    at[id(rest)] = count + len(rows)
                    rows.append(_dumps(rest))
                sources[process].append([step, found, 0 if rest is None else at[id(rest)]])
        rows = [_dumps(mine) if mine else "" for mine in sources] + rows
        return _dumps([publish(rows), steps, list(self.partial.items()), self.lost, self.unread])


@dataclass(frozen=True)
class StepHere:
    """A whole step, as one process knows it."""

    token: str
    # From where this process may get its part, the best first; empty if it has it.
    sources: Sequence[Source]
    twice: bool  # see ``WholeStep``
    rest: Callable[[], list[Source]]  # all that have it, should those of ``sources`` not give it
    pieces: int  # number of the parts of a step that is put together; 0 for all other steps
    piece: Callable[[int], list[Source]]  # from where the n-th of them may be fetched


@dataclass(frozen=True)
class LocalSteps:
    """A judgement, as one process knows it."""

    steps: dict[int, StepHere]
    partial: dict[int, list[int]]
    lost: int | None
    unread: dict[int, Unread]


def parse_judgement(text: str, index: int, row: Callable[[str, int], str]) -> LocalSteps:
    """What ``Judgement.dump`` gave, for process ``index``; ``row`` reads a published row, by the name of all and its number."""
    table, rows, partial, lost, unread = json.loads(text)
    mine = row(table, index)
    lacking = {step: (_sources(found), rest) for step, found, rest in json.loads(mine or "[]")}

    def here(step: int, token: str, twice: bool, first: int, pieces: int) -> StepHere:
        def listed(number: int) -> list[Source]:
            return _sources(json.loads(row(table, number)))

        sources, rest = lacking.get(step, ([], 0))
        return StepHere(
            token,
            sources,
            twice,
            lambda: listed(rest) if rest else [],
            pieces,
            lambda number: listed(first + number),
        )

    steps = {one[0]: here(*one) for one in rows}
    return LocalSteps(steps, dict(partial), lost, {one[0]: Unread(*one) for one in unread})


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _sources(rows: Sequence[Any]) -> list[Source]:
    return [Source(*one) for one in rows]


def _order(value: Sequence[Any]) -> Order:
    position, count = value
    return position, count


@dataclass(frozen=True)
class LocalParts:
    """What one process tells the others."""

    parts: Sequence[Seen]
    mends: bool  # whether it would write parts that it lacks; not if it is read-only
    unread: Sequence[Unread] = ()

    def dump(self, index: int) -> str:
        """As text for ``judge``, the same for processes that see the like each in its place: relative to ``index``."""
        parts = [
            part._replace(writer=part.writer - index, serves=_packed(part.serves, index))
            for part in self.parts
        ]
        return _dumps([parts, self.mends, self.unread])

    @staticmethod
    def parse(text: str, index: int) -> LocalParts:
        """What ``dump`` gave."""
        parts, mends, unread = json.loads(text)

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

        return LocalParts([seen(*part) for part in parts], mends, [Unread(*one) for one in unread])


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
    everyone: Sequence[LocalParts],
    machines: Sequence[str],
    serving: Sequence[bool],
    join: int | None = None,
) -> Judgement:
    """The steps that are whole, and from where each process gets what it lacks. Each process has an entry in ``everyone``, in
    ``machines``, and in ``serving``: whether others can fetch from it. The parts of the step ``join`` are wanted together,
    though this number of processes saved it.
    """
    saves: dict[int, dict[tuple[str, int], _Parts]] = {}
    for process, one in enumerate(everyone):
        for seen in one.parts:
            found, save = saves.setdefault(seen.step, {}), (seen.token, seen.processes)
            found.setdefault(save, _Parts(seen.order)).add(process, seen)
    steps: dict[int, WholeStep] = {}
    partial: dict[int, list[int]] = {}
    for step, made in sorted(saves.items()):
        newest = sorted(made, key=lambda save: (made[save].order, save), reverse=True)
        for token, count in newest:
            search = _Search(everyone, machines, serving, made[token, count])
            sources = {} if count else search.sources()
            pieces, absent = search.pieces(count) if count else ([], [])
            if step == join and not count:
                pieces, lacking = search.pieces(len(everyone))
                pieces = [] if lacking else pieces
            absent += [process for process, found in sources.items() if not found]
            if not absent:
                twice = not count and search.twice()
                steps[step] = WholeStep(token, sources, twice, pieces, search.rest)
                partial.pop(step, None)
                break
            partial.setdefault(step, absent[:_NAMED])
    seen = [part for one in everyone for part in one.parts if part.step in partial]
    lost = max((part.step for part in seen if part.continues), default=None)
    unread = {one.step: one for one in sorted(chain.from_iterable(one.unread for one in everyone))}
    return Judgement(steps, partial, lost, [*unread.values()])


class _Parts:
    """The parts of one save: process that sees them -> what it sees."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.seen: dict[int, list[Seen]] = {}

    def add(self, process: int, seen: Seen) -> None:
        self.order = max(self.order, seen.order)
        self.seen.setdefault(process, []).append(seen)


class _Givers:
    """Sources of one part: the processes that have it, and those that get it before another one needs it. ``load`` counts for
    each process the transfers that it takes part in. One that lacks the part gives it once it is there, so from 64 processes
    that have it 4,096 get it in six rounds of transfers, instead of 63 from each of the 64.
    """

    def __init__(self, sources: list[Source], machines: Sequence[str], load: Counter[int]) -> None:
        self.sources = sources
        self._turn = 0
        self._load = load
        self._heap = [(load[source.process], False, source) for source in sources]
        heapq.heapify(self._heap)
        self._near: dict[str, list[Source]] = {}
        for source in sources:
            self._near.setdefault(machines[source.process], []).append(source)

    def near(self, machine: str) -> list[Source]:
        """Those that have it on a machine, the least busy first."""
        return sorted(self._near.get(machine, ()), key=lambda one: (self._load[one.process], one))

    def join(self, process: int) -> None:
        """A process gets the part, and gives it from then on."""
        heapq.heappush(self._heap, (self._load[process], True, Source(process, process)))

    def least_busy(self, without: Collection[Source]) -> list[Source]:
        """The one that can give it first, which may have yet to get it; empty if there is none."""
        passed: list[tuple[int, bool, Source]] = []
        found: list[Source] = []
        while self._heap and not found:
            load, late, source = heapq.heappop(self._heap)
            if load < self._load[source.process]:
                heapq.heappush(self._heap, (self._load[source.process], late, source))
                continue
            passed.append((load, late, source))
            if source not in without:
                found = [source]
        for one in passed:
            heapq.heappush(self._heap, one)
        return found

    def in_turn(self, count: int, without: Collection[Source]) -> list[Source]:
        """Some that have it, without some; others each time."""
        found: list[Source] = []
        for _ in range(min(len(self.sources), count + len(without))):
            source = self.sources[self._turn % len(self.sources)]
            self._turn += 1
            if source not in without:
                found.append(source)
            if len(found) == count:
                break
        return found


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
        self._load: Counter[int] = Counter()
        self._parts = parts.seen
        self._differ_in_shards_alone = all(
            seen.differ_in_shards_alone for some in self._parts.values() for seen in some
        )
        self.rest: dict[int, list[Source]] = {}
        self._serving = serving
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
            givers = _Givers(sources, self._machines, self._load)
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
        all_here = [
            Source(process, seen.writer)
            for seen in self._parts.get(process, ())
            if contains(seen.serves, process)
        ]
        here = all_here[: _SOURCES - 1]  # one elsewhere, should those be damaged
        machine = self._machines[process]
        chosen = [one for some in givers for one in some.near(machine) if one.process != process]
        own = {Source(process, seen.writer) for seen in self._parts.get(process, ())}
        wanted = _SOURCES - len(here)
        for some in givers:
            if not here and not chosen:
                chosen = some.least_busy(own)
            if len(chosen) < wanted:
                chosen += some.in_turn(wanted - len(chosen), {*chosen, *own})
        chosen = chosen[:wanted]
        if not here and chosen:
            self._load[chosen[0].process] += 1
            self._load[process] = self._load[chosen[0].process]
            if self._serving[process] and len(givers) == 1:
                givers[0].join(process)
        found = here + chosen
        having = [some.sources for some in givers]
        having += [all_here] if len(all_here) > len(here) else []
        if any(len(one) > _SOURCES or not {*one} <= {*found} for one in having):
            # one list, where it is the same for many, since those share a row
            self.rest[process] = having[0] if len(having) == 1 else [*chain(*having)]
        return found

    def pieces(self, count: int) -> tuple[list[list[Source]], list[int]]:
        """To put a save of so many processes together: sources of each part, and whose parts are lacking."""
        found: dict[Runs, list[Source]] = {}
        if all(one.mends for one in self._everyone) and self._differ_in_shards_alone:
            found = self._offers
        held = {process for runs in found for process in _indices(runs)}
        absent = [process for process in range(count) if process not in held]
        return [found[runs] for runs in sorted(found)], absent


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
