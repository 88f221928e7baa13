"""What tries and replacements that were cut short leave beside a checkpoint: which counts, which may go.

An old checkpoint that was replaced goes only when the new one is there and durable: whoever removes
what ``removable`` gives syncs the directory before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from ckpt_core._directory import hidden_names
from ckpt_core._directory.owner import is_dead, lives
from ckpt_core._directory.syscalls import remove

SIGNS = (
    "ckpt.json",
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "orbax.checkpoint",
    "commit_success.txt",
)
"""By one of these names in it a directory is known as a checkpoint."""


def is_vacant(path: str) -> bool:
    """Whether there is nothing, or an empty directory, over which a checkpoint can be renamed."""
    if os.path.islink(path):
        return False
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except OSError:
        return False


def has_sign(path: str) -> bool:
    """Whether a directory is a checkpoint, by the names in it."""
    return any(os.path.exists(os.path.join(path, sign)) for sign in SIGNS)


def replaced(path: str) -> str | None:
    """Where the old checkpoint stands, if a replacement of ``path`` was cut short."""
    if not is_vacant(path):
        return None
    parent, name = os.path.split(path)
    found = [
        os.path.join(parent, hidden.entry)
        for hidden in hidden_names.find(parent)
        if hidden.kind == hidden_names.REPLACED and hidden.is_of(name)
    ]
    return max(found, key=_standing, default=None)


def _standing(path: str) -> tuple[bool, int]:
    """Orders old checkpoints of one name: those that are one, and then the one renamed last."""
    try:
        return has_sign(path), os.lstat(path).st_ctime_ns
    except OSError:
        return False, 0


def vacant_names(parent: str) -> set[str]:
    """Names in a directory of which only the old checkpoint stands there, under its hidden name."""
    return {
        hidden.name
        for hidden in hidden_names.find(parent)
        if hidden.kind == hidden_names.REPLACED
        and hidden.name is not None
        and is_vacant(os.path.join(parent, hidden.name))
    }


def bring_back(parent: str) -> None:
    """Gives the old checkpoints of replacements that were cut short their names again."""
    for hidden in hidden_names.find(parent):
        if hidden.kind != hidden_names.REPLACED or hidden.name is None or lives(hidden.owner):
            continue
        path = os.path.join(parent, hidden.name)
        aside = replaced(path)
        if aside is not None:
            with contextlib.suppress(OSError):  # it is read under that name too
                os.rename(aside, path)


def removable(parent: str) -> list[str]:
    """Hidden names of what dead writers left, and of old checkpoints that were replaced."""
    found = hidden_names.find(parent)
    beside = (
        {} if all(hidden.kind == hidden_names.TEMPORARY for hidden in found) else _digests(parent)
    )
    return [hidden.entry for hidden in found if _may_go(hidden, parent, beside)]


def _digests(parent: str) -> dict[str, str]:
    return {hidden_names.digest(entry): entry for entry in os.listdir(parent)}


def _may_go(hidden: hidden_names.Hidden, parent: str, beside: dict[str, str]) -> bool:
    if hidden.kind == hidden_names.TEMPORARY:
        return is_dead(hidden.owner, os.path.join(parent, hidden.entry))
    name = beside.get(hidden.digest) if hidden.digest else hidden.label
    return name is not None and has_sign(os.path.join(parent, name))


def of_name(parent: str, name: str) -> list[hidden_names.Hidden]:
    """What belongs to one checkpoint."""
    return [hidden for hidden in hidden_names.find(parent) if hidden.is_of(name)]


def discard(paths: Iterable[str]) -> None:
    """Removes what has hidden names; never raises.

    What may be taken for a checkpoint gets another name first: half of it is none.
    """
    for path in paths:
        parent, entry = os.path.split(path)
        hidden = hidden_names.parse(entry)
        if hidden is not None and hidden.kind != hidden_names.TEMPORARY:
            gone = hidden_names.make(hidden_names.TEMPORARY, parent, hidden.label)
            try:
                os.rename(path, gone)
            except OSError:
                continue  # it stays, as a whole
            path = gone
        remove(path)
