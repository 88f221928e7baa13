"""What a file of a checkpoint can be called, and how long it can be. Pure.

What is longer is damaged, and is not read: a file that was grown, sparse and terabytes long if need
be, must cost nothing before it is
found out. Where the record lists a file its size there counts; these limits are for all that is read
without a record, and for what a record says that was made to harm. Measured with 100,000 leaves and
names of 20 to 45 letters, a leaf takes 76 to 111 bytes in ``ckpt.json``, 55 to 75 in a file of checksums
(and 11 for each further 4 MiB), 194 to 300 in ``_METADATA`` and 4 to 8 in the index; a manifest has 119
bytes, 182 of several commits. So these limits hold some three million leaves. What would exceed them is
not saved either (`dump_record`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._options import KIB, MIB

_LIMITS_BYTES = {
    "ckpt.json": 512 * MIB,
    "manifest.ocdbt": 16 * MIB,  # the last 16 versions, and where older ones are
    "zarr.json": MIB,  # of one array
    ".zarray": MIB,
}
SHORT_BYTES = 64 * KIB
"""No file has a lower limit."""
_MARKS = frozenset({"commit_success.txt", "ckpt.token", "ckpt.attempt"})
_JSON_BYTES = 1024 * MIB
"""Descriptions of trees, shardings, texts, checksums, JSON of the user's, states of pipelines."""
MOST_BYTES = 2**60
"""No file is longer than this."""


def most_bytes(name: str) -> int:
    """The most bytes that a file of this name, which may be a path, can have."""
    folder, _, base = name.rpartition("/")
    if base in _LIMITS_BYTES:
        return _LIMITS_BYTES[base]
    if folder == "d" or folder.endswith("/d"):
        return MOST_BYTES  # arrays: of these only what the index says is read
    return SHORT_BYTES if base.startswith(".ckpt-") or base in _MARKS else _JSON_BYTES


def refuse_too_long(sizes_bytes: Mapping[str, int]) -> None:
    """Raises CheckpointError for a file, by its name, that would be written and not be read again."""
    for name, size in sizes_bytes.items():
        if size > most_bytes(name):
            raise CheckpointError(
                f"{name} would have {size} bytes, more than the {most_bytes(name)} that ckpt reads back: save "
                "the leaves in several items, or less of metadata, texts or buffered data"
            )


def file_size(value: Any) -> int:
    """A size that a record gives, found possible."""
    if type(value) is not int or not 0 <= value < MOST_BYTES:
        raise ValueError(f"impossible size {value!r}")
    return value


def item_name(name: str) -> str:
    """A name that can be that of a directory in a checkpoint."""
    if not name or name.startswith(".") or len(name.encode(errors="replace")) > 255:
        raise ValueError(f"impossible name of an item {name[:80]!r}")
    if "/" in name or "\0" in name:
        raise ValueError(f"impossible name of an item {name[:80]!r}")
    return name


def file_name(name: str) -> str:
    """A path that leads nowhere but into the checkpoint."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"impossible name of a file {name[:80]!r}")
    return name
