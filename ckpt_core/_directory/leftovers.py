"""Leftovers of interrupted saves and replacements: which are valid and which may be deleted.

A replaced checkpoint may be deleted only when the new one is durable: callers must fsync the
directory before they delete what ``removable`` returns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from ckpt_core._directory import hidden_names
from ckpt_core._directory.owner import is_dead, lives
from ckpt_core._directory.signs import SIGNS
from ckpt_core._directory.syscalls import remove


def is_vacant(path: str) -> bool:
    """Whether a checkpoint can be renamed to ``path``: nothing or an empty directory is there. Raises OSError if the
    system cannot say (EIO, EMFILE): what a replacement left beside it may count, or not.
    """
    if os.path.islink(path):
        return False
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def has_sign(path: str) -> bool:
    """Whether a directory contains one of ``SIGNS``, and so is a checkpoint."""
    return any(os.path.exists(os.path.join(path, sign)) for sign in SIGNS)


def replaced(path: str) -> str | None:
    """Path of the old checkpoint, if a replacement of ``path`` was interrupted; else None."""
    if not is_vacant(path):
        return None
    parent, name = os.path.split(path)
    found = [
        os.path.join(parent, hidden.entry)
        for hidden in hidden_names.of(parent, name)
        if hidden.kind == hidden_names.REPLACED
    ]
    return max(found, key=_validity, default=None)


def _validity(path: str) -> tuple[bool, int]:
    """Sort key for old checkpoints of one name: real checkpoints win, then the latest rename."""
    try:
        return has_sign(path), os.lstat(path).st_ctime_ns
    except OSError:
        return False, 0


def vacant_names(parent: str) -> set[str]:
    """Names of checkpoints that exist only under the hidden name of an interrupted replacement."""
    return {
        hidden.name
        for hidden in hidden_names.find(parent)
        if hidden.kind == hidden_names.REPLACED
        and hidden.name is not None
        and is_vacant(os.path.join(parent, hidden.name))
    }


def bring_back(parent: str) -> None:
    """Renames the old checkpoints of interrupted replacements back to their names."""
    for hidden in hidden_names.find(parent):
        if hidden.kind != hidden_names.REPLACED or hidden.name is None or lives(hidden.owner):
            continue
        path = os.path.join(parent, hidden.name)
        with contextlib.suppress(OSError):  # readers find it under the hidden name too
            if (aside := replaced(path)) is not None:
                os.rename(aside, path)


def removable(parent: str) -> list[str]:
    """Hidden names to delete: unfinished saves of dead writers, and replaced checkpoints."""
    found = hidden_names.find(parent)
    beside = (
        {} if all(hidden.kind == hidden_names.TEMPORARY for hidden in found) else _digests(parent)
    )
    return [hidden.entry for hidden in found if _is_removable(hidden, parent, beside)]


def _digests(parent: str) -> dict[str, str]:
    return {hidden_names.digest(entry): entry for entry in os.listdir(parent)}


def _is_removable(hidden: hidden_names.Hidden, parent: str, beside: dict[str, str]) -> bool:
    if hidden.kind == hidden_names.TEMPORARY:
        return is_dead(hidden.owner, os.path.join(parent, hidden.entry))
    name = beside.get(hidden.digest) if hidden.digest else hidden.label
    return name is not None and has_sign(os.path.join(parent, name))


def discard(paths: Iterable[str]) -> None:
    """Deletes directories with hidden names; raises no error of the file system. A ``REPLACED`` or ``KEPT`` one is
    first renamed to a ``TEMPORARY`` name: if the deletion is interrupted, readers must not take the rest for a
    checkpoint.
    """
    for path in paths:
        parent, entry = os.path.split(path)
        hidden = hidden_names.parse(entry)
        if hidden is None or hidden.kind == hidden_names.TEMPORARY:
            remove(path)
            continue
        gone = hidden_names.make(hidden_names.TEMPORARY, parent, hidden.label)
        try:
            os.rename(path, gone)
            remove(gone)
        except OSError:
            continue  # leave it undamaged
        except BaseException:  # of a signal handler: nobody will look at this name again
            remove(gone)
            raise
