"""Reads pytrees that Orbax wrote, through TensorStore's drivers; there are no checksums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckpt_core._background import run_each
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format import orbax_files
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._layout.regions import Region, whole, within
from ckpt_core._read.wants import Array, Job, Parts, Reads, Share, Want, take
from ckpt_core._saved import Checkpoint, OrbaxItem, naming
from ckpt_core._storage import (
    ForeignArray,
    Values,
    most_chunk_bytes,
    open_array,
    read_index,
    read_region,
)
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import KEY_WORDS, STORED_DTYPES, LeafSpec, leaf_spec


@dataclass(frozen=True)
class OrbaxReader:
    """Reads a pytree that Orbax wrote, from its opened arrays."""

    _checkpoint: Checkpoint
    _item: OrbaxItem

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        planned = [(want, Parts()) for want in batch]
        return planned, [
            functools.partial(self._read, want.leaf, region, parts)
            for want, parts in planned
            for region in want.regions
        ]

    def _read(self, leaf: int, region: Region, parts: Parts) -> None:
        name = self._item.name_of(leaf)
        with naming(self._checkpoint, self._item.paths[leaf]):
            parts[region] = read_region(self._item.arrays[name], region, name)

    def jobs(self, leaf: int, shares: Sequence[Share]) -> Iterator[Job]:
        """The job that reads what the shares need, and what lies between: a chunk, often a shard, is decoded once for all."""
        whole_of = tuple(
            (min(start for start, _ in bounds), max(stop for _, stop in bounds))
            for bounds in zip(*[region for region, _ in shares], strict=True)
        )

        def job() -> None:
            self._read(leaf, whole_of, parts := Parts())
            for region, view in shares:
                part = parts[whole_of][(*within(region, whole_of), ...)]
                take(part, [(whole(view.shape), view)])

        yield job


def _opener(
    checkpoint: Checkpoint, item: OrbaxItem, zarr3: bool, ocdbt: bool | None
) -> Callable[[str], ForeignArray]:
    """The function that opens an array of the item by its name; ``ocdbt`` is None if no metadata say what stores it."""
    location = checkpoint.location / item.directory
    if ocdbt is None:
        ocdbt = checkpoint.backend.size(checkpoint.path, item.file("manifest.ocdbt")) is not None
    values = _stored_values(checkpoint, item, ocdbt)
    checkpoint.context()  # made here, on one thread
    return functools.partial(
        open_array,
        location,
        context=checkpoint.context,
        zarr3=zarr3,
        ocdbt=ocdbt,
        limit_bytes=most_chunk_bytes(values.total_bytes),
        values=values,
    )


def _stored_values(checkpoint: Checkpoint, item: OrbaxItem, ocdbt: bool) -> Values:
    """Sizes of the stored metadata and chunks, checked to be possible: TensorStore allocates whatever the metadata claims."""
    location = checkpoint.location / item.directory
    files = checkpoint.backend.files(location.path)
    for name, size in files.items():
        odd = "" if size >= 0 else "is no regular file, or a link that leads nowhere"
        if name.rpartition("/")[2].startswith("manifest.") and size > most_bytes("manifest.ocdbt"):
            odd = f"has {size} bytes, more than an index can have"
        if odd:
            raise CheckpointCorrupt(f"{location.path}: {name} {odd}", file=item.file(name))
    if not ocdbt:
        return Values(files.items())
    index = read_index(location, checkpoint.context)
    return Values((key, size_bytes) for key, (_, _, size_bytes, _) in index.items())


_SCALAR_KINDS = {"i": "int", "u": "int", "f": "float", "b": "bool", "c": "complex"}


def with_specs(checkpoint: Checkpoint, item: OrbaxItem) -> OrbaxItem:
    """The item with its arrays, opened in 8 threads, and the spec of every leaf: only an opened array tells dtype and shape."""
    tree = item.tree
    if tree is None or item.specs:
        return item
    arrays, impls = dict[str, ForeignArray](), dict[str, str]()
    if paths := {leaf.name: leaf.path for leaf in tree.leaves if leaf.value_type != "string"}:
        opened = _opener(checkpoint, item, tree.zarr3, tree.ocdbt)

        def open_named(name: str) -> ForeignArray:
            with naming(checkpoint, paths[name]):
                return opened(name)

        arrays |= zip(paths, run_each(open_named, list(paths), 8, "ckpt-open"), strict=True)
    for name in checkpoint.backend.files((checkpoint.location / item.directory).path):
        if name.startswith("array_metadatas/"):
            data = checkpoint.backend.read(checkpoint.path, item.file(name))
            impls |= orbax_files.load_key_impls(data, item.file(name)) if data else {}
    specs = [_orbax_spec(leaf, arrays, impls.get(leaf.name)) for leaf in tree.leaves]
    return replace(item, specs=specs, arrays=arrays)


def _orbax_spec(
    leaf: orbax_files.OrbaxLeaf, arrays: dict[str, ForeignArray], impl: str | None
) -> LeafSpec:
    if leaf.value_type == "string":
        return leaf_spec("str")
    array = arrays[leaf.name]
    if array.dtype not in STORED_DTYPES:
        where = format_path(leaf.path)
        raise CheckpointCorrupt(f"leaf {where}: no such dtype: {array.dtype}", leaf=where)
    if impl in KEY_WORDS:
        return leaf_spec("key", impl, array.shape[:-1])
    if leaf.value_type == "scalar":
        kind = _SCALAR_KINDS.get(np.dtype(array.store.dtype.numpy_dtype).kind, "float")
        return leaf_spec(kind, array.dtype)
    kind = "numpy" if leaf.value_type == "np.ndarray" else "jax"
    return leaf_spec(kind, array.dtype, array.shape)


def read_special(checkpoint: Checkpoint, item: OrbaxItem) -> Array:
    """The array of an Orbax item that is one array or random key; its name is ``checkpoint``."""
    zarr3 = checkpoint.backend.size(checkpoint.path, item.file("checkpoint/zarr.json")) is not None
    array = _opener(checkpoint, item, zarr3, None)("checkpoint")
    return read_region(array, whole(array.shape), "checkpoint")
