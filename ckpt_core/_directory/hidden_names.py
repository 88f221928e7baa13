"""The hidden names next to a checkpoint: it is being written, deleted or replaced.

A hidden name is ``<kind><label>.<owner>.<digest><random>`` and belongs to one checkpoint. The label
is the beginning of the checkpoint's name, for people. The digest is of the whole name, for
comparison: names may be long and may contain dots, so a label or prefix does not identify the
checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from typing import NamedTuple

from ckpt_core._directory.owner import this_owner

TEMPORARY = ".ckpt-tmp."
"""A checkpoint that is being written or deleted; readers ignore it."""
REPLACED = ".ckpt-old."
"""An old checkpoint between the two renames of a replacement; valid until the second one."""
KEPT = ".ckpt-kept."
"""An old checkpoint that was replaced, kept because the new one may not be durable."""

_KINDS = (TEMPORARY, REPLACED, KEPT)
_LABEL_BYTES = 64  # some file systems limit names to 143 bytes; the other parts need about 70
_DIGEST_DIGITS = 16
_RANDOM_BYTES = 4
_OURS = re.compile(rf"[0-9a-f]{{{_DIGEST_DIGITS + 2 * _RANDOM_BYTES}}}")


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
    unique = digest(name) + secrets.token_hex(_RANDOM_BYTES)
    return os.path.join(parent, f"{kind}{shortened(name, _LABEL_BYTES)}.{this_owner()}.{unique}")


def parse(entry: str) -> Hidden | None:
    """The parts of a hidden name, or None; parses from the end, since labels may contain dots."""
    kind = next((kind for kind in _KINDS if entry.startswith(kind)), None)
    if kind is None:
        return None
    label, _, last = entry.removeprefix(kind).rpartition(".")
    label, _, owner = label.rpartition(".")
    if not label or not _OURS.fullmatch(last):
        return None
    return Hidden(entry, kind, label, last[:_DIGEST_DIGITS], owner)


def find(parent: str) -> list[Hidden]:
    """All hidden names in a directory; empty if the directory is missing."""
    try:
        entries = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [found for entry in entries if entry[0] == "." and (found := parse(entry)) is not None]


def of(parent: str, name: str) -> list[Hidden]:
    """The hidden names in a directory that belong to one checkpoint."""
    return [hidden for hidden in find(parent) if hidden.is_of(name)]


def shortened(name: str, most_bytes: int) -> str:
    """The longest beginning of a name with at most ``most_bytes``, cut between two characters."""
    data = os.fsencode(name)
    if len(data) <= most_bytes:
        return name
    end = most_bytes
    # Skip continuation bytes of UTF-8, at most 3: a name that is not UTF-8 may have more.
    while end > most_bytes - 3 and data[end] & 0xC0 == 0x80:
        end -= 1
    return os.fsdecode(data[:end])


def digest(name: str) -> str:
    """The digest in a hidden name that identifies the checkpoint it belongs to."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:_DIGEST_DIGITS]
