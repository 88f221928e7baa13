"""Files that mark a directory as a checkpoint, and whether they are what their names say."""

from __future__ import annotations

from collections.abc import Callable

SIGNS = (
    "ckpt.json",
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "orbax.checkpoint",
    "commit_success.txt",
)
"""File names that mark a directory as a checkpoint; one of them is enough to read it as one."""

_KEYS = {
    "_CHECKPOINT_METADATA": (b'"item_handlers"', b'"init_timestamp_nsecs"', b'"custom_metadata"'),
    "_METADATA": (b'"tree_metadata"',),
}


def is_meant(read: Callable[[str], bytes | None]) -> bool:
    """Whether the content of its files shows that a directory is a checkpoint, which may be replaced or deleted:
    anybody may have a file called ``ckpt.json``. One sound file is enough, since the checkpoint may be damaged.
    """
    return any(data is not None and _fits(name, data) for name in SIGNS for data in [read(name)])


def _fits(name: str, data: bytes) -> bool:
    match name:
        case "ckpt.json":
            return data.startswith(b'{"crc32c":"') and b'"record":{"format_version":' in data[:64]
        case "orbax.checkpoint":  # a map of msgpack, to whoever wrote it
            return bool(data) and (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF))
        case "commit_success.txt":
            return data.startswith(b"Checkpoint commit was successful")
        case _:
            return data.lstrip().startswith(b"{") and any(key in data for key in _KEYS[name])
