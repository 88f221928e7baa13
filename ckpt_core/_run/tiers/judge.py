"""What the processes decide about local steps, from what each of them says: pure functions.

Which steps are whole, what all do after a restore that failed, and which process keeps copies of whose parts.

A step is whole if every process has its own part of it with one token, or can get one that is as
good as its own. The token identifies the save that wrote the part, so parts of two saves with the
same step number are never taken for one checkpoint. A step that another number of processes saved
is whole if the part of each of them is there, and they differ in regions of arrays alone.
"""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    is_of_target,
    raised_by_a_handler,
)
from ckpt_core._format.part import Runs, contains
from ckpt_core._run.lineage import Order

_NAMED = 5
"""Maximum number of processes named in a message as lacking a step."""
_SOURCES = 3
"""Maximum number of processes from which one tries to fetch a part."""
OF_THE_MACHINE = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM),
        *(errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.ENOTCONN),
    }
)
"""Errors of the system that say nothing about the files: too few descriptors, no memory, no permission, a file system
that does not answer. EIO is none of them: it is what a disk says of a sector that it has lost."""

Partners = Literal["host"] | Callable[[int, int], int] | None
"""``Options.partners``."""

# ---------------------------------------------------------------------- which steps are whole


class Seen(NamedTuple):
    """A part in a local directory that a process can read.

    Attributes:
        step, token: of the save that wrote it.
        order: of the saves of one number, the one with the greatest order counts; see ``Lineage``.
        writer: index of the process that wrote it.
        serves: the processes for which it is as good as their own.
        own: whether it lies where the process that sees it has its own parts, and serves it.
        processes: number of processes of the save; 0 for as many as run now.
        differ_in_shards_alone: see ``Part``; asked only of other numbers of processes.
    """

    step: int
    token: str
    order: Order
    writer: int
    serves: Runs
    own: bool
    processes: int = 0
    differ_in_shards_alone: bool = False


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
class LocalParts:
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
    def parse(text: str) -> LocalParts:
        """What ``dump`` gave."""
        parts, mends = json.loads(text)
        seen = (Seen(*part) for part in parts)
        hashable = (
            one._replace(serves=tuple((a, b) for a, b in one.serves), order=_order(one.order))
            for one in seen
        )
        return LocalParts(list(hashable), mends)


def judge(texts: Sequence[str], machines: Sequence[str], serving: Sequence[bool]) -> str:
    """On process 0: the judgement, as text for ``parse_judgement``.

    Args:
        texts: for each process, its ``LocalParts``.
        machines: for each process, its machine.
        serving: for each process, whether the others can fetch from it.
    """
    everyone = [LocalParts.parse(text) for text in texts]
    saves: dict[int, dict[tuple[str, int], Order]] = {}
    for one in everyone:
        for seen in one.parts:
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
        everyone: Sequence[LocalParts],
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
                for seen in one.parts
                if (seen.step, seen.token, seen.processes) == (step, token, count)
            ]
            for one in everyone
        ]
        self._differ_in_shards_alone = all(
            seen.differ_in_shards_alone for parts in self._parts for seen in parts
        )
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
        if all(one.mends for one in self._everyone) and self._differ_in_shards_alone:
            for source, serves in self._offers:
                found.setdefault(serves, []).append(source)
        held = {n for runs in found for first, last in runs for n in range(first, last + 1)}
        absent = [process for process in range(self._count) if process not in held]
        return [found[runs] for runs in sorted(found)], absent


# ---------------------------------------------------------------- after a restore that failed


def vote(error: Exception, there: bool, is_whole: Callable[[], bool] = lambda: True) -> str:
    """One process's vote after a failed restore of a local step, for ``judge_failure``.

    Returns ``"mend"`` (its part is damaged or gone: a copy of it may help), ``"leave"`` (try another
    copy of the step), ``"raise"`` (no other copy would help) or ``""`` (abstain).

    Args:
        error: what the restore raised here.
        there: whether the step is still in the directory of this process.
        is_whole: verifies this process's part; called only if the error may come from damage.
    """
    if raised_by_a_handler(error) is not None or is_of_target(error):
        return "raise"  # it says nothing about the directory
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        return "raise"
    if isinstance(error, CheckpointNotFound):
        return "" if there else "mend"  # there: only an item is missing
    if isinstance(error, (CheckpointCorrupt, OSError)):
        # otherwise the damage is that of another process, or other shardings are wanted
        return "leave" if there and is_whole() else "mend"
    if type(error) is CheckpointError:
        return ""  # most likely the report of another process's failure
    return "raise"  # the code is wrong, not the directory


def judge_failure(votes: Sequence[str]) -> str:
    """``"mend"``, ``"leave"`` or ``"raise"``: what all processes do."""
    if "raise" in votes:
        return "raise"
    return next((verdict for verdict in ("mend", "leave") if verdict in votes), "raise")


# ------------------------------------------------------------------------------------ copies


def choose_partner(partners: Partners, machines: Sequence[str], index: int) -> int | None:
    """The process that keeps copies of the parts of process ``index``; None for no copies.

    Raises:
        ValueError: the caller's function gives no other process of the run.
    """
    count = len(machines)
    if partners is None or count == 1:
        return None
    if partners == "host":
        return _on_next_machine(machines, index)
    chosen = partners(index, count)
    if type(chosen) is not int or not 0 <= chosen < count or chosen == index:
        raise ValueError(
            f"Options.partners({index}, {count}) gave {chosen!r}: it must give the index of another "
            f"process, from 0 to {count - 1}"
        )
    return chosen


def _on_next_machine(machines: Sequence[str], index: int) -> int:
    """A process on the next machine, of the same place in it; with one machine, the next process."""
    ordered = list(dict.fromkeys(machines))
    if len(ordered) == 1:
        return (index + 1) % len(machines)
    at = ordered.index(machines[index])
    place = [i for i, machine in enumerate(machines) if machine == machines[index]].index(index)
    following = ordered[(at + 1) % len(ordered)]
    theirs = [i for i, machine in enumerate(machines) if machine == following]
    return theirs[place % len(theirs)]


CopyState = Literal["off", "idle", "busy", "done"]
"""Of the copies that one process makes: of which step, see ``judge_copies``."""


def judge_copies(told: Sequence[Any]) -> dict[str, Any]:
    """On process 0, before a save: what is to be copied, and what all have.

    All copy the same steps, so that there is one of which every part has a copy. While any process
    still copies, none begins with another step.

    Args:
        told: for each process ``[state, step, token]``: "busy" copying that step, "done" with it,
            "idle" since it has copied none or could not, "off" without partners.

    Returns:
        ``copies``: whether the step that is about to be saved is copied; ``protected``: step and
        token of which all have a copy, or None.
    """
    states = [state for state, _, _ in told]
    same = all(one == told[0] for one in told)
    return {
        "copies": not {"off", "busy"} & set(states),
        "protected": told[0][1:] if same and states[0] == "done" else None,
    }
