"""Items taken apart, planned and snapshot: everything a save does on the caller's thread."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpt_core import _adapters, _processes, _snapshot
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._format import orbax, states
from ckpt_core._format.record import (
    ItemRecord,
    LeafRecord,
)
from ckpt_core._leaves import TEXT_KINDS, LeafSpec, as_stored, describe, to_host_array, to_text
from ckpt_core._options import Options
from ckpt_core._plan import (
    Region,
    Shares,
    chunk_shape,
    region_shape,
    shared_chunk_bytes,
    whole,
    within,
)
from ckpt_core._tree import NONE, FlatTree, flatten, format_path

Piece = tuple[Region, np.ndarray[Any, Any]]


class ArrayToWrite(NamedTuple):
    """One array: its name, what is stored, and the pieces that this process writes."""

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    pieces: list[Piece]
    size_bytes: int


@dataclass(frozen=True)
class PreparedItem:
    """One item, safe from whatever the caller does next."""

    name: str
    record: ItemRecord
    names: tuple[str, ...] = ()
    arrays: tuple[ArrayToWrite, ...] = ()
    texts: dict[str, str] = field(default_factory=dict[str, str])
    all_shardings: tuple[dict[str, Any] | None, ...] = ()
    state_files: dict[str, bytes] = field(default_factory=dict[str, bytes])


def prepare_item(
    name: str, value: Any, processes: _processes.Processes, options: Options, copy: bool
) -> PreparedItem:
    """One item as it is now: flattened, planned, and snapshot."""
    adapter = _adapters.adapter_for(value)
    if adapter is not None and _adapters.is_per_process(adapter):
        state = adapter.get_state(value)
        files = states.dump(state, adapter.to_text(state), processes.index, processes.count)  # pyright: ignore
        record = ItemRecord("process", NONE, process_count=processes.count)
        return PreparedItem(name, record, state_files=files)
    expand_one, writable = _adapters.expander(), False

    def expand(obj: Any) -> Any:
        nonlocal writable
        writable = writable or _adapters.has_writable_arrays(_adapters.adapter_for(obj))
        return expand_one(obj)

    flat = flatten(value, expand=expand)
    return _prepare_tree(name, flat, processes, options, (copy, copy and writable))


def _prepare_tree(
    name: str,
    flat: FlatTree,
    processes: _processes.Processes,
    options: Options,
    copy: tuple[bool, bool],
) -> PreparedItem:
    specs = [describe(leaf, path) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    _refuse_abstract(flat)
    names = tuple(orbax.check_names(flat.paths))
    _snapshot.start_transfers(flat.leaves)
    plan = _TreePlan(processes.index, options.chunk_bytes, *copy)
    for array_name, spec, leaf in zip(names, specs, flat.leaves, strict=True):
        if spec.kind in TEXT_KINDS:
            plan.add_text(array_name, spec, leaf)
        elif spec.kind in ("jax", "key"):
            plan.add_device_array(array_name, spec, leaf)
        else:
            plan.add_host_array(array_name, spec, leaf)
    if plan.texts:
        orbax.strings_file(plan.texts, dict(zip(names, flat.paths, strict=True)))
    record = ItemRecord(
        "tree",
        flat.root,
        tuple(flat.paths),
        tuple(plan.leaves),
        tuple(plan.distinct_shardings),
        options.compression,
        processes.count,
    )
    return PreparedItem(name, record, names, tuple(plan.arrays), plan.texts, tuple(plan.shardings))


def _refuse_abstract(flat: FlatTree) -> None:
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if type(leaf) is jax.ShapeDtypeStruct:
            where = format_path(path)
            raise UnsupportedLeaf(
                f"{where}: cannot save a jax.ShapeDtypeStruct: it has no values",
                leaf=where,
                type_name="jax.ShapeDtypeStruct",
            )


class _TreePlan:
    """What is stored of every leaf of a tree, collected leaf by leaf.

    Trees of thousands of leaves repeat few shapes and shardings: chunk shapes and descriptions of
    shardings are computed once for all that are alike.
    """

    def __init__(self, process: int, chunk_bytes: int, copy_numpy: bool, copy_jax: bool) -> None:
        self.arrays: list[ArrayToWrite] = []
        self.leaves: list[LeafRecord] = []
        self.texts: dict[str, str] = {}
        self.shardings: list[dict[str, Any] | None] = []
        self.distinct_shardings: list[dict[str, Any]] = []
        self._process = process
        self._chunk_bytes = chunk_bytes
        self._copy_numpy = copy_numpy
        # elsewhere the array comes to the host as a copy anyway
        self._to_host = np.array if copy_jax and jax.default_backend() == "cpu" else np.asarray
        self._shares = Shares()
        self._chunks: dict[Any, tuple[int, ...]] = {}
        self._known: dict[Any, tuple[dict[str, Any] | None, int | None]] = {}

    def add_text(self, name: str, spec: LeafSpec, leaf: Any) -> None:
        """A leaf that is stored as text."""
        self.texts[name] = to_text(leaf, spec)
        self.leaves.append(LeafRecord(spec))
        self.shardings.append(None)

    def add_host_array(self, name: str, spec: LeafSpec, leaf: Any) -> None:
        """A numpy array, a number or bytes; written by process 0."""
        host = to_host_array(leaf, spec)
        if self._copy_numpy and spec.kind == "numpy":
            host = host.copy()
        region = whole(spec.stored_shape)
        pieces = [(region, host)] if self._process == 0 else []
        self._add(name, spec, self._chunk(spec, (region,), 1), pieces, None)
        self.shardings.append(None)

    def add_device_array(self, name: str, spec: LeafSpec, leaf: Any) -> None:
        """A jax array, or an array of keys; each distinct shard is written once."""
        data = jax.random.key_data(leaf) if spec.kind == "key" else leaf
        held = _snapshot.held_regions(data, self._process)
        chunk = self._chunk(spec, held.cuts, held.most_holders)
        pieces: list[Piece] = []
        parts = _snapshot.held_data(data, held)
        for (region, holders, _), part in zip(held.mine, parts, strict=True):
            itemsize = spec.numpy_dtype.itemsize
            mine = self._shares.parts(region, holders, chunk, itemsize, self._process)
            if not mine:
                continue
            host = self._to_host(part)
            if spec.stored_dtype != spec.dtype and spec.kind != "key":
                host = as_stored(host, spec)
            for taken in mine:
                pieces.append((taken, host if taken == region else host[within(taken, region)]))
        sharding = leaf.sharding
        known = self._known.get(sharding)
        if known is None:
            known = self._describe_sharding(leaf)
        described, position = known
        self.shardings.append(described)
        committed = getattr(leaf, "committed", True)
        self._add(name, spec, chunk, pieces, position if committed else None)

    def _chunk(self, spec: LeafSpec, cuts: tuple[Region, ...], holders: int) -> tuple[int, ...]:
        """How an array is stored: the same on all processes."""
        key = (id(spec), cuts, holders)  # descriptions that are alike are one object
        chunk = self._chunks.get(key)
        if chunk is None:
            itemsize = spec.numpy_dtype.itemsize
            size_bytes = itemsize * max(math.prod(region_shape(region)) for region in cuts)
            limit = shared_chunk_bytes(size_bytes, holders, self._chunk_bytes)
            chunk = chunk_shape(spec.stored_shape, cuts, itemsize, limit)
            self._chunks[key] = chunk
        return chunk

    def _add(
        self,
        name: str,
        spec: LeafSpec,
        chunk: tuple[int, ...],
        pieces: list[Piece],
        sharding: int | None,
    ) -> None:
        size_bytes = 0
        for _, values in pieces:
            size_bytes += values.nbytes
        self.arrays.append(ArrayToWrite(name, spec, chunk, pieces, size_bytes))
        self.leaves.append(LeafRecord(spec, chunk, sharding))

    def _describe_sharding(self, leaf: Any) -> tuple[dict[str, Any] | None, int | None]:
        described = _snapshot.describe_sharding(leaf)
        position = None
        if described is not None:
            position = len(self.distinct_shardings)
            self.distinct_shardings.append(described)
        self._known[leaf.sharding] = described, position
        return described, position
