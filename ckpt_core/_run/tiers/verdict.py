"""What all processes do after a local step could not be restored, from what each of them votes: pure functions."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    is_of_target,
    raised_by_a_handler,
)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Nothing can be written here."""
OF_THE_MACHINE = NO_ROOM | {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM),
    *(errno.EINTR, errno.ETIMEDOUT, errno.ESTALE, errno.ENOTCONN),
}
"""Errors of the system that say nothing about the files: no room, too few descriptors, no memory, no permission, a file
system that does not answer. EIO is none of them: a disk may say that of a lost sector, and another copy may have it."""


def is_unread(error: Exception) -> bool:
    """Whether a file could not be read for a reason that says nothing about what was saved."""
    return isinstance(error, OSError) and (
        error.errno == errno.EIO or error.errno in OF_THE_MACHINE
    )


def vote(error: Exception, there: bool, is_whole: Callable[[], bool] = lambda: True) -> str:
    """One process's vote after a failed restore of a local step, for ``judge_failure``.

    Returns ``"mend"`` (its part is damaged or gone: a copy of it may help), ``"unread"`` (its part could not be read: the
    same, but that is no damage), ``"leave"`` (try another copy of the step), ``"raise"`` (no other copy would help) or
    ``""`` (abstain).

    Args:
        error: what the restore raised here.
        there: whether the step is still in the directory of this process.
        is_whole: verifies this process's part, and notes if it cannot be used; called only if the error may come from it.
    """
    if raised_by_a_handler(error) is not None or is_of_target(error):
        return "raise"  # it says nothing about the directory
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        return "raise"
    if isinstance(error, CheckpointNotFound):
        return "" if there else "mend"  # there: only an item is missing
    if is_unread(error):
        is_whole()
        return "unread"
    if isinstance(error, (CheckpointCorrupt, OSError)):
        # otherwise the damage is that of another process, or other shardings are wanted
        return "leave" if there and is_whole() else "mend"
    if type(error) is CheckpointError:
        return ""  # most likely the report of another process's failure
    return "raise"  # the code is wrong, not the directory


def judge_failure(votes: Sequence[str]) -> str:
    """``"mend"``, ``"unread"``, ``"leave"`` or ``"raise"``: what all processes do."""
    if "raise" in votes:
        return "raise"
    return next((verdict for verdict in ("mend", "unread", "leave") if verdict in votes), "raise")
