"""What stands at the path of a checkpoint, and under hidden names beside it: whose that is, and what may go.

A hidden name is ``<kind><label>.<owner>.<digest><random>`` and belongs to one checkpoint. The label is the beginning of
the checkpoint's name, for people; names may be long and contain dots, so the digest of the whole name identifies it.

A replaced checkpoint may be deleted only when the new one is durable: callers must fsync the
directory before they delete what ``removable`` returns.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_core._directory.files import kind_at, read_bounded, remove
from ckpt_core._directory.owner import is_dead, is_locked, lives, this_owner
from ckpt_core._directory.paths import SIGNS, already_there, has_sign, is_meant, lies_inside
from ckpt_core._errors import CheckpointCorrupt, CheckpointExists
from ckpt_core._format.untrusted import most_bytes

TEMPORARY = ".ckpt-tmp."  # a checkpoint that is being written or deleted; readers ignore it
REPLACED = ".ckpt-old."  # an old checkpoint, valid until the second rename of its replacement
KEPT = ".ckpt-kept."  # an old checkpoint that was replaced: the new one may not be durable

_KINDS = {TEMPORARY: "unfinished", REPLACED: "replaced", KEPT: "kept"}  # words of a ``Trace``
_LABEL_BYTES = 64  # some file systems limit names to 143 bytes; the other parts need about 70
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_HIDDEN = re.compile(r"(\.ckpt-(?:tmp|old|kept)\.)(.+)\.([^.]*)\.([0-9a-f]{16})[0-9a-f]{8}", re.S)
"""Kind, label, which may contain dots, owner and digest of a hidden name, and random digits."""


class Hidden(NamedTuple):
    """The parts of a hidden name."""

    entry: str  # the whole hidden name
    kind: str  # TEMPORARY, REPLACED or KEPT
    label: str  # the beginning of the checkpoint's name
    digest: str  # of the checkpoint's name
    owner: str  # see ``owner.this_owner``

    def is_of(self, name: str) -> bool:
        """Whether it belongs to the checkpoint of this name."""
        return self.digest == digest(name)

    @property
    def name(self) -> str | None:
        """The name of the checkpoint; None if the label contains only its beginning."""
        return self.label if self.is_of(self.label) else None


def make(kind: str, parent: str, name: str) -> str:
    """A new unique path in ``parent`` for checkpoint ``name``, owned by this process."""
    unique = digest(name) + secrets.token_hex(4)
    return os.path.join(parent, f"{kind}{shortened(name, _LABEL_BYTES)}.{this_owner()}.{unique}")


def parse(entry: str) -> Hidden | None:
    """The parts of a hidden name, or None."""
    found = _HIDDEN.fullmatch(entry)
    return found and Hidden(entry, found[1], found[2], found[4], found[3])


def names_in(path: str) -> list[str] | None:
    """What a directory holds: nothing if there is none, None if something else is there; OSError if the system cannot say."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        return None


def find(parent: str) -> list[Hidden]:
    """All hidden names in a directory; empty if the directory is missing."""
    entries = names_in(parent) or ()
    return [found for entry in entries if entry[0] == "." and (found := parse(entry)) is not None]


def of(parent: str, name: str) -> list[Hidden]:
    """The hidden names in a directory that belong to one checkpoint."""
    return [hidden for hidden in find(parent) if hidden.is_of(name)]


def shortened(name: str, most_bytes: int) -> str:
    """The longest beginning of a name with at most ``most_bytes``, cut between two characters."""
    data = os.fsencode(name)
    return name if len(data) <= most_bytes else data[:most_bytes].decode(errors="ignore")


def digest(name: str) -> str:
    """The digest in a hidden name that identifies the checkpoint it belongs to."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def replaced(path: str) -> str | None:
    """Path of the old checkpoint, if a replacement of ``path`` was interrupted; else None."""
    if os.path.islink(path) or names_in(path) != []:
        return None
    parent, name = os.path.split(path)
    found = [os.path.join(parent, one.entry) for one in of(parent, name) if one.kind == REPLACED]
    return max(found, key=_validity, default=None)


def _validity(path: str) -> tuple[bool, int]:
    """Sort key for old checkpoints of one name: real checkpoints win, then the latest rename."""
    with contextlib.suppress(OSError):
        return has_sign(path), os.lstat(path).st_ctime_ns
    return False, 0


def interrupted(parent: str) -> dict[str, str]:
    """The checkpoints that a replacement which was interrupted keeps under a hidden name only: name -> path there."""
    names = {one.name for one in find(parent) if one.kind == REPLACED and one.name is not None}
    paths = {name: replaced(os.path.join(parent, name)) for name in names}
    return {name: path for name, path in paths.items() if path is not None}


def removable(parent: str) -> list[str]:
    """Hidden names to delete: unfinished saves of dead writers, and replaced checkpoints."""
    found = find(parent)
    old = [hidden for hidden in found if hidden.kind != TEMPORARY]
    names = (names_in(parent) if old else ()) or ()
    beside = {digest(name): f"{parent}/{name}" for name in names}
    gone = [one for one in old if one.digest in beside and has_sign(beside[one.digest])]
    saves = [one for one in found if one.kind == TEMPORARY]
    gone += [one for one in saves if is_dead(one.owner, os.path.join(parent, one.entry))]
    return [hidden.entry for hidden in gone]


def discard(paths: Iterable[str]) -> None:
    """Deletes directories with hidden names; raises no error of the file system. A ``REPLACED`` or ``KEPT`` one is first
    renamed to a ``TEMPORARY`` name: of an interrupted deletion, readers must not take the rest for a checkpoint.
    """
    for path in paths:
        parent, entry = os.path.split(path)
        hidden = parse(entry)
        if hidden is None or hidden.kind == TEMPORARY:
            remove(path)
            continue
        gone = make(TEMPORARY, parent, hidden.label)
        with contextlib.suppress(OSError):  # which keeps it undamaged
            os.rename(path, gone)
            remove(gone)


def refuse_occupied(path: str, *, overwrite: bool) -> None:
    """Raises CheckpointExists if something is at ``path`` that must not or cannot be replaced, or a checkpoint is around it."""
    if overwrite and os.path.islink(path):
        raise CheckpointExists(
            f"{path} is a link to {os.path.realpath(path)}: overwrite=True would replace the link and leave what it leads to "
            "as it is. Name that, or remove the link"
        )
    if os.path.lexists(path) and kind_at(path) != "directory":
        what = "a file" if os.path.exists(path) else "a link that leads nowhere"
        advice = "a checkpoint is a directory; choose another path"
        raise CheckpointExists(f"{path} is {what}: {advice}")
    around = path
    while (around := os.path.dirname(around)) != os.path.dirname(around):
        if os.path.isfile(os.path.join(around, SIGNS[0])) and _is_meant(around):
            raise lies_inside(path, around)
    names = names_in(path)
    if not names:
        return
    named = [sign for sign in SIGNS if sign in names]
    # what is replaced is deleted: the name of a file is not enough for that
    if not named or not _is_meant(path):
        steps = [name for name in names if has_sign(os.path.join(path, name))]
        if steps and not named:
            raise CheckpointExists(
                f"{path} is a directory that holds no checkpoint itself, but others ({', '.join(sorted(steps)[:5])}): "
                "save a step into it with ckpt.Checkpointer(path).save(step, ...), or choose another path"
            )
        hint = f", whose {named[0]} is another file of that name" if named else ""
        raise CheckpointExists(
            f"{path} is a directory that holds no checkpoint ({', '.join(sorted(names)[:5])}){hint}: "
            "choose another path, or move it away; overwrite=True replaces checkpoints only"
        )
    if not overwrite:
        raise already_there(path)


def _is_meant(path: str) -> bool:
    return is_meant(lambda name: read_bounded(path, name, most_bytes(name)))


@dataclass(frozen=True)
class Trace:
    """One directory entry that is not a step, but shows the state of a save or a deletion."""

    # ``unfinished`` (running or interrupted), ``replaced``, ``kept``, ``writer`` (a live process), or a value of ``folders``
    kind: str
    name: str  # of the checkpoint (cut and with ``...`` if long), or of the owner file
    whose: str  # the process in words; empty if unknown
    since_unix_secs: float  # the oldest modification time found


def traces(directory: str, owner_file: str, folders: Mapping[str, str]) -> list[Trace]:
    """The traces in a local directory of checkpoints. ``folders`` maps folders to which checkpoints are moved to their kinds."""
    found: list[Trace] = []
    for name, path, since in _folders_in(directory):
        hidden = parse(name)
        if hidden is not None:
            about = hidden.name or f"{hidden.label}..."
            whose = _whose(hidden.owner, path) if hidden.kind == TEMPORARY else ""
            found.append(Trace(_KINDS[hidden.kind], about, whose, since))
        elif _ORBAX_TEMPORARY in name:
            found.append(Trace("unfinished", name.partition(".")[0], "Orbax", since))
        elif name in folders:
            moved = _folders_in(path)
            found += (Trace(folders[name], f"{name}/{inner}", "", old) for inner, _, old in moved)
    return [*found, *_writer(directory, owner_file)]


def _folders_in(directory: str) -> Iterator[tuple[str, str, float]]:
    """Name, path, and the oldest modification time in it, of each directory in one; of those that can be read."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):  # deleted meanwhile
                entries = [os.path.join(path, one) for one in os.listdir(path)]
                times = [os.stat(path).st_mtime, *(os.lstat(one).st_mtime for one in entries)]
                yield name, path, min(times)


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


def _whose(owner: str, path: str) -> str:
    pid = owner.split("-")[1] if "-" in owner else ""
    if not pid.isdigit():
        return "an unknown process"
    living = lives(owner)
    if living is not None:
        return f"process {pid}" if living else f"process {pid}, which has ended"
    seems = ", which seems to have ended" if is_dead(owner, path) else ""
    return f"process {pid} of another machine{seems}"
