"""What lies beside the checkpoints of a directory: unfinished saves, what was set aside, who writes."""

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
from ckpt_core._format.limits import most_bytes

_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Trace:
    """One thing that is no checkpoint, and tells of a save.

    Attributes:
        kind: ``unfinished`` (a save or a removal that goes on, or never ended), ``replaced`` (the
            old one of a replacement that was cut short), ``kept`` (the old one, as long as it is not
            known whether the new one is durable), the kind of a folder, or ``writer`` (a process
            that has the directory for its own now).
        name: of the checkpoint that it is about (cut, with ``...``, where it is long), or of the file.
        whose: the process, as far as it can be known.
        since_unix_secs: when it began.
    """

    kind: str
    name: str
    whose: str
    since_unix_secs: float


_KINDS = {
    hidden_names.TEMPORARY: "unfinished",
    hidden_names.REPLACED: "replaced",
    hidden_names.KEPT: "kept",
}


def traces(directory: str, owner_file: str, folders: Mapping[str, str]) -> list[Trace]:
    """What there is of that in a local directory; changes nothing.

    Args:
        directory: of the checkpoints.
        owner_file: name of the file that its writer holds.
        folders: names of those for checkpoints that were moved away, with the kind of what is in them.
    """
    found: list[Trace] = []
    for name in sorted(_names(directory)):
        path = os.path.join(directory, name)
        since = _since(path)
        if since is None:  # gone meanwhile, or no directory
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
    except (OSError, CheckpointCorrupt):  # it ended just now, or is no file of a writer
        return
    first = content.decode(errors="replace").partition("\n")[0]
    yield Trace("writer", name, first.strip().partition(" ")[2], since)


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _since(path: str) -> float | None:
    """The oldest change of what lies in a directory; None where it is none."""
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
