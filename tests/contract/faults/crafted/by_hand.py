"""What a crafted checkpoint is made of: nodes of an OCDBT index, frames of zstd, metadata of zarr and of Orbax."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c

GIB = 2**30
SECRET = b"SECRET--" * 125
DEEP = "maximum recursion depth"
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


@dataclass(frozen=True)
class Case:
    """A hostile checkpoint, made of a copy of the good one ("", "-zstd" or "-blosc" of them) or of an empty directory."""

    name: str
    make: Callable[[Path], None]
    may_load: bool = False  # what is odd is harmless, or not read
    found: bool = False  # by `verify`, whatever a load needs
    base: str = ""
    says: str | None = None  # the bound that it is made for; None where nothing refuses it


def zarr3_json(**changes: Any) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3, 4],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 4]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [LITTLE],
        "attributes": {},
        **changes,
    }


def zarr2_json(**changes: Any) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": [3, 4],
        "chunks": [3, 4],
        "dtype": "<f4",
        "order": "C",
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "dimension_separator": ".",
        **changes,
    }


def grid(*shape: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


def as_json(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def tree_metadata(
    names: list[list[str]], *, zarr3: bool, ocdbt: bool, **more: Any
) -> dict[str, Any]:
    entries = {
        str(tuple(keys)): {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for keys in names
    }
    return {"tree_metadata": entries, "use_ocdbt": ocdbt, "use_zarr3": zarr3, **more}


ONE_ARRAY = as_json(tree_metadata([["a"]], zarr3=True, ocdbt=True))


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def zstd_zeros(blocks: int) -> bytes:
    """A zstd frame, written by hand: `blocks` times 128 KiB of zeros in four bytes each."""
    header = b"\x28\xb5\x2f\xfd" + b"\x00" + b"\x58"  # magic, no size given, 2 MiB window
    run, last, length = 1 << 1, 1, 2**17 << 3
    block = (run | length).to_bytes(3, "little") + b"\0"
    end = (run | last | length).to_bytes(3, "little") + b"\0"
    return header + block * (blocks - 1) + end


def node(payload: bytes) -> bytes:
    """A node of the index of an OCDBT database, uncompressed."""
    head = struct.pack(">I", 0x0CDB20DE) + struct.pack("<Q", len(payload) + 18) + b"\0\0"
    return head + payload + struct.pack("<I", crc32c.crc32c(head + payload))


def missing() -> bytes:
    return b"\xff" * 9 + b"\1"  # an offset or length that is not given


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])
