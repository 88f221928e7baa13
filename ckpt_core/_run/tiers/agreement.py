"""What the processes agree on about their local directories: judged by process 0, from plain text.

A step in local directories is *complete* when every process has it, with one token: the token names
the attempt, so the same step number of two different pasts is not taken for one checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound

_NAMED = 5
"""So many of the processes that lack a step are named."""


@dataclass(frozen=True)
class Complete:
    """Which steps lie whole in the local directories.

    Attributes:
        steps: that all processes have, with the token of each.
        partial: those that only some have, or not of one attempt; and processes that differ.
    """

    steps: dict[int, str]
    partial: dict[int, list[int]]


def judge_steps(texts: Sequence[str]) -> str:
    """The answer that ``parse_complete`` reads, of what ``dump_steps`` gave on each process."""
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
    """The steps that one process has, with the token of each."""
    return json.dumps(tokens)


def parse_complete(answer: str) -> Complete:
    steps, partial = json.loads(answer)
    return Complete(
        {int(step): token for step, token in steps.items()},
        {int(step): processes for step, processes in partial.items()},
    )


def vote(error: Exception, there: bool) -> str:
    """What one process makes of its failure to restore a local step, for ``judge_failure``.

    Args:
        there: whether the step still is in the directory of this process.
    """
    if isinstance(error, CheckpointNotFound):
        return "" if there else "leave"  # a missing item is no matter of the directory
    if isinstance(error, (CheckpointCorrupt, OSError)):
        return "leave"  # the directory is bad: another copy may be good
    if type(error) is CheckpointError:
        return ""  # most likely what another process met
    return "raise"  # the code is wrong, not the directory


def judge_failure(votes: Sequence[str]) -> str:
    """``"leave"`` where all shall go on to another copy of the step or to another step."""
    return "leave" if "leave" in votes and "raise" not in votes else "raise"
