"""Arrays of other layouts, read through TensorStore, and what keeps it from running out of memory: that ends the process."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._directory import size_of
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import parse_json
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._layout.chunks import chunk_count
from ckpt_core._layout.regions import Region, region_slices
from ckpt_core._options import KIB, MIB
from ckpt_core._storage.files import limit
from ckpt_core._storage.location import Location, StoreContext, checked_answer, ts, unreadable

_MAX_FOREIGN_BYTES = 2**46
_MOST_COMPRESSED = 2**16  # maximum compression ratio: zstd needs 4 bytes for 128 KiB of zeros
_SMALL_BYTES = 256 * MIB
_MOST_INNER_CHUNKS = 2**24
BLOSC_HEADER_BYTES = 16
_METADATA_FILES = ("zarr.json", ".zarray")
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a process in a container finds its own limit, of control groups of version 2 and 1."""


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """An array opened through TensorStore."""

    store: Any  # TensorStore's handle
    dtype: str
    shape: tuple[int, ...]
    stored: int  # the most values it has, its metadata among them


def open_array(
    item: Location,
    name: str,
    context: StoreContext,
    *,
    zarr3: bool,
    ocdbt: bool,
    limit_bytes: int,
    values: Values,
) -> ForeignArray:
    """Opens an array of any layout that Orbax writes: zarr v3 or v2, in an OCDBT database or in directories.
    CheckpointCorrupt if it is missing or its metadata is damaged or impossible, such as chunks above ``limit_bytes``;
    MemoryError if a chunk would take more than half of this process's memory.
    """
    prefix = f"{name}/" if name else ""
    metadata = "zarr.json" if zarr3 else ".zarray"
    first = "manifest.ocdbt" if ocdbt else prefix + metadata
    refuse_file(item, first, most_bytes(first))
    base = item.spec()
    kvstore = {**base, "path": base["path"] + prefix}
    if ocdbt:
        kvstore = {"driver": "ocdbt", "base": base, "path": prefix}
    _check_nesting(kvstore, metadata, name, context)
    spec = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kvstore,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": False,
    }
    try:
        store: Any = ts.open(spec, open=True, context=context()).result()
    except (ValueError, NotImplementedError) as error:
        raise unreadable(error, f"array {name!r}: cannot be opened", leaf=name) from error
    shape = tuple(store.shape)
    # A malicious shape or chunk shape would abort the process when TensorStore allocates memory.
    if math.prod(shape) * store.dtype.numpy_dtype.itemsize > _MAX_FOREIGN_BYTES:
        raise _corrupt(name, f"impossible shape {shape}")
    _refuse_chunks(store, name, limit_bytes, values)
    return ForeignArray(store, store.dtype.name, shape, len(values.of(name)))


def _check_nesting(kvstore: dict[str, Any], file: str, name: str, context: StoreContext) -> None:
    """Parses an array's metadata with our parser: TensorStore's crashes on deeply nested JSON."""
    try:
        found: Any = ts.KvStore.open(kvstore, context=context()).result().read(file).result()
    except (ValueError, NotImplementedError) as error:
        raise unreadable(error, f"array {name!r}: cannot be opened", leaf=name) from error
    if found.state != "value":
        checked_answer(found, f"array {name!r}: cannot be opened")
        raise _corrupt(name, f"its metadata {file} is missing")
    parse_json(bytes(found.value), f"{name}/{file}")


def read_region(array: ForeignArray, region: Region, name: str) -> np.ndarray[Any, Any]:
    """Reads the values of a region; blocks. CheckpointCorrupt if a chunk is missing or cannot be decoded."""
    chunk = tuple(array.store.chunk_layout.write_chunk.shape or ())
    if chunk_count(region, chunk) > array.stored:
        raise _corrupt(name, "chunks are missing")
    part = array.store[region_slices(region)]
    # A slice of a TensorStore keeps its origin; shift it to zero, to match ``out``.
    part = part.translate_to[(0,) * part.rank] if part.rank else part
    try:
        out = np.empty(part.shape, array.store.dtype.numpy_dtype)
        if out.size:
            ts.array(out).write(part).result()
    except (MemoryError, RecursionError):
        raise  # of this machine, not of the data
    except Exception as error:
        raise unreadable(error, f"array {name!r}", leaf=name) from error
    return out


def _corrupt(name: str, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"array {name!r}: {what}", leaf=name)


def refuse_file(location: Location, name: str, most: int) -> None:
    """CheckpointCorrupt if a local file is larger than ``most`` or not a regular one; objects in stores are not sparse."""
    if not location.local:
        return
    size_bytes = -1 if "\0" in name else size_of((location / name).path)
    if size_bytes is None:
        return  # opening the file will report that
    if size_bytes < 0:
        raise CheckpointCorrupt(f"{location.path}: {name!r} is no regular file", file=name)
    if size_bytes > most:
        what = f"has {size_bytes} bytes, and can have {most} at most: it is damaged, and not read"
        raise CheckpointCorrupt(f"{location.path}: file {name} {what}", file=name)


def memory_bytes() -> int:
    """Maximum memory of this process in bytes; ``sys.maxsize`` where the system tells none (Windows)."""
    known = [sys.maxsize]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in _CONTAINER_LIMITS:
        # ``max`` is no number: there is no limit
        with contextlib.suppress(ValueError, OSError), open(file, encoding="ascii") as opened:
            known.append(int(opened.read()))
    return min(*known, limit("RLIMIT_AS") or sys.maxsize)


def most_chunk_bytes(stored_bytes: int) -> int:
    """Maximum decoded size of a chunk, given the stored bytes."""
    return max(_SMALL_BYTES, _MOST_COMPRESSED * stored_bytes)


def refuse_without_memory(name: str, size_bytes: int) -> None:
    """Raises MemoryError for what TensorStore would end the process: more than half of all memory at once."""
    if size_bytes > (most := memory_bytes() // 2):
        raise MemoryError(
            f"array {name!r}: a chunk of {size_bytes} bytes must be decoded at once, and this process has memory for "
            f"one of {most}: load it on a machine with more"
        )


def most_stored_bytes(chunk_bytes: int) -> int:
    """Maximum stored size of a chunk: incompressible data grows a little."""
    return chunk_bytes + chunk_bytes // 8 + 64 * KIB


class Values:
    """Sizes of the stored values of each array, by keys like ``w/c/0/0``; CheckpointCorrupt for too large metadata."""

    def __init__(self, sizes_bytes: Iterable[tuple[str, int]]) -> None:
        self._of: dict[str, dict[str, int]] = {}
        self.total_bytes = 0
        for key, size in sizes_bytes:
            name, _, last = key.rpartition("/")
            if last in _METADATA_FILES and size > most_bytes(last):
                what = f"has {size} bytes, and can have {most_bytes(last)} at most"
                raise CheckpointCorrupt(f"{key} {what}", file=key, leaf=name)
            for array in _arrays_of(key):
                self._of.setdefault(array, {})[key] = size
            self.total_bytes += size

    def of(self, name: str) -> Mapping[str, int]:
        """Size in bytes of each value of an array, by its key."""
        return self._of.get(name, {})


def _arrays_of(key: str) -> set[str]:
    """The possible array names of a value's key: of ``w``, keys are ``w/c/0/1`` and ``w/c`` in zarr 3, ``w/0.1`` and ``w/0/1`` in 2."""
    parts = key.split("/")
    last = len(parts) - 1
    while last > 0 and parts[last].replace(".", "").isdigit():
        last -= 1
    named = "/".join(parts[: last + 1])
    found = {named, key.rpartition("/")[0]}
    if parts[last] == "c":
        found.add("/".join(parts[:last]))
    return found


def _refuse_chunks(store: Any, name: str, limit_bytes: int, values: Values) -> None:
    """Raises CheckpointCorrupt if an array's chunks are impossible, and MemoryError if there is no memory for one."""
    layout, itemsize = store.chunk_layout, store.dtype.numpy_dtype.itemsize
    inner = math.prod(layout.read_chunk.shape or ())
    outer = math.prod(layout.write_chunk.shape or ())
    inner_chunks = outer // max(1, inner)
    if outer * itemsize > limit_bytes or inner_chunks > _MOST_INNER_CHUNKS:
        chunk = tuple(layout.write_chunk.shape)
        raise _corrupt(name, f"impossible shape {tuple(store.shape)} in chunks of {chunk}")
    refuse_without_memory(name, outer * itemsize)
    most = most_stored_bytes(outer * itemsize) + 16 * inner_chunks
    largest = max(values.of(name).values(), default=0)
    if largest > max(most, most_bytes("zarr.json")):
        raise _corrupt(name, f"a chunk of {largest} bytes exceeds the maximum of {most}")
    if is_blosc(store):
        for key in values.of(name):
            if key.rpartition("/")[2] not in _METADATA_FILES:
                inside = key[len(name) + 1 :] if name else key
                head = store.kvstore.read(inside, byte_range=slice(0, BLOSC_HEADER_BYTES))
                # if the value is shorter, or cannot be read, so says who reads it
                if head.exception() is None and head.result().state == "value":
                    refuse_blosc(head.result().value, outer * itemsize, name)


def is_blosc(store: Any) -> bool:
    """Whether an array is compressed by blosc, which allocates what a chunk's header claims."""
    codec: Mapping[str, Any] = store.codec.to_json() if store.codec is not None else {}
    compressor = codec.get("compressor") or {}
    names = [compressor.get("id")] + [entry.get("name") for entry in codec.get("codecs", ())]
    return "blosc" in names


def refuse_blosc(header: bytes | memoryview, chunk_bytes: int, name: str) -> None:
    """Raises CheckpointCorrupt if a blosc header claims another size than that of a chunk."""
    claimed = int.from_bytes(header[4:8], "little")
    if len(header) == BLOSC_HEADER_BYTES and claimed != chunk_bytes:
        raise _corrupt(name, f"a chunk claims to be {claimed} bytes, but must be {chunk_bytes}")
