"""Names: of checkpoints, as callers give them, and the hidden ones beside them, made and read here.

A hidden name is ``<kind><label>.<owner>.<digest><random>``: the label is the beginning of the name that it belongs to,
for people; the digest is of the whole name, for comparing. A name may continue another one with a dot
and may be as long as the file system allows, so neither a label nor a prefix says whose it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from typing import NamedTuple

from ckpt_core._directory.owner import this_owner

TEMPORARY = ".ckpt-tmp."
"""What is being written, or being removed: nobody reads it."""
REPLACED = ".ckpt-old."
"""The old checkpoint, while it is replaced in two renames: it counts as long as its name is vacant."""
KEPT = ".ckpt-kept."
"""The old checkpoint, replaced by one of which it is not known whether it is durable."""

_KINDS = (TEMPORARY, REPLACED, KEPT)
_LABEL_BYTES = 64  # some file systems take 143 bytes in all, and the rest needs about 70
_DIGEST_DIGITS = 16
_RANDOM_BYTES = 4
_OURS = re.compile(rf"[0-9a-f]{{{_DIGEST_DIGITS + 2 * _RANDOM_BYTES}}}")
_EARLIER = re.compile(r"[0-9a-f]{8}")
_EARLIER_LABEL_CHARACTERS = 100


_REMOTE = ("memory://", "s3://", "gs://")


def resolve(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Absolute path or URL without a slash at its end, and whether it is local.

    Relative paths and ``~`` are resolved now, so a later ``chdir`` changes nothing.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "the path of a checkpoint must be a str or an os.PathLike object, got a "
            f"{type(path).__name__}: the path comes first, as in save(path, state) and "
            "load(path, like)"
        )
    text = os.fspath(path)
    if not text:
        raise ValueError("the path of a checkpoint must not be empty")
    if text.startswith(_REMOTE):
        return text.rstrip("/"), False
    scheme, separator, _ = text.partition("://")
    if separator and scheme.isalnum():
        raise ValueError(f"{text}: only {', '.join(_REMOTE)} and local paths are supported")
    where = os.path.abspath(os.path.expanduser(text))
    if "\\" in where:
        raise ValueError(
            f"{where!r}: a path must not hold a backslash, which TensorStore takes for a slash: its arrays would "
            "be written into other directories. Use another path"
        )
    return where, True


class Hidden(NamedTuple):
    """A hidden name, taken apart.

    Attributes:
        entry: the name itself.
        kind: how it begins.
        label: how the name begins that it belongs to.
        digest: of that name; empty where an earlier version wrote it.
        owner: of the process that made it; empty where that is not known.
    """

    entry: str
    kind: str
    label: str
    digest: str
    owner: str

    def is_of(self, name: str) -> bool:
        """Whether it belongs to a checkpoint of this name."""
        if self.digest:
            return self.digest == digest(name)
        if self.kind == TEMPORARY:
            return self.label == name[:_EARLIER_LABEL_CHARACTERS]
        return self.label == name

    @property
    def name(self) -> str | None:
        """The name of the checkpoint; None where it was too long to stand in this one."""
        return self.label if self.is_of(self.label) else None


def make(kind: str, parent: str, name: str) -> str:
    """A path in ``parent`` that nobody else has, and that says whose it is and of which name."""
    unique = digest(name) + secrets.token_hex(_RANDOM_BYTES)
    return os.path.join(parent, f"{kind}{shortened(name, _LABEL_BYTES)}.{this_owner()}.{unique}")


def parse(entry: str) -> Hidden | None:
    """A hidden name taken apart, from its end: what it belongs to may hold any dots."""
    kind = next((kind for kind in _KINDS if entry.startswith(kind)), None)
    if kind is None:
        return None
    label, _, last = entry.removeprefix(kind).rpartition(".")
    digest = last[:_DIGEST_DIGITS] if _OURS.fullmatch(last) else ""
    if not digest and kind == REPLACED:  # earlier versions named no owner
        return Hidden(entry, kind, label, "", "") if label and _EARLIER.fullmatch(last) else None
    label, _, owner = label.rpartition(".")
    if not label or (not digest and kind == KEPT):
        return None
    return Hidden(entry, kind, label, digest, owner)


def find(parent: str) -> list[Hidden]:
    """All hidden names in a directory; none where it is missing."""
    try:
        entries = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [found for entry in entries if entry[0] == "." and (found := parse(entry)) is not None]


def shortened(name: str, most_bytes: int) -> str:
    """The beginning of a name, cut between two characters so that it takes at most so many bytes."""
    data = os.fsencode(name)
    if len(data) <= most_bytes:
        return name
    end = most_bytes
    # bytes that continue a character of UTF-8; in names that are no UTF-8 there may be more of them
    while end > most_bytes - 3 and data[end] & 0xC0 == 0x80:
        end -= 1
    return os.fsdecode(data[:end])


def digest(name: str) -> str:
    """What says of a hidden name which name it belongs to."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:_DIGEST_DIGITS]
