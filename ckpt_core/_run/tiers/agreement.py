"""Agreement of the processes on their local steps: each sends text, process 0 decides.

A local step is *complete* when every process has it with the same token. The token identifies the
save that wrote it, so parts of two saves with the same step number are never taken for one
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound

_NAMED = 5
"""Maximum number of processes named in a message as lacking a step."""


@dataclass(frozen=True)
class Complete:
    """Which steps are complete in the local directories.

    Attributes:
        steps: step -> token, for steps that all processes have with that token.
        partial: step -> up to 5 processes that lack it or have another token, for all other steps.
    """

    steps: dict[int, str]
    partial: dict[int, list[int]]


def judge_steps(texts: Sequence[str]) -> str:
    """On process 0: merges the ``dump_steps`` text of each process; ``parse_complete`` reads it."""
    everyone: list[dict[str, str]] = [json.loads(text) for text in texts]
    steps: dict[str, str] = {}
    partial: dict[str, list[int]] = {}
    for step in dict.fromkeys(step for mine in everyone for step in mine):
        token = next(mine[step] for mine in everyone if step in mine)
        differing = [index for index, mine in enumerate(everyone) if mine.get(step) != token]
        if differing:
            partial[step] = differing[:_NAMED]
        else:
            steps[step] = token
    return json.dumps([steps, partial])


def dump_steps(tokens: Mapping[int, str]) -> str:
    """The steps of one process with their tokens, as text for ``judge_steps``."""
    return json.dumps(tokens)


def parse_complete(answer: str) -> Complete:
    steps, partial = json.loads(answer)
    return Complete(
        {int(step): token for step, token in steps.items()},
        {int(step): processes for step, processes in partial.items()},
    )


def vote(error: Exception, there: bool) -> str:
    """One process's vote after a failed restore of a local step, for ``judge_failure``.

    Returns ``"leave"`` (try another copy), ``"raise"`` (no other copy would help) or ``""``
    (abstain).

    Args:
        error: what the restore raised here.
        there: whether the step is still in the directory of this process.
    """
    if isinstance(error, CheckpointNotFound):
        return "" if there else "leave"  # there: only an item is missing
    if isinstance(error, (CheckpointCorrupt, OSError)):
        return "leave"  # the files here are bad: another copy may be good
    if type(error) is CheckpointError:
        return ""  # most likely the report of another process's failure
    return "raise"  # the code is wrong, not the directory


def judge_failure(votes: Sequence[str]) -> str:
    """``"leave"`` if all processes shall try another copy or another step, else ``"raise"``."""
    return "leave" if "leave" in votes and "raise" not in votes else "raise"
