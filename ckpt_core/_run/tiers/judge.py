"""What the processes decide about local steps, from what each of them says: pure functions.

They find which steps are whole, who keeps copies of which parts, and what all do after a restore that failed. A step is
whole if every process has its own part of it with one token, or can get one that is as good. Since the token identifies
the save, parts of two saves of one number are never taken for one checkpoint. A step that another number of processes
saved is only named.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, is_of_target
from ckpt_core._format.part import Runs, contains, dump_runs, parse_runs
from ckpt_core._run.run_file import Order

_NAMED = 5  # maximum number of processes named in a message as lacking a step
_SOURCES = 3  # maximum number of processes from which one tries to fetch a part
Partners = Literal["host"] | Callable[[int, int], int] | None
"""``Options.partners``."""


class Seen(NamedTuple):
    """A part in a local directory that a process can read."""

    step: int
    token: str
    order: Order  # of one step number, the save with the greatest order counts: ``RunFile.order``
    writer: int  # index of the process that wrote it
    serves: Runs  # the processes for which it is as good as their own
    in_place: bool  # it serves the process that sees it, and lies where that one has its own parts
    continues: bool = False  # the save continued another one, which was whole then


class Unreadable(NamedTuple):
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
class LocalParts:
    """What one process tells the others."""

    parts: Sequence[Seen]
    fetches: bool  # whether it would write parts that it lacks; not if it is read-only
    serves: bool = True  # whether others can fetch from it
    unread: Sequence[Unreadable] = ()
    counts: Sequence[tuple[int, int]] = ()  # steps of other numbers of processes, and how many

    def dump(self) -> str:
        """As text for ``parse``."""
        parts = [part._replace(serves=dump_runs(part.serves)) for part in self.parts]
        return _dumps([parts, self.fetches, self.serves, self.unread, self.counts])

    @staticmethod
    def parse(text: str) -> LocalParts:
        """What ``dump`` gave."""
        parts, fetches, serves, unread, counts = json.loads(text)
        seen = [Seen(*part)._replace(serves=parse_runs(part[4])) for part in parts]
        return LocalParts(seen, fetches, serves, [Unreadable(*one) for one in unread], counts)


@dataclass(frozen=True)
class WholeStep:
    """A step that every process has or can get."""

    token: str
    # Process that lacks its part -> up to 3 places, the best first; as one process knows it, of that one alone.
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
    unread: dict[int, Unreadable] = field(default_factory=dict[int, Unreadable])
    # Steps that other numbers of processes saved, and how many: no process has a part of its own.
    counts: dict[int, int] = field(default_factory=dict[int, int])

    def dump(self, count: int, publish: Callable[[list[str]], str]) -> str:
        """As text for ``parse``, short and the same for all; ``publish`` names a table with a row for each process."""
        rows: list[list[Any]] = [[] for _ in range(count)]
        for step, whole in self.steps.items():
            for process, found in whole.sources.items():
                rows[process].append([step, found])
        table = publish([_dumps(row) if row else "" for row in rows])
        steps = [[step, whole.token, whole.twice] for step, whole in self.steps.items()]
        partial, counts = [*self.partial.items()], [*self.counts.items()]
        return _dumps([table, steps, partial, self.lost, [*self.unread.values()], counts])

    @staticmethod
    def parse(text: str, index: int, row: Callable[[str], str]) -> Judgement:
        """What ``dump`` gave, for process ``index``; ``row`` reads its published row, by the name of all."""
        table, steps, partial, lost, unread, counts = json.loads(text)
        lacking = dict(json.loads(row(table) or "[]"))
        here = {
            step: WholeStep(
                token,
                {index: [Source(*one) for one in lacking[step]]} if step in lacking else {},
                twice,
            )
            for step, token, twice in steps
        }
        not_read = {one[0]: Unreadable(*one) for one in unread}
        return Judgement(here, dict(partial), lost, not_read, dict(counts))


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def judge(everyone: Sequence[LocalParts], machines: Sequence[str]) -> Judgement:
    """The steps that are whole, and from where each process gets what it lacks; the arguments are by process."""
    saves: dict[int, dict[str, _Parts]] = {}
    for process, one in enumerate(everyone):
        for seen in one.parts:
            saves.setdefault(seen.step, {}).setdefault(seen.token, []).append((process, seen))
    steps: dict[int, WholeStep] = {}
    partial: dict[int, list[int]] = {}
    for step, made in sorted(saves.items()):
        newest = {token: max(seen.order for _, seen in parts) for token, parts in made.items()}
        for token in sorted(made, key=lambda token: (newest[token], token), reverse=True):
            sources = _sources(made[token], everyone, machines)
            absent = [process for process, found in sources.items() if not found]
            if not absent:
                steps[step] = WholeStep(token, sources, _is_twice(made[token], machines))
                partial.pop(step, None)
                break
            partial.setdefault(step, absent[:_NAMED])
    seen = [part for one in everyone for part in one.parts if part.step in partial]
    lost = max((part.step for part in seen if part.continues), default=None)
    unread = {one.step: one for one in sorted(chain.from_iterable(one.unread for one in everyone))}
    counts = {step: count for one in everyone for step, count in one.counts if step not in steps}
    return Judgement(steps, partial, lost, unread, dict(sorted(counts.items())))


_Parts = list[tuple[int, Seen]]
"""The parts of one save, each with the process that sees it."""


def _sources(
    parts: _Parts, everyone: Sequence[LocalParts], machines: Sequence[str]
) -> dict[int, list[Source]]:
    """For each process that lacks its part, its sources, or none: those on its machine first, in turns to spread load."""
    here, givers = dict[int, list[Source]](), dict[Runs, list[Source]]()
    lacking = {*range(len(everyone))}
    for process, seen in parts:
        source = Source(process, seen.writer)
        if everyone[process].serves:
            givers.setdefault(seen.serves, []).append(source)
        if contains(seen.serves, process):
            here.setdefault(process, []).append(source)
            lacking -= {process} if seen.in_place else set()
    # one elsewhere, should those in other folders of its own be damaged
    found = {process: here.get(process, [])[: _SOURCES - 1] for process in sorted(lacking)}
    for serves, sources in givers.items() if lacking else ():
        for process in filter(lacking.__contains__, _indices(serves)):
            turn = process % len(sources)
            others = [one for one in sources[turn:] + sources[:turn] if one.process != process]
            others.sort(key=lambda one: machines[one.process] != machines[process])
            found[process] += others[:_SOURCES]
    return {n: some[:_SOURCES] if everyone[n].fetches else [] for n, some in found.items()}


def _is_twice(parts: _Parts, machines: Sequence[str]) -> bool:
    """Whether each process's part is on two machines; if there is one, with two processes."""
    places = machines if len(set(machines)) > 1 else range(len(machines))
    found: dict[Runs, set[object]] = {}
    for process, seen in parts:
        if len(among := found.setdefault(seen.serves, set())) < 2:
            among.add(places[process])
    held: list[set[object]] = [set() for _ in places]
    for serves, some in found.items():
        for process in _indices(serves):
            held[process] |= some
    return all(len(some) > 1 for some in held)


def _indices(runs: Runs) -> Iterator[int]:
    return (n for first, last in runs for n in range(first, last + 1))


ChosenPartner = int | Literal["host"] | None
"""What one process says of its partner: its index, or that it is to be one on the next machine, or none."""


def choose_partner(partners: Partners, index: int, count: int) -> ChosenPartner:
    """What process ``index`` says of its partner; ValueError if the user's function gives no other process."""
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
    """For each process, who keeps its copies: in the same place on the next machine; on one machine, the next process."""
    of_machine, following = dict[str, list[int]](), dict[int, int]()
    for index, machine in enumerate(machines):
        of_machine.setdefault(machine, []).append(index)
    groups = [*of_machine.values()]
    for theirs, others in zip(groups, groups[1:] + groups[:1], strict=True):
        for place, index in enumerate(theirs):
            following[index] = others[(place + (len(groups) == 1)) % len(others)]
    return [following[n] if one == "host" else one for n, one in enumerate(chosen)]


def inverted(partners: Sequence[int | None]) -> list[list[int]]:
    """For each process, those whose partner it is."""
    sources: list[list[int]] = [[] for _ in partners]
    for index, partner in enumerate(partners):
        if partner is not None:
            sources[partner].append(index)
    return sources


# has copied none, or could not; is copying; has copied
CopyState = Literal["idle", "busy", "done"]
"""Of the copies that one process makes: of which step, see ``judge_copies``."""


def judge_copies(reports: Sequence[Any]) -> tuple[bool, bool]:
    """On process 0, from ``[state, step, token]`` of each: whether the step to be saved is copied (while one copies, none
    begins, so that one step has copies of all parts), and whether all have copied the step that they report.
    """
    states = {state for state, _, _ in reports}
    return "busy" not in states, states == {"done"} and len({*map(tuple, reports)}) == 1


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_OF_THE_MACHINE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM}
    | {errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.ENOTCONN}
)
_OF_THE_FILES = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
)


def cause_of(error: BaseException) -> Literal["room", "machine", "disk", ""]:
    """What an error of the system says of this machine: ``"room"`` (nothing can be written), ``"machine"`` (too few
    descriptors, no memory, no permission, no answer: no other copy would help) or ``"disk"`` (another copy may help).
    Only ``""`` may say something of what was saved: no error of the system, or that no file lies there.
    """
    if not isinstance(error, OSError) or error.errno is None or error.errno in _OF_THE_FILES:
        return ""
    if error.errno in _NO_ROOM:
        return "room"
    return "machine" if error.errno in _OF_THE_MACHINE else "disk"


class Misfit(CheckpointError):
    """A local step is whole, and does not hold what the wanted shardings need."""


State = Literal["whole", "damaged", "unread"]
"""Of a part: every byte is as it was saved; some is not; not all could be read."""


def vote(error: Exception, there: bool, state: Callable[[], State] = lambda: "whole") -> str:
    """One process's vote for ``judge_failure`` after a failed restore: ``"mend"`` (its part is damaged or gone: a copy
    may help), ``"unread"`` (it could not be read: the same, but without a copy the step is not damaged), ``"other"`` (try
    another copy of the step), ``"raise"`` (no other copy would help) or ``""`` (abstain). ``there``: the step is in this
    process's directory. ``state`` verifies the part; called only if the error may come from it.
    """
    if is_of_target(error):
        return "raise"  # it says nothing about the directory
    cause = cause_of(error)
    if cause in ("room", "machine"):
        return "raise"
    if cause == "disk":
        state()
        return "unread"
    if isinstance(error, CheckpointNotFound):
        return "" if there else "mend"  # there: only an item is missing
    if isinstance(error, (CheckpointCorrupt, OSError)):
        # a whole one: the damage is that of another process, or other shardings are wanted
        found: State = state() if there else "damaged"
        return {"whole": "other", "damaged": "mend", "unread": "unread"}[found]
    if type(error) is CheckpointError:
        return ""  # most likely the report of another process's failure
    return "raise"  # the code is wrong, not the directory


def judge_failure(votes: Sequence[str]) -> str:
    """``"mend"``, ``"unread"``, ``"other"`` or ``"raise"``: what all processes do."""
    if "raise" in votes:
        return "raise"
    return next((verdict for verdict in ("mend", "unread", "other") if verdict in votes), "raise")


def unread_of(step: int, why: object, error: Exception) -> CheckpointError | OSError:
    """The error of a restore for which a disk did not give a part, where nothing says that it is damaged."""
    text = (
        f"step {step} cannot be read from the local directories, which says nothing about what was saved, so training "
        f"does not go back to an older one by accident: {why}. Start again when it can be read; to go back, "
        "restore an older step by its number: restore(step, ...)"
    )
    number = error.errno if isinstance(error, OSError) else None
    return CheckpointError(text) if number is None else OSError(number, text)


def damage_of(directory: str, step: int, error: Exception) -> CheckpointCorrupt:
    """What is raised if no other tier has a step that could not be restored because of ``error``."""
    named = error if isinstance(error, CheckpointCorrupt) else None
    text = f"{directory}: step {step}: {error}"
    return CheckpointCorrupt(text, file=named and named.file, leaf=named and named.leaf)


def misfit_of(directory: str, step: int, error: Exception) -> Misfit:
    """The same where all parts are whole, but do not have what this restore wants."""
    return Misfit(
        f"{directory}: step {step} is not damaged, but the local directories do not have it for these "
        f"shardings: {error}. From them each process restores what its own devices held at the save, and none does so "
        "alone (as_numpy=True). Restore with the shardings of the save; for others, save it to the "
        "persistent directory before: save(..., force=True)"
    )
