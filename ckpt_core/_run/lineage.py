"""Which saves of a run count, and what is about to leave it: the texts of two small files beside the steps.

A Checkpointer draws a lineage whenever it begins to save from a step: 16 hex digits, with which the
tokens of its saves begin, followed by their count in 16 more. ``.ckpt-run`` holds the lineages of a run, of each earlier one the last step that
still counts, and which numbers were deleted. So a step in a local directory, which may be that of a host that
was away, counts or not by its token alone, and one write of this file removes steps from all local
directories at once.

``.ckpt-leaving`` is there while steps are being removed: it was written before, in one piece. What it names
counts no more, in any tier, and whoever writes next finishes the removal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_core._errors import CheckpointCorrupt

RUN_FILE = ".ckpt-run"
"""File in the persistent directory; each on a line: name of the run, its lineage, the earlier ones as JSON, and, if there
are any, the deleted numbers and the replaced ones, as JSON."""
LEAVING_FILE = ".ckpt-leaving"
"""File in the persistent directory while steps are being removed."""
_MOST_EARLIER = 64
"""Lineages that are kept. Local directories hold a few of the newest steps, so older ones are of no use."""
_MOST_DELETED = 256
"""Deleted, and replaced, numbers that are kept."""
_TOKEN = re.compile(r"[0-9a-f]{32}")
_LINEAGE = re.compile(r"[0-9a-f]{16}")
_HEAD = re.compile(r"(run-[0-9a-f]{16})\n([0-9a-f]{16})\n")

Order = tuple[int, int]
"""Of the saves of one number, the one with the greatest order counts."""
_NO_ORDER: Order = (-1, -1)


@dataclass(frozen=True)
class Lineage:
    """The lineages of a run, and which saves of each count."""

    name: str = ""  # of the run, and of its folder in local directories; empty if it has none yet
    current: str = ""  # the lineage of the last writer
    # The ones before, oldest first, each with the last step that counts.
    earlier: tuple[tuple[str, int], ...] = ()
    # Step, and a lineage: no save of it by this or an earlier one counts.
    deleted: tuple[tuple[int, str], ...] = ()
    # Step that was overwritten in the persistent directory, and the token of that save: no older one counts in any tier, even after
    # retention took the newer one.
    replaced: tuple[tuple[int, str], ...] = ()

    def branch(self, lineage: str, last: int) -> Lineage:
        """The run when a writer goes on from step ``last``, or -1, with a lineage of its own."""
        before = [*self.earlier, *([(self.current, last)] if self.current else [])]
        bounded = tuple((one, min(bound, last)) for one, bound in before)
        return replace(self, current=lineage, earlier=bounded[-_MOST_EARLIER:])

    def without(self, step: int) -> Lineage:
        """The run without any save of a number; later lineages may save it again."""
        others = [one for one in self.deleted if one[0] != step]
        return replace(self, deleted=(*others[1 - _MOST_DELETED :], (step, self.current)))

    def overwritten(self, step: int, token: str) -> Lineage:
        """The run in which no save of a number counts that is older than the one with this token."""
        others = [one for one in self.replaced if one[0] != step]
        return replace(self, replaced=(*others[1 - _MOST_DELETED :], (step, token)))

    def order(self, step: int, token: str) -> Order | None:
        """Where a save stands among those of its number; None if it does not count."""
        lineages = [*(lineage for lineage, _ in self.earlier), self.current]
        order = _of_token(token, lineages)
        lasts = [*(last for _, last in self.earlier), step]
        deleted = max(
            (
                lineages.index(one)
                for other, one in self.deleted
                if other == step and one in lineages
            ),
            default=-1,
        )
        by = max(
            (_of_token(one, lineages) for other, one in self.replaced if other == step),
            default=order,
        )
        return order if order[0] > deleted and step <= lasts[order[0]] and order >= by else None

    def newer(self, step: int, token: str, than: str) -> bool:
        """Whether, of two saves of a number, the one with ``token`` is known to be newer."""
        one, other = (self.order(step, each) for each in (token, than))
        return one is not None and (other is None or one > other)

    def dump(self) -> bytes:
        """The run as the content of its file."""
        lists = [self.earlier, self.deleted, self.replaced]
        while len(lists) > 1 and not lists[-1]:
            lists.pop()
        return "".join(
            f"{line}\n" for line in (self.name, self.current, *map(json.dumps, lists))
        ).encode()


def _of_token(token: str, lineages: Sequence[str]) -> Order:
    if len(token) != 32 or token[:16] not in lineages:
        return _NO_ORDER
    return lineages.index(token[:16]), int(token[16:], 16)


def parse_lineage(data: bytes | None) -> Lineage:
    """The run in the content of its file; without a name if there is none, or it is no such file."""
    text = (data or b"").decode(errors="replace")
    found = _HEAD.match(text)
    if found is None:
        return Lineage()
    rest = [*text[found.end() :].splitlines(), "[]", "[]", "[]"]  # empty in versions up to 0.1
    try:
        earlier = tuple((str(one), int(last)) for one, last in json.loads(rest[0]))
        deleted = tuple((int(step), str(one)) for step, one in json.loads(rest[1]))
        replaced = tuple((int(step), str(one)) for step, one in json.loads(rest[2]))
    except (ValueError, TypeError, RecursionError):
        return Lineage()
    if not all(map(_LINEAGE.fullmatch, [*dict(earlier), *(one for _, one in deleted)])):
        return Lineage()
    if not all(_TOKEN.fullmatch(one) for _, one in replaced):
        return Lineage()
    return Lineage(found[1], found[2], earlier, deleted, replaced)


def load_lineage(data: bytes | None, directory: str) -> Lineage:
    """The run in the content of the file in ``directory``, nameless if there is none; CheckpointCorrupt if it is damaged."""
    run = parse_lineage(data)
    if data is not None and not run.name:
        raise CheckpointCorrupt(
            f"{directory}/{RUN_FILE} is damaged, so it is not known which steps in local directories count. Delete the "
            "file to go on from the steps of this directory alone",
            file=RUN_FILE,
        )
    return run


class Left(NamedTuple):
    """A step that is being removed."""

    name: str  # of its directory
    step: int
    token: str
    into: str | None  # name of the directory it is moved to; None to delete it


@dataclass(frozen=True)
class Leaving:
    """What ``.ckpt-leaving`` says."""

    steps: tuple[Left, ...] = ()  # in the order in which they are removed
    run: str = ""  # content of ``.ckpt-run`` from then on; empty if it stays

    def names(self, name: str, token: str) -> bool:
        """Whether the save with this token in a directory of this name leaves."""
        return any((left.name, left.token) == (name, token) for left in self.steps)

    def dump(self) -> bytes:
        """As the content of the file."""
        return json.dumps({"steps": self.steps, "run": self.run}).encode()


def parse_leaving(data: bytes | None, directory: str) -> Leaving:
    """What the content of the file in ``directory`` says, nothing if there is none; CheckpointCorrupt if it is damaged."""
    if data is None:
        return Leaving()
    try:
        value = json.loads(data)
        steps = [_left(*one) for one in value["steps"]]
        return Leaving(tuple(steps), str(value["run"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{directory}/{LEAVING_FILE} is damaged ({error}), so it is not known which steps were being removed. Look at the "
            "steps, and delete the file",
            file=LEAVING_FILE,
        ) from error


def _left(name: str, step: int, token: str, into: str | None) -> Left:
    return Left(str(name), int(step), str(token), None if into is None else str(into))


def newest_first(steps: Sequence[Left]) -> tuple[Left, ...]:
    """In the order of removal: an interruption leaves no gap among those that stay."""
    return tuple(sorted(steps, key=lambda left: -left.step))
