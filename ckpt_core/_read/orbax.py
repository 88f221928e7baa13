"""Reads pytrees that Orbax wrote, through TensorStore's drivers; there are no checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ckpt_core._background import run_each
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format import orbax_read
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._layout.regions import Region, whole, within
from ckpt_core._read.wants import Array, Job, Reads, Share, Want, take
from ckpt_core._saved import Checkpoint, OrbaxItem, naming
from ckpt_core._storage import (
    ForeignArray,
    StoreContext,
    Values,
    most_chunk_bytes,
    open_array,
    read_index,
    read_region,
)
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import KEY_WORDS, STORED_DTYPES, LeafSpec


class OrbaxReader:
    """Reads a pytree that Orbax wrote. All of its arrays are opened at once, in 8 threads."""

    def __init__(self, checkpoint: Checkpoint, item: OrbaxItem, context: StoreContext) -> None:
        self._checkpoint = checkpoint
        self._item = item
        self._arrays = _opened_arrays(checkpoint, item, context)

    def close(self) -> None:
        self._arrays.clear()

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        planned: list[tuple[Want, dict[Region, Array]]] = []
        jobs: list[Job] = []
        for want in batch:
            parts: dict[Region, Array] = {}
            jobs += [self._job(want, region, parts) for region in want.regions]
            planned.append((want, parts))
        return planned, jobs

    def _job(self, want: Want, region: Region, parts: dict[Region, Array]) -> Job:
        name, path = self._item.name_of(want.leaf), self._item.paths[want.leaf]

        def job() -> None:
            with naming(self._checkpoint, path):
                parts[region] = read_region(self._arrays[name], region, name)

        return job

    def jobs(self, leaf: int, shares: Sequence[Share]) -> Iterator[Job]:
        """The job that reads what the shares need, and what lies between: a chunk, often a shard, is decoded once for all."""
        name, regions = self._item.name_of(leaf), [region for region, _ in shares]
        whole_of = tuple(
            (min(start for start, _ in bounds), max(stop for _, stop in bounds))
            for bounds in zip(*regions, strict=True)
        )

        def job() -> None:
            with naming(self._checkpoint, self._item.paths[leaf]):
                values = read_region(self._arrays[name], whole_of, name)
            for region, view in shares:
                take(values[(*within(region, whole_of), ...)], [(whole(view.shape), view)])

        yield job


def _opened_arrays(
    checkpoint: Checkpoint, item: OrbaxItem, context: StoreContext
) -> dict[str, ForeignArray]:
    """All arrays of the item, opened, by name."""
    tree = item.tree
    assert tree is not None
    paths = {leaf.name: leaf.path for leaf in tree.leaves if leaf.value_type != "string"}
    if not paths:
        return {}
    ocdbt = _in_database(checkpoint, item) if tree.ocdbt is None else tree.ocdbt
    location = checkpoint.location / item.directory if item.directory else checkpoint.location
    values = _stored_values(checkpoint, item, ocdbt, context)
    limit_bytes = most_chunk_bytes(values.total_bytes)
    context()  # made here, on one thread

    def open_named(name: str) -> ForeignArray:
        with naming(checkpoint, paths[name]):
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


def _in_database(checkpoint: Checkpoint, item: OrbaxItem) -> bool:
    """Whether the arrays are in an OCDBT database, not in plain files."""
    return checkpoint.backend.size(checkpoint.path, item.file("manifest.ocdbt")) is not None


def _stored_values(
    checkpoint: Checkpoint, item: OrbaxItem, ocdbt: bool, context: StoreContext
) -> Values:
    """Sizes of the stored metadata and chunks, checked to be possible: TensorStore allocates whatever the metadata claims.
    Raises CheckpointCorrupt if a file is no regular file, or an index file is impossibly large.
    """
    directory = f"{checkpoint.path}/{item.directory}" if item.directory else checkpoint.path
    files = checkpoint.backend.files(directory)
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
    location = checkpoint.location / item.directory if item.directory else checkpoint.location
    index = read_index(location, context)
    return Values((key, size_bytes) for key, (_, _, size_bytes, _) in index.items())


_SCALAR_KINDS = {"i": "int", "u": "int", "f": "float", "b": "bool", "c": "complex"}


def with_specs(checkpoint: Checkpoint, item: OrbaxItem, context: StoreContext) -> OrbaxItem:
    """The item with the spec of every leaf; opens every array, as only it tells dtype and shape."""
    if item.tree is None or item.specs:
        return item
    arrays = _opened_arrays(checkpoint, item, context)
    impls: dict[str, str] = {}
    directory = f"{checkpoint.path}/{item.directory}" if item.directory else checkpoint.path
    for name in checkpoint.backend.files(directory):
        if name.startswith("array_metadatas/"):
            data = checkpoint.backend.read(checkpoint.path, item.file(name))
            impls |= orbax_read.load_key_impls(data, item.file(name)) if data else {}
    specs = [_orbax_spec(leaf, arrays, impls.get(leaf.name)) for leaf in item.tree.leaves]
    return replace(item, specs=specs)


def _orbax_spec(
    leaf: orbax_read.OrbaxLeaf, arrays: dict[str, ForeignArray], impl: str | None
) -> LeafSpec:
    if leaf.value_type == "string":
        return LeafSpec("str")
    array = arrays[leaf.name]
    if array.dtype not in STORED_DTYPES:
        where = format_path(leaf.path)
        raise CheckpointCorrupt(f"leaf {where}: no such dtype: {array.dtype}", leaf=where)
    if impl in KEY_WORDS:
        return LeafSpec("key", impl, array.shape[:-1])
    if leaf.value_type == "scalar":
        kind = _SCALAR_KINDS.get(np.dtype(array.store.dtype.numpy_dtype).kind, "float")
        return LeafSpec(kind, array.dtype)
    return LeafSpec("numpy" if leaf.value_type == "np.ndarray" else "jax", array.dtype, array.shape)


def read_special(checkpoint: Checkpoint, item: OrbaxItem, context: StoreContext) -> Array:
    """The array of an Orbax item that is one array or random key; its name is ``checkpoint``."""
    ocdbt = _in_database(checkpoint, item)
    location = checkpoint.location / item.directory
    zarr3 = checkpoint.backend.size(checkpoint.path, item.file("checkpoint/zarr.json")) is not None
    values = _stored_values(checkpoint, item, ocdbt, context)
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
