"""What is checked of bytes that anybody may have written: names, sizes, what JSON and zstd would take. Pure.

A larger file is damaged, and is not read: it may be extended sparsely to terabytes. If the record lists a file, its size
there counts; these limits are for other files and crafted records. They allow more leaves than a record may have
(``treedef``): of 100,000 a leaf took up to 52 bytes in ``ckpt.json``, 75 in a checksum file, 300 in ``_METADATA`` and 8 in
the index. A save that would exceed them raises.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zstandard

from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._options import KIB, MIB

LFS_POINTER = b"version "
"""Begins what git-lfs has in place of a file that it has not fetched."""
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
    too_long = len(name.encode(errors="replace")) > 255
    if not name or name.startswith(".") or too_long or "/" in name or "\0" in name:
        raise ValueError(f"impossible name of an item {name[:80]!r}")
    return name


def token_name(token: object) -> str:
    """The token of a save in a record, validated as letters and digits, since it is part of file names."""
    if not isinstance(token, str) or not token.isascii() or not token.isalnum():
        raise ValueError(f"token {token!r} is not letters and digits")
    return token


def file_name(name: str) -> str:
    """A relative file path in a record, validated to stay inside the checkpoint."""
    if "\0" in name or not _NO_FILES.isdisjoint(name.split("/")):
        raise ValueError(f"impossible name of a file {name[:80]!r}")
    return name


_MOST_VALUES_BYTES = 1024 * MIB
"""Limit of the memory that the values of one text may take; a million leaves of a record need less."""
_LIGHT_BYTES = 4 * MIB
"""A text up to this length is not looked at: its values take 30 times as much at most."""
_COSTS_BYTES = ((b"{", 232), (b"[", 80), (b'"', 32), (b",", 40), (b":", 48))
"""What each such character may cost in CPython: an object of values, a list, half a text, a number, an entry."""
_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_json(
    data: bytes,
    file: str,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    errors: str = "surrogatepass",
) -> Any:
    """The value of a JSON file; ``pairs`` makes its objects. CheckpointCorrupt if it is invalid, too deep or too heavy."""
    if len(data) > _LIGHT_BYTES:
        refuse_heavy(data, file)
    try:
        return json.loads(data.decode(errors=errors), object_pairs_hook=pairs)
    except ValueError as error:
        raise CheckpointCorrupt(f"{file}: not valid JSON: {error}", file=file) from error
    except RecursionError as error:
        refuse_deep(data, file, error)
        raise


def refuse_heavy(data: bytes, file: str) -> None:
    """Raises CheckpointCorrupt if the values of a text could take more than ``_MOST_VALUES_BYTES``: by counting, as none is made yet."""
    wide = not data.isascii() or b"\\u" in data  # one such character makes each of a text take 4
    marks = sum(cost * data.count(mark) for mark, cost in _COSTS_BYTES)
    heavy = len(data) * (4 if wide else 1) + marks
    if heavy > _MOST_VALUES_BYTES:
        raise CheckpointCorrupt(
            f"{file}: the values in its {len(data)} bytes would take {heavy} bytes of memory, and can take "
            f"{_MOST_VALUES_BYTES} at most: it is damaged, and not parsed",
            file=file,
        )


def refuse_deep(
    data: bytes, file: str, error: RecursionError, most_depth: int | None = None
) -> None:
    """Raises CheckpointCorrupt if the text is nested deeper than ``most_depth`` (None: than this interpreter reads at all)."""
    most = max(1000, sys.getrecursionlimit()) if most_depth is None else most_depth
    brackets = np.frombuffer(_TEXTS.sub(b"", data).translate(None, _NO_BRACKETS), np.uint8)
    depths = np.cumsum(np.where(np.isin(brackets, list(b"[{")), 1, -1), dtype=np.int32)
    if depths.max(initial=0) > most:
        raise CheckpointCorrupt(
            f"{file}: not valid JSON: {error}: it is nested more than {most} levels deep", file=file
        ) from error


def decompress(data: bytes, most_bytes: int) -> bytes:
    """What a zstd frame holds; raises ValueError if it is damaged, or has more than ``most_bytes``, whatever it says itself."""
    parts: list[bytes] = []
    size_bytes = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while part := reader.read(MIB):
                parts.append(part)
                size_bytes += len(part)
                if size_bytes > most_bytes:
                    raise ValueError(f"it has more than {most_bytes} bytes")
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error
    return b"".join(parts)
