"""Arrays out of an OCDBT database: by its index where files are local, by TensorStore otherwise."""

from __future__ import annotations

import errno
import math
import os
import threading
import urllib.parse
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.record import parse_json
from ckpt_core._plan import Region, region_slices
from ckpt_core._storage.database import Location, database_spec, system_error

_MAX_FOREIGN_BYTES = 2**46


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the value of a key lies.

    Attributes:
        file: path relative to the item; empty where the value stands in the index itself.
        offset: first byte.
        size_bytes: length.
        value: the value itself, for values in the index.
    """

    file: str
    offset: int
    size_bytes: int
    value: bytes = b""


def read_index(item: Location, context: Any) -> dict[str, Extent]:
    """Every key of the database at ``item`` with its place.

    Raises:
        CheckpointCorrupt: the index is missing or damaged.
    """
    try:
        base: Any = ts.KvStore.open(item.spec(), context=context).result()
        manifest: Any = ts.ocdbt.dump(base).result()
        newest = max(manifest["versions"], key=lambda version: version["generation_number"])
        found: dict[str, Extent] = {}
        if "location" in newest["root"]:
            _collect(base, newest["root"]["location"], b"", found, set())
        return found
    except (
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        RecursionError,
        NotImplementedError,
    ) as error:
        file = "manifest.ocdbt"
        raise CheckpointCorrupt(
            f"{item.path}: the index of the array database cannot be read: {error}", file=file
        ) from error


def _collect(
    base: Any, where: str, prefix: bytes, found: dict[str, Extent], visited: set[str]
) -> None:
    if where in visited:
        raise ValueError("the index refers to itself")
    visited.add(where)
    _extent(where)
    for entry in ts.ocdbt.dump(base, where).result()["entries"]:
        key = prefix + entry["key"]
        if "indirect_value" in entry:
            found[key.decode(errors="surrogateescape")] = _extent(entry["indirect_value"])
        elif "inline_value" in entry:
            value = bytes(entry["inline_value"])
            found[key.decode(errors="surrogateescape")] = Extent("", 0, len(value), value)
        else:
            below = prefix + entry["subtree_common_prefix"]
            _collect(base, entry["location"], below, found, visited)


def _extent(reference: str) -> Extent:
    """``kind:base:file:offset:length``, as OCDBT prints an indirect reference."""
    _, base, file, offset, length = reference.split(":")
    name = base + file if "%" not in reference else urllib.parse.unquote(base + file)
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the index refers to {name!r}, outside the item")
    return Extent(name, int(offset), int(length))


def read_value(item: Location, key: str, offset: int, size_bytes: int, context: Any) -> bytes:
    """A range of the value of a key, for stores whose files cannot be opened directly."""
    try:
        store: Any = ts.KvStore.open(database_spec(item), context=context).result()
        found: Any = store.read(key, byte_range=slice(offset, offset + size_bytes)).result()
    except ValueError as error:
        raise CheckpointCorrupt(f"{key}: cannot be read: {error}", leaf=key) from error
    return bytes(found.value) if found.state == "value" else b""


@dataclass(frozen=True, slots=True)
class ForeignArray:
    """An array opened through its driver.

    Attributes:
        store: TensorStore's handle.
        dtype: name of its dtype.
        shape: of the array.
    """

    store: Any
    dtype: str
    shape: tuple[int, ...]


def open_array(
    item: Location,
    name: str,
    context: Any,
    *,
    zarr3: bool = True,
    ocdbt: bool = True,
    limit_bytes: int = _MAX_FOREIGN_BYTES,
) -> ForeignArray:
    """An array of any layout that Orbax writes.

    Args:
        item: location of the item.
        name: of the array.
        context: of the load.
        zarr3: whether the layout is zarr v3, or v2.
        ocdbt: whether arrays lie in a database, or in directories of their own.
        limit_bytes: no chunk may claim to be larger.

    Raises:
        CheckpointCorrupt: it is not there, or its metadata is damaged or impossible.
    """
    prefix = f"{name}/" if name else ""
    kvstore = (
        {**database_spec(item), "path": prefix}
        if ocdbt
        else {**item.spec(), "path": item.spec()["path"] + prefix}
    )
    _check_nesting(kvstore, "zarr.json" if zarr3 else ".zarray", name, context)
    try:
        store: Any = ts.open(
            {
                "driver": "zarr3" if zarr3 else "zarr",
                "kvstore": kvstore,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
                "fill_missing_data_reads": False,
            },
            open=True,
            context=context,
        ).result()
    except (ValueError, NotImplementedError) as error:
        raise CheckpointCorrupt(f"array {name!r}: cannot be opened: {error}", leaf=name) from error
    shape = tuple(store.shape)
    chunk = tuple(store.chunk_layout.read_chunk.shape or ())
    # a hostile shape or chunk would abort the process inside the allocation
    itemsize = store.dtype.numpy_dtype.itemsize
    if (
        math.prod(shape) * itemsize > _MAX_FOREIGN_BYTES
        or math.prod(chunk) * itemsize > limit_bytes
    ):
        raise CheckpointCorrupt(
            f"array {name!r}: impossible shape {shape} in chunks of {chunk}", leaf=name
        )
    return ForeignArray(store, store.dtype.name, shape)


def _check_nesting(kvstore: dict[str, Any], file: str, name: str, context: Any) -> None:
    """Parses an array's metadata first: TensorStore's parser dies of JSON nested very deep."""
    try:
        found: Any = ts.KvStore.open(kvstore, context=context).result().read(file).result()
    except (ValueError, NotImplementedError) as error:
        raise CheckpointCorrupt(f"array {name!r}: cannot be opened: {error}", leaf=name) from error
    if found.state != "value":
        raise CheckpointCorrupt(f"array {name!r}: its metadata {file} is missing", leaf=name)
    parse_json(bytes(found.value), f"{name}/{file}")


def read_into(array: ForeignArray, region: Region, name: str) -> np.ndarray[Any, Any]:
    """The values of a region.

    Raises:
        CheckpointCorrupt: a chunk is missing or cannot be decoded.
    """
    part = array.store[region_slices(region)]
    # TensorStore's domain keeps the region's own origin; the copy starts at zero
    part = part.translate_to[(0,) * part.rank] if part.rank else part
    try:
        out = np.empty(part.shape, array.store.dtype.numpy_dtype)
        if out.size:
            ts.array(out).write(part).result()
    except Exception as error:
        translated = system_error(error, f"array {name!r}")
        raise CheckpointCorrupt(f"{translated}", leaf=name) from error
    return out


class DataFiles:
    """The data files of an item, each opened once."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, file: str, offset: int, target: np.ndarray[Any, Any]) -> int:
        """Bytes read into ``target``; fewer where the file ends."""
        descriptor = self._descriptor(file)
        view: Any = memoryview(target.data)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                try:
                    self._open[file] = os.open(
                        (self._location / file).path,
                        os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                    )
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                        raise
                    raise CheckpointCorrupt(
                        f"{self._location.path}: file {file} is missing, or a link", file=file
                    ) from error
            return self._open[file]

    def close(self) -> None:
        """Closes them all."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
