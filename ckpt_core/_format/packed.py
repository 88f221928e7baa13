"""Several small files in one zstd frame: a line of JSON with names and sizes, then their contents. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

import zstandard

from ckpt_core._format.json_text import parse_json
from ckpt_core._options import MIB

MOST_HELD_BYTES = 8 * MIB
"""Maximum size of a file that a save packs; a larger one is written by itself."""
MOST_PACKED_BYTES = 128 * MIB
"""Maximum size of all files that are packed into one record, whatever sizes it says they have."""
_AT_ONCE_BYTES = 1 * MIB


def pack(files: Mapping[str, bytes]) -> bytes:
    """The files, by name, as one value."""
    sizes = {name: len(data) for name, data in files.items()}
    line = json.dumps(sizes, separators=(",", ":")).encode()
    return zstandard.ZstdCompressor(write_content_size=False).compress(
        b"\n".join([line, b"".join(files.values())])
    )


def unpack(data: bytes, most_bytes: int) -> dict[str, bytes]:
    """The files in a value of ``pack``.

    Args:
        data: the value.
        most_bytes: maximum size of the names and files together.

    Raises:
        ValueError: ``pack`` did not make it, or it is larger.
    """
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


def decompress(data: bytes, most_bytes: int) -> bytes:
    """What a zstd frame holds, of which the frame itself may say anything.

    Raises:
        ValueError: it is damaged, or has more than ``most_bytes``.
    """
    parts: list[bytes] = []
    size_bytes = 0
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while part := reader.read(_AT_ONCE_BYTES):
                parts.append(part)
                size_bytes += len(part)
                if size_bytes > most_bytes:
                    raise ValueError(f"it has more than {most_bytes} bytes")
    except zstandard.ZstdError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from error
    return b"".join(parts)
