"""Safetensors files: the header, which says where each tensor lies, and the index of a model of several files. Pure.

A file is 8 bytes, the length of the header; the header, JSON; then the tensors, one behind the other without gaps,
each in C order and little-endian. There are no checksums: only the header and the sizes can be checked.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._format.untrusted import LFS_POINTER, MOST_BYTES, file_name, parse_json
from ckpt_core._tree.leaves import dtype_from_name

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
LENGTH_BYTES = 8
"""The length of the header stands in so many bytes, at the beginning of the file."""
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit of the header."""
_METADATA = "__metadata__"
_MOST_DIMENSIONS = 64

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "C64": "complex64",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Name of a dtype in the format -> ours. The packed ones (F4, F6) are missing: jax has no such arrays."""


class Tensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str  # our name of it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    size_bytes: int


class Header(NamedTuple):
    """What the header of a file says."""

    tensors: tuple[Tensor, ...]  # in the order of their bytes
    metadata: dict[str, str]  # the texts in ``__metadata__``
    file_bytes: int  # size of the whole file


def header_length(beginning: bytes, file: str, file_bytes: int | None) -> int:
    """The length of the header of a file of ``file_bytes`` (None: unknown); CheckpointCorrupt if it cannot be."""
    if len(beginning) < LENGTH_BYTES:
        raise _corrupt(file, f"has {len(beginning)} bytes, and its header alone has more")
    if beginning.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{file} is a pointer of git-lfs, not the weights: fetch them with `git lfs pull`"
        )
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if length > MOST_HEADER_BYTES:
        raise _corrupt(
            file,
            f"begins with a header of {length} bytes, and the format allows {MOST_HEADER_BYTES}: it is "
            "damaged, or no safetensors file",
        )
    if file_bytes is not None and LENGTH_BYTES + length > file_bytes:
        raise _corrupt(file, f"is truncated: {file_bytes} bytes, of a header of {length}")
    return length


def parse_header(data: bytes, file: str, file_bytes: int | None = None) -> Header:
    """A file's tensors. CheckpointCorrupt if they overlap, have gaps or do not fit; CheckpointError for unknown dtypes."""
    if not data.startswith(b"{"):
        raise _corrupt(file, "has a header that does not begin with a brace")
    described = _parsed(data, file)
    metadata: Any = described.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise _corrupt(file, f"has {_METADATA} that is not texts by name")
    first = LENGTH_BYTES + len(data)
    tensors = [_tensor(name, entry, first, file) for name, entry in described.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    position = first
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps the one before it" if tensor.offset < position else "lies behind a gap"
            raise _corrupt(file, f"tensor {tensor.name!r} {what}", tensor.name)
        position += tensor.size_bytes
        if file_bytes is not None and position > file_bytes:
            what = f"tensor {tensor.name!r} ends at byte {position} of {file_bytes}: the file is truncated"
            raise _corrupt(file, what, tensor.name)
    if file_bytes is not None and position != file_bytes:
        raise _corrupt(file, f"has {file_bytes - position} bytes that belong to no tensor")
    return Header(tuple(tensors), metadata, position)


def parse_index(data: bytes, file: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The file of each tensor by its name, and the metadata of a model of several files; CheckpointCorrupt if it is damaged."""
    described = _parsed(data, file)
    places, metadata = described.get("weight_map"), described.get("metadata", {})
    if not isinstance(places, dict) or not isinstance(metadata, dict):
        raise _corrupt(file, "has no weight_map that says in which file each tensor is")
    for name, where in places.items():
        try:
            if not (isinstance(where, str) and file_name(where).endswith(SUFFIX)):
                raise ValueError(f"{where!r} is no name of a safetensors file")
        except ValueError as error:
            raise _corrupt(file, f"tensor {name!r}: {error}", name) from error
    return places, metadata


def _parsed(data: bytes, file: str) -> dict[str, Any]:
    """The JSON object in ``data``, in which no name stands twice."""
    found = parse_json(data, file, _once, "strict")
    if not isinstance(found, dict):
        raise _corrupt(file, "is no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r} stands in it twice")
    return found


def _tensor(name: str, entry: Any, first: int, file: str) -> Tensor:
    """One entry of the header, checked by itself; ``first`` is the file's first byte after the header."""
    try:
        name.encode()
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if len(entry) != 3 or not isinstance(dtype, str) or not isinstance(shape, list):
            raise ValueError("its entry is not dtype, shape and data_offsets")
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(
            file, f"tensor {name!r}: not an entry of a tensor ({error})", name
        ) from error
    if len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise _corrupt(file, f"tensor {name!r}: impossible shape {str(shape)[:80]}", name)
    if any(type(n) is not int or not 0 <= n < MOST_BYTES for n in (start, stop)) or stop < start:
        what = f"impossible offsets {str([start, stop])[:80]}"
        raise _corrupt(file, f"tensor {name!r}: {what}", name)
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has the dtype {dtype[:80]!r}, which jax has no arrays of: convert the file "
            "with the library that wrote it"
        )
    size = math.prod(shape) * dtype_from_name(DTYPES[dtype]).itemsize
    if size >= MOST_BYTES:
        raise _corrupt(file, f"tensor {name!r}: impossible shape {str(shape)[:80]}", name)
    if size != stop - start:
        what = f"{stop - start} bytes, and {dtype}{str(shape)[:80]} has {size}"
        raise _corrupt(file, f"tensor {name!r}: {what}", name)
    return Tensor(name, DTYPES[dtype], tuple(shape), first + start, size)


def _corrupt(file: str, what: str, tensor: str | None = None) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{file} {what}", file=file, leaf=tensor)


def dump_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The beginning of a file, up to its first tensor; CheckpointError if the format cannot hold a name or the metadata."""
    names = {ours: theirs for theirs, ours in DTYPES.items()}
    odd = next(
        (pair for pair in metadata.items() if not all(isinstance(x, str) for x in pair)), None
    )
    if odd is not None:
        raise CheckpointError(
            f"metadata= must be texts by name in this format, not {odd[0]!r}: {odd[1]!r}"
        )
    described: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        if name == _METADATA:
            raise CheckpointError(
                f"no tensor can be called {name} in this format: rename it with rules="
            )
        size = math.prod(shape) * dtype_from_name(dtype).itemsize
        offsets = [position, position + size]
        described[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": offsets}
        position += size
    data = json.dumps(described, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # so that the first tensor is aligned
    if len(data) > MOST_HEADER_BYTES:
        raise CheckpointError(
            f"a header of {len(data)} bytes is more than the {MOST_HEADER_BYTES} that the format allows: write "
            "fewer tensors to a file"
        )
    return len(data).to_bytes(LENGTH_BYTES, "little") + data
