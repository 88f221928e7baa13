"""Trees that Orbax wrote: read through TensorStore's drivers, without checksums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format import orbax_trees
from ckpt_core._format.limits import most_bytes
from ckpt_core._leaves import STORED_DTYPES, LeafSpec, is_known_impl
from ckpt_core._load.opened import Opened, SavedItem, naming
from ckpt_core._load.wants import Array, Reads, Want
from ckpt_core._plan import Region, whole
from ckpt_core._storage import (
    ForeignArray,
    Values,
    most_chunk_bytes,
    open_array,
    read_index,
    read_region,
)
from ckpt_core._threads import run_each
from ckpt_core._tree import format_path


class OrbaxReader:
    """Reads a tree that Orbax wrote, through TensorStore's drivers; there are no checksums."""

    def __init__(self, opened: Opened, item: SavedItem, context: Any) -> None:
        self._opened = opened
        self._item = item
        self._arrays = _opened_arrays(opened, item, context)

    def __enter__(self) -> OrbaxReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays.clear()

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        planned: Reads = []
        for want in batch:
            parts: dict[Region, Array] = {}
            jobs: list[Callable[[], None]] = [
                self._job(want.leaf, region, parts) for region in want.regions
            ]
            planned.append((want, parts, jobs))
        return planned

    def _job(self, leaf: int, region: Region, parts: dict[Region, Array]) -> Callable[[], None]:
        name = self._item.name_of(leaf)

        def job() -> None:
            with naming(self._opened, self._item.paths[leaf]):
                parts[region] = read_region(self._arrays[name], region, name)

        return job


def _opened_arrays(opened: Opened, item: SavedItem, context: Any) -> dict[str, ForeignArray]:
    tree = item.orbax
    assert tree is not None
    paths = {leaf.name: leaf.path for leaf in tree.leaves if leaf.value_type != "string"}
    if not paths:
        return {}
    ocdbt = _in_database(opened, item) if tree.ocdbt is None else tree.ocdbt
    location = opened.location / item.directory if item.directory else opened.location
    values = _stored_values(opened, item, ocdbt, context)
    limit_bytes = most_chunk_bytes(values.total_bytes)

    def open_named(name: str) -> ForeignArray:
        with naming(opened, paths[name]):
            return open_array(
                location,
                name,
                context,
                zarr3=tree.zarr3,
                ocdbt=ocdbt,
                limit_bytes=limit_bytes,
                values=values,
            )

    arrays = run_each(open_named, list(paths), 8, "ckpt-open")
    return dict(zip(paths, arrays, strict=True))


def _in_database(opened: Opened, item: SavedItem) -> bool:
    return opened.form.size(opened.path, item.file("manifest.ocdbt")) is not None


def _stored_values(opened: Opened, item: SavedItem, ocdbt: bool, context: Any) -> Values:
    """The sizes of what is stored, found possible: TensorStore takes what it is told for true."""
    directory = f"{opened.path}/{item.directory}" if item.directory else opened.path
    files = opened.form.files(directory)
    for name, size in files.items():
        if size < 0:
            raise CheckpointCorrupt(
                f"{directory}: {name} is no regular file, or a link that leads nowhere",
                file=item.file(name),
            )
        if name.rpartition("/")[2].startswith("manifest.") and size > most_bytes("manifest.ocdbt"):
            raise CheckpointCorrupt(
                f"{directory}: {name} has {size} bytes, more than an index can have",
                file=item.file(name),
            )
    if not ocdbt:
        return Values(files.items())
    location = opened.location / item.directory if item.directory else opened.location
    index = read_index(location, context)
    return Values((key, extent.size_bytes) for key, extent in index.items())


_SCALAR_KINDS = {"i": "int", "u": "int", "f": "float", "b": "bool", "c": "complex"}


def with_specs(opened: Opened, item: SavedItem, context: Any) -> SavedItem:
    """The item with what its leaves are; for Orbax's trees that takes opening every array."""
    if item.orbax is None or item.specs:
        return item
    arrays = _opened_arrays(opened, item, context)
    impls: dict[str, str] = {}
    for file in _array_metadata_files(opened, item):
        data = opened.form.read(opened.path, file)
        impls |= orbax_trees.load_key_impls(data, file) if data else {}
    specs = [_orbax_spec(leaf, arrays, impls.get(leaf.name)) for leaf in item.orbax.leaves]
    return replace(item, specs=specs)


def _array_metadata_files(opened: Opened, item: SavedItem) -> list[str]:
    directory = f"{opened.path}/{item.directory}" if item.directory else opened.path
    return [
        item.file(name)
        for name in opened.form.files(directory)
        if name.startswith("array_metadatas/")
    ]


def _orbax_spec(
    leaf: orbax_trees.OrbaxLeaf, arrays: dict[str, ForeignArray], impl: str | None
) -> LeafSpec:
    if leaf.value_type == "string":
        return LeafSpec("str")
    array = arrays[leaf.name]
    if array.dtype not in STORED_DTYPES:
        where = format_path(leaf.path)
        raise CheckpointCorrupt(f"leaf {where}: no such dtype: {array.dtype}", leaf=where)
    if impl is not None and is_known_impl(impl):
        return LeafSpec("key", impl, array.shape[:-1])
    if leaf.value_type == "scalar":
        kind = _SCALAR_KINDS.get(np.dtype(array.store.dtype.numpy_dtype).kind, "float")
        return LeafSpec(kind, array.dtype)
    return LeafSpec("numpy" if leaf.value_type == "np.ndarray" else "jax", array.dtype, array.shape)


def read_special(opened: Opened, item: SavedItem, context: Any) -> Array:
    """The one array of Orbax's Array and random-key items, which is called ``checkpoint``."""
    ocdbt = _in_database(opened, item)
    location = opened.location / item.directory
    zarr3 = opened.form.size(opened.path, item.file("checkpoint/zarr.json")) is not None
    values = _stored_values(opened, item, ocdbt, context)
    array = open_array(
        location,
        "checkpoint",
        context,
        zarr3=zarr3,
        ocdbt=ocdbt,
        limit_bytes=most_chunk_bytes(values.total_bytes),
        values=values,
    )
    return read_region(array, whole(array.shape), "checkpoint")
