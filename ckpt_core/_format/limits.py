"""Valid names and maximum sizes of the files of a checkpoint. Pure.

A larger file is damaged and is not read: a file that was extended, even sparsely to terabytes, must
be rejected without cost. If the record lists a file, the size there is checked; these limits are
for files read without a record, and for malicious records. Measured with 100,000 leaves and names
of 20 to 45 letters, a leaf takes 76 to 111 bytes in ``ckpt.json``, 55 to 75 in a checksum file (and
11 for each further 4 MiB), 194 to 300 in ``_METADATA`` and 4 to 8 in the index; a manifest has 119
bytes, or 182 after several commits. The limits therefore allow about three million leaves. A save
that would exceed them raises (``dump_record``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._options import KIB, MIB

_LIMITS_BYTES = {
    "ckpt.json": 512 * MIB,
    "manifest.ocdbt": 16 * MIB,  # the last 16 versions, and references to older ones
    "zarr.json": MIB,  # metadata of one array
    ".zarray": MIB,
}
SHORT_BYTES = 64 * KIB
"""The smallest limit of any file."""
_MARKS = frozenset({"commit_success.txt", "ckpt.token", "ckpt.attempt"})
_NO_FILES = frozenset({"", ".", ".."})
_JSON_BYTES = 1024 * MIB
"""Limit of other files: tree metadata, shardings, texts, checksums, user JSON, pipeline states."""
MOST_BYTES = 2**60
"""Limit of data files."""


def most_bytes(name: str) -> int:
    """The maximum size in bytes of a file with this name or path."""
    folder, _, base = name.rpartition("/")
    if base in _LIMITS_BYTES:
        return _LIMITS_BYTES[base]
    if folder == "d" or folder.endswith("/d"):
        return MOST_BYTES  # data files, of which only the ranges in the index are read
    return SHORT_BYTES if base.startswith(".ckpt-") or base in _MARKS else _JSON_BYTES


def refuse_too_long(sizes_bytes: Mapping[str, int]) -> None:
    """Raises CheckpointError if a file, given by name, would be too large to be read back."""
    for name, size in sizes_bytes.items():
        if size > most_bytes(name):
            raise CheckpointError(
                f"{name} would have {size} bytes, more than the {most_bytes(name)} that ckpt reads back: save "
                "the leaves in several items, or less of metadata, texts or buffered data"
            )


def file_size(value: Any) -> int:
    """A file size in a record, validated."""
    if type(value) is not int or not 0 <= value < MOST_BYTES:
        raise ValueError(f"impossible size {value!r}")
    return value


def item_name(name: str) -> str:
    """An item name in a record, validated as a directory name."""
    if not name or name.startswith(".") or len(name.encode(errors="replace")) > 255:
        raise ValueError(f"impossible name of an item {name[:80]!r}")
    if "/" in name or "\0" in name:
        raise ValueError(f"impossible name of an item {name[:80]!r}")
    return name


def token_name(token: object) -> str:
    """The token of a save, which is part of file names, as it stands in a record.

    Raises:
        ValueError: it is something else than letters and digits.
    """
    if not isinstance(token, str) or not token.isascii() or not token.isalnum():
        raise ValueError(f"token {token!r} is not letters and digits")
    return token


def file_name(name: str) -> str:
    """A relative file path in a record, validated to stay inside the checkpoint."""
    if "\0" in name or not _NO_FILES.isdisjoint(name.split("/")):
        raise ValueError(f"impossible name of a file {name[:80]!r}")
    return name
