"""What all processes do after a local step could not be restored, from what each of them votes: pure functions."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Literal

from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    NewerFormat,
    is_of_target,
)

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_OF_THE_MACHINE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM}
    | {errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.ENOTCONN}
)
_OF_THE_FILES = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
Cause = Literal["room", "machine", "disk", ""]


def cause_of(error: BaseException) -> Cause:
    """What an error of the system says of this machine: ``"room"`` (nothing can be written here), ``"machine"`` (too few
    descriptors, no memory, no permission, a file system that does not answer: no other copy would help) or ``"disk"`` (a disk
    does not give what it holds: another copy may help). Only ``""`` may say something of what was saved: no error of the
    system, or one that tells what lies there (no file, a directory).
    """
    if not isinstance(error, OSError) or error.errno is None or error.errno in _OF_THE_FILES:
        return ""
    if error.errno in _NO_ROOM:
        return "room"
    return "machine" if error.errno in _OF_THE_MACHINE else "disk"


def is_unread(error: BaseException) -> bool:
    """Whether what was saved could not be looked at, which is no damage of it."""
    return isinstance(error, NewerFormat) or bool(cause_of(error))


class Misfit(CheckpointError):
    """A local step is whole, and does not hold what the wanted shardings need."""


class Stray(CheckpointError):
    """A step that is not of the history which the steps before it tell, as in a copy of a run that went back."""


State = Literal["whole", "damaged", "unread"]
"""Of a part: every byte is as it was saved; some is not; not all could be read, and nothing is known of the rest."""


def vote(error: Exception, there: bool, state: Callable[[], State] = lambda: "whole") -> str:
    """One process's vote for ``judge_failure`` after a failed restore: ``"mend"`` (its part is damaged or gone: a copy may
    help), ``"unread"`` (it could not be read: the same, but without a copy the step is not damaged), ``"other"`` (try another
    copy of the step), ``"raise"`` (no other copy would help) or ``""`` (abstain). ``there``: the step is in this process's
    directory. ``state`` verifies the part; called only if the error may come from it.
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
    unread = CheckpointError(text) if number is None else OSError(number, text)
    unread.__cause__ = error
    return unread


def damage_of(directory: str, step: int, error: Exception) -> CheckpointCorrupt:
    """What is raised if no other tier has a step that could not be restored because of ``error``."""
    named = error if isinstance(error, CheckpointCorrupt) else None
    damage = CheckpointCorrupt(
        f"{directory}: step {step}: {error}",
        file=named and named.file,
        leaf=named and named.leaf,
    )
    damage.__cause__ = error
    return damage


def misfit_of(directory: str, step: int, error: Exception) -> Misfit:
    """The same where all parts are whole, but do not have what this restore wants."""
    misfit = Misfit(
        f"{directory}: step {step} is not damaged, but the local directories do not have it for these "
        f"shardings: {error}. From them each process restores what its own devices held at the save, and none does so "
        "alone (as_numpy=True). Restore with the shardings of the save; for others, save it to the "
        "persistent directory before: save(..., force=True)"
    )
    misfit.__cause__ = error
    return misfit
