"""The small files of a checkpoint in an object store: several in one value, or each by itself. Pure.

Several are one zstd frame: a line of JSON with names and sizes, then their contents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import zstandard

from ckpt_core._format.untrusted import decompress, parse_json
from ckpt_core._options import MIB

MOST_HELD_BYTES = 8 * MIB
"""Maximum size of a file that a save packs; a larger one is written by itself."""
MOST_PACKED_BYTES = 128 * MIB
"""Maximum size of all files that are packed into one record, whatever sizes it says they have."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """The files, by name, as one value."""
    sizes = {name: len(data) for name, data in files.items()}
    line = json.dumps(sizes, separators=(",", ":")).encode()
    return zstandard.ZstdCompressor(write_content_size=False).compress(
        b"\n".join([line, b"".join(files.values())])
    )


def unpack(data: bytes, most_bytes: int) -> dict[str, bytes]:
    """The files in a value of ``pack``; raises ValueError for any other value, or more than ``most_bytes``."""
    line, mark, content = decompress(data, most_bytes).partition(b"\n")
    sizes = parse_json(line, "small_files")
    if not mark or not isinstance(sizes, dict):
        raise ValueError("it does not begin with names and sizes")
    found: dict[str, bytes] = {}
    start = 0
    for name, size in sizes.items():
        if type(size) is not int or not 0 <= size <= len(content) - start:
            raise ValueError(f"impossible size {size!r} of {name[:80]!r}")
        found[name] = content[start : start + size]
        start += size
    if start != len(content):
        raise ValueError(f"{len(content) - start} bytes belong to no file")
    return found


STAGING = ".attempt."
"""What all of them begin with; the token follows."""


def apart(token: str, name: str = "") -> str:
    """The key of an attempt's small file, or what they all begin with; without a slash: Orbax takes a folder for an item."""
    return f"{STAGING}{token}." + name.replace("!", "!1").replace("/", "!0")


def name_apart(token: str, key: str) -> str:
    """The name of a small file with such a key."""
    return key.removeprefix(apart(token)).replace("!0", "/").replace("!1", "!")
