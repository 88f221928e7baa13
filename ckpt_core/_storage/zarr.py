"""The ``zarr.json`` and the chunk keys of one array (zarr-specs, core v3)."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_core._layout.chunks import chunk_count, chunk_key
from ckpt_core._layout.regions import whole
from ckpt_core._layout.writers import INLINE_BYTES
from ckpt_core._options import codec_parts

_ALIGNMENT = 64


def zarr_metadata(
    dtype: str, shape: Sequence[int], chunk: Sequence[int], codec: str | None
) -> dict[str, Any]:
    """``zarr.json`` of an array (zarr-specs, core v3)."""
    itemsize = np.dtype(_numpy_name(dtype)).itemsize
    codecs: list[dict[str, Any]] = [{"name": "bytes"}]
    if itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if codec is not None:
        codecs.append(_compressor(codec, itemsize))
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "fill_value": _fill_value(dtype),
    }


def _compressor(codec: str, itemsize: int) -> dict[str, Any]:
    name, compressor, level = codec_parts(codec)
    if name == "zstd":
        return {"name": "zstd", "configuration": {"level": level}}
    configuration = {
        "cname": compressor,
        "clevel": level,
        # Byte shuffle groups bytes of equal significance; single bytes (masks) need bit shuffle.
        "shuffle": "shuffle" if itemsize > 1 else "bitshuffle",
        "typesize": itemsize,
        "blocksize": 0,
    }
    return {"name": "blosc", "configuration": configuration}


def _numpy_name(dtype: str) -> Any:
    import ml_dtypes

    return getattr(ml_dtypes, dtype, dtype)


def _fill_value(dtype: str) -> Any:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if dtype.startswith(("int", "uint")) else 0.0


@functools.lru_cache(4096)
def layout_of(
    dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...], codec: str | None
) -> tuple[bytes, str | None]:
    """``zarr.json`` of an array, and the key of its chunk if it has only one, else None."""
    metadata = json.dumps(zarr_metadata(dtype, shape, chunk, codec)).encode()
    # Values are stored in the order of their keys, an array's chunks before its zarr.json. Pad that
    # with blanks, so that the next array begins at a multiple of 64 bytes and can be mapped.
    size = math.prod(chunk) * np.dtype(_numpy_name(dtype)).itemsize
    count = chunk_count(whole(shape), chunk) if size > INLINE_BYTES else 0
    metadata += b" " * (-(len(metadata) + count * size) % _ALIGNMENT)
    return metadata, chunk_key((0,) * len(shape)) if chunk == shape else None
