"""Paths of checkpoints as callers give them, and the hidden names next to them.

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

from ckpt_core._directory.mounts import mounted_bucket
from ckpt_core._directory.owner import this_owner
from ckpt_core._errors import RefusedArgument
from ckpt_core._platform import WINDOWS

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
_EARLIER = re.compile(r"[0-9a-f]{8}")
_EARLIER_LABEL_CHARACTERS = 100


_REMOTE = ("memory://", "s3://", "gs://")
_ONE_SLASH = re.compile(r"(memory|s3|gs|gcs|file|https?|hdfs|abfss?|az):/(?!/)")


def resolve(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Absolute path or URL, without a trailing slash, and whether it is a directory of a file system.

    A bucket that is mounted as a directory is an object store; see ``mounted_files``. Resolves relative paths and ``~`` now, so that a later ``chdir`` has no effect.

    Raises:
        TypeError: ``path`` is not a str or an os.PathLike object.
        ValueError: the path is empty, cannot be the name of a file, has a backslash, or is a URL with another scheme than
            ``memory``, ``s3`` or ``gs``.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "the path of a checkpoint must be a str or an os.PathLike object, got a "
            f"{type(path).__name__}: the path comes first, as in save(path, state) and "
            "load(path, like)"
        )
    text = os.fspath(path)
    if not text:
        raise RefusedArgument("the path of a checkpoint must not be empty")
    try:
        if b"\0" in os.fsencode(text):
            raise RefusedArgument(f"{text!r}: no path can hold a zero byte")
    except UnicodeEncodeError:
        raise RefusedArgument(
            f"{text!r}: no path can hold a lone surrogate, which has no encoding"
        ) from None
    if text.startswith(_REMOTE):
        scheme, _, rest = text.partition("://")
        if not rest.strip("/") or (rest.startswith("/") and scheme != "memory"):
            key = rest.strip("/") or "PATH"
            raise RefusedArgument(f"{text} names no bucket: write {scheme}://BUCKET/{key}")
        return text.rstrip("/"), False
    scheme, separator, _ = text.partition("://")
    if separator and scheme.isalnum():
        raise RefusedArgument(f"{text}: only {', '.join(_REMOTE)} and local paths are supported")
    shortened = _ONE_SLASH.match(text)
    if shortened is not None:
        rest = text[shortened.end() :]
        meant = (
            f"write {shortened[1]}://{rest}"
            if f"{shortened[1]}://" in _REMOTE
            else f"write /{rest}"
        )
        raise RefusedArgument(
            f"{text!r} is a URL that lost a slash, as in a pathlib.Path, and would be a local folder called "
            f"{shortened[1]}: {meant}, as text (or ./{text} for that folder)"
        )
    where = os.path.abspath(os.path.expanduser(text))
    if WINDOWS:
        where = where.replace("\\", "/")
    elif "\\" in where:
        raise RefusedArgument(
            f"{where!r}: a path must not hold a backslash, which TensorStore takes for a slash: its arrays would "
            "be written into other directories. Use another path"
        )
    return where, mounted_bucket(where) is None


class Hidden(NamedTuple):
    """The parts of a hidden name.

    Attributes:
        entry: the whole hidden name.
        kind: its prefix: ``TEMPORARY``, ``REPLACED`` or ``KEPT``.
        label: the beginning of the checkpoint's name.
        digest: digest of the checkpoint's name; empty if an earlier version wrote it.
        owner: the process that made it, see ``owner.this_owner``; empty if unknown.
    """

    entry: str
    kind: str
    label: str
    digest: str
    owner: str

    def is_of(self, name: str) -> bool:
        """Whether it belongs to the checkpoint of this name."""
        if self.digest:
            return self.digest == digest(name)
        if self.kind == TEMPORARY:
            return self.label == name[:_EARLIER_LABEL_CHARACTERS]
        return self.label == name

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
    digest = last[:_DIGEST_DIGITS] if _OURS.fullmatch(last) else ""
    if not digest and kind == REPLACED:  # earlier versions named no owner
        return Hidden(entry, kind, label, "", "") if label and _EARLIER.fullmatch(last) else None
    label, _, owner = label.rpartition(".")
    if not label or (not digest and kind == KEPT):
        return None
    return Hidden(entry, kind, label, digest, owner)


def find(parent: str) -> list[Hidden]:
    """All hidden names in a directory; empty if the directory is missing."""
    try:
        entries = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [found for entry in entries if entry[0] == "." and (found := parse(entry)) is not None]


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
