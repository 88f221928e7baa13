"""What the processes do after a failed restore of a local step: each votes, process 0 decides."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    is_of_target,
    mark_known_to_all,
    raised_by_a_handler,
)

_OF_THE_MACHINE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM}
)
"""Errors of the system that say nothing about the files: too few descriptors, no memory, no permission."""


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
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
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


def damage_of(directory: str, step: int, error: Exception, processes: int) -> CheckpointCorrupt:
    """What is raised if no other tier has the step.

    Args:
        directory: the local directory.
        step: that could not be restored.
        error: why.
        processes: number of processes.
    """
    hint = ""
    if processes > 1:
        hint = (
            " (from local directories each process restores what its own devices held at the save: "
            "other shardings need a step of the persistent directory)"
        )
    named = error if isinstance(error, CheckpointCorrupt) else None
    damage = CheckpointCorrupt(
        f"{directory}: step {step}: {error}{hint}",
        file=named and named.file,
        leaf=named and named.leaf,
    )
    damage.__cause__ = error
    mark_known_to_all(damage, CheckpointCorrupt.__name__)  # by the agreement on it
    return damage
