"""``.ckpt-run``: the one file of a run that says which of its saves count, put in one piece beside the steps.

A Checkpointer draws a lineage whenever it begins to save from a step: 16 hex digits. The tokens of its saves begin with it
and end with their count. With local directories the file holds all lineages, of each earlier one the last step that counts,
and which numbers were deleted or replaced. So a step of a host that was away counts or not by its token alone.

Steps that are being removed stand in it: they count no more, in any tier, and the next writer finishes that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._options import MIB

RUN_FILE = ".ckpt-run"
"""Name of the file in the persistent directory; its content is JSON, the fields of ``RunFile`` that are not empty."""
MOST_BYTES = 64 * MIB
"""Maximum size of the file: going back may remove thousands of steps."""
_MOST_EARLIER = 64
"""Lineages that are kept. Local directories hold a few of the newest steps, so older ones are of no use."""
_MOST_DELETED = 256  # deleted, and replaced, numbers that are kept
_OF_0_1_0 = re.compile(rb"run-[0-9a-f]{16}\n")
_NAME = re.compile(r"(run-[0-9a-f]{16})?")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_LINEAGE = re.compile(r"[0-9a-f]{16}")

Order = tuple[int, int]
"""Of the saves of one number, the one with the greatest order counts."""
_NO_ORDER: Order = (-1, -1)


class Removal(NamedTuple):
    """A step that is being removed from the persistent directory."""

    name: str  # of its directory
    step: int
    token: str
    into: str | None  # name of the directory it is moved to; None to delete it


@dataclass(frozen=True)
class RunFile:
    """The content of the file: which saves of each lineage count, and which steps are being removed."""

    name: str = ""  # of the run, and of its folder in local directories; empty if it has none
    current: str = ""  # the lineage of the last writer
    # The ones before, oldest first, each with the last step that counts.
    earlier: tuple[tuple[str, int], ...] = ()
    # Step, and a lineage: no save of it by this or an earlier one counts.
    deleted: tuple[tuple[int, str], ...] = ()
    # Step that was overwritten in the persistent directory, and the token of that save: no older one counts in any tier, even after
    # retention took the newer one.
    replaced: tuple[tuple[int, str], ...] = ()
    removals: tuple[Removal, ...] = ()  # in the order of removal

    def branch(self, lineage: str, last: int) -> RunFile:
        """The run when a writer goes on from step ``last``, or -1, with a lineage of its own."""
        before = [*self.earlier, *([(self.current, last)] if self.current else [])]
        bounded = tuple((one, min(bound, last)) for one, bound in before)
        return replace(self, current=lineage, earlier=bounded[-_MOST_EARLIER:])

    def without(self, step: int) -> RunFile:
        """The run without any save of a number; later lineages may save it again."""
        others = [one for one in self.deleted if one[0] != step]
        return replace(self, deleted=(*others[1 - _MOST_DELETED :], (step, self.current)))

    def overwritten(self, step: int, token: str) -> RunFile:
        """The run in which no save of a number counts that is older than the one with this token."""
        others = [one for one in self.replaced if one[0] != step]
        return replace(self, replaced=(*others[1 - _MOST_DELETED :], (step, token)))

    def order(self, step: int, token: str) -> Order | None:
        """Where a save stands among those of its number; None if it does not count."""
        lineages = [*(lineage for lineage, _ in self.earlier), self.current]
        order = _of_token(token, lineages)
        lasts = [*(last for _, last in self.earlier), step]
        gone = dict(self.deleted).get(step)
        deleted = lineages.index(gone) if gone in lineages else -1
        by = _of_token(dict(self.replaced).get(step, token), lineages)
        return order if order[0] > deleted and step <= lasts[order[0]] and order >= by else None

    def newer(self, step: int, token: str, than: str) -> bool:
        """Whether, of two saves of a number, the one with ``token`` is known to be newer."""
        one, other = (self.order(step, each) for each in (token, than))
        return one is not None and (other is None or one > other)

    def dump(self) -> bytes:
        """The content of the file."""
        return json.dumps({name: value for name, value in asdict(self).items() if value}).encode()


def _of_token(token: str, lineages: Sequence[str]) -> Order:
    if len(token) != 32 or token[:16] not in lineages:
        return _NO_ORDER
    return lineages.index(token[:16]), int(token[16:], 16)


def parse_run_file(data: bytes | None, directory: str) -> RunFile:
    """The content of the file; that of a run without local directories if there is none, or one of version 0.1.0."""
    if data is None or _OF_0_1_0.match(data):
        return RunFile()
    try:
        value = json.loads(data)
        run = RunFile(
            str(value.get("name", "")),
            str(value.get("current", "")),
            tuple((str(one), int(last)) for one, last in value.get("earlier", ())),
            tuple((int(step), str(one)) for step, one in value.get("deleted", ())),
            tuple((int(step), str(one)) for step, one in value.get("replaced", ())),
            tuple(_removal(*one) for one in value.get("removals", ())),
        )
        lineages = [*(one for one, _ in run.earlier), *(one for _, one in run.deleted)]
        lineages += [run.current] if run.name else []
        if not (
            _NAME.fullmatch(run.name)
            and all(_LINEAGE.fullmatch(one) for one in lineages)
            and all(_TOKEN.fullmatch(one) for _, one in run.replaced)
        ):
            raise ValueError("a name in it is none that ckpt gives")
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{directory}/{RUN_FILE} is damaged ({error}), so it is not known which steps count. Delete the file to "
            "go on from the steps of this directory alone",
            file=RUN_FILE,
        ) from error
    return run


def _removal(name: str, step: int, token: str, into: str | None) -> Removal:
    # who crafts a file names nothing outside of its directory
    for one in (name,) if into is None else (name, into):
        if not isinstance(one, str) or one[:1] in ("", ".") or {*"/\\"} & {*one}:
            raise ValueError(f"{one!r} is no name of a directory beside it")
    return Removal(name, int(step), str(token), into)
