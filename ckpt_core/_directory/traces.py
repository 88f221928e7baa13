"""Finds what is next to the checkpoints: unfinished saves, moved steps, the live writer."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_core._directory import hidden_names
from ckpt_core._directory.bounded_read import read_bounded
from ckpt_core._directory.locks import is_locked
from ckpt_core._directory.owner import is_dead, lives
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.untrusted import most_bytes

_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Trace:
    """One directory entry that is not a step, but shows the state of a save or a deletion. Its kind is ``unfinished``
    (running or interrupted), ``replaced`` or ``kept`` (see ``hidden_names``), ``writer`` (a live process that has
    claimed the directory), or a value of ``folders``.
    """

    kind: str
    name: str  # of the checkpoint (cut and with ``...`` if long), or of the owner file
    whose: str  # the process in words; empty if unknown
    since_unix_secs: float  # the oldest modification time found


_KINDS = {
    hidden_names.TEMPORARY: "unfinished",
    hidden_names.REPLACED: "replaced",
    hidden_names.KEPT: "kept",
}


def traces(directory: str, owner_file: str, folders: Mapping[str, str]) -> list[Trace]:
    """The traces in a local directory of checkpoints; changes nothing. ``owner_file`` is the file that the writer of
    the directory keeps locked; ``folders`` maps the folders to which checkpoints are moved to their kinds.
    """
    found: list[Trace] = []
    for name in sorted(_names(directory)):
        path = os.path.join(directory, name)
        since = _since(path)
        if since is None:  # deleted meanwhile, or not a directory
            continue
        hidden = hidden_names.parse(name)
        if hidden is not None:
            about = hidden.name or f"{hidden.label}..."
            whose = _whose(hidden.owner, path) if hidden.kind == hidden_names.TEMPORARY else ""
            found.append(Trace(_KINDS[hidden.kind], about, whose, since))
        elif _ORBAX_TEMPORARY in name:
            found.append(Trace("unfinished", name.partition(".")[0], "Orbax", since))
        elif name in folders:
            for inner in sorted(_names(path)):
                inner_since = _since(os.path.join(path, inner))
                if inner_since is not None:
                    found.append(Trace(folders[name], f"{name}/{inner}", "", inner_since))
    return [*found, *_writer(directory, owner_file)]


def _writer(directory: str, name: str) -> Iterator[Trace]:
    path = os.path.join(directory, name)
    if not is_locked(path):
        return
    try:
        content = read_bounded(directory, name, most_bytes(name)) or b""
        since = os.stat(path).st_mtime
    except (OSError, CheckpointCorrupt):  # the writer ended just now, or this is not an owner file
        return
    first = content.decode(errors="replace").partition("\n")[0]
    yield Trace("writer", name, first.strip().partition(" ")[2].partition(", since ")[0], since)


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _since(path: str) -> float | None:
    """Oldest modification time of a directory and its entries; None if it is not a directory."""
    try:
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            return None
        inside = [os.lstat(os.path.join(path, name)).st_mtime for name in os.listdir(path)]
    except OSError:
        return None
    return min([status.st_mtime, *inside])


def _whose(owner: str, path: str) -> str:
    pid = owner.split("-")[1] if "-" in owner else ""
    if not pid.isdigit():
        return "an unknown process"
    living = lives(owner)
    if living is not None:
        return f"process {pid}" if living else f"process {pid}, which has ended"
    seems = ", which seems to have ended" if is_dead(owner, path) else ""
    return f"process {pid} of another machine{seems}"
