"""Items taken apart, planned and snapshot: everything a save does on the caller's thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
from ckpt_core._plan import Region, chunk_shape, whole
from ckpt_core._tree import FlatTree, flatten, format_path

Piece = tuple[Region, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class ArrayToWrite:
    """One array: its name, what is stored, and the pieces that this process writes."""

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    pieces: list[Piece]

    @property
    def size_bytes(self) -> int:
        """Bytes of the pieces."""
        return sum(values.nbytes for _, values in self.pieces)


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
        record = ItemRecord("process", process_count=processes.count)
        return PreparedItem(name, record, state_files=files)
    flat = flatten(value, expand=_adapters.expand)
    return _prepare_tree(name, flat, processes, options, copy)


def _prepare_tree(
    name: str, flat: FlatTree, processes: _processes.Processes, options: Options, copy: bool
) -> PreparedItem:
    specs = _describe_all(flat)
    names = tuple(orbax.check_names(flat.paths))
    _snapshot.start_transfers(
        [leaf for leaf in flat.leaves if isinstance(leaf, jax.Array) and not _is_key(leaf)]
    )
    table = _ShardingTable()
    plan = _ChunkPlan(options.chunk_bytes)
    arrays: list[ArrayToWrite] = []
    leaves: list[LeafRecord] = []
    texts: dict[str, str] = {}
    for array_name, spec, leaf in zip(names, specs, flat.leaves, strict=True):
        if spec.kind in TEXT_KINDS:
            texts[array_name] = to_text(leaf, spec)
            leaves.append(LeafRecord(spec))
            table.add(None)
        elif spec.kind in ("jax", "key"):
            data = jax.random.key_data(leaf) if spec.kind == "key" else leaf
            regions, mine = _snapshot.owned_regions(data, processes.index)
            chunk = plan.chunk(spec, regions)
            pieces = [(region, as_stored(_snapshot.to_host(part), spec)) for region, part in mine]
            arrays.append(ArrayToWrite(array_name, spec, chunk, pieces))
            leaves.append(LeafRecord(spec, chunk, table.add(leaf)))
        else:
            host = to_host_array(leaf, spec)
            if copy and spec.kind == "numpy":
                host = host.copy()
            chunk = plan.chunk(spec, [whole(spec.stored_shape)])
            pieces = [(whole(spec.stored_shape), host)] if processes.index == 0 else []
            arrays.append(ArrayToWrite(array_name, spec, chunk, pieces))
            leaves.append(LeafRecord(spec, chunk))
            table.add(None)
    if texts:
        orbax.strings_file(texts, dict(zip(names, flat.paths, strict=True)))
    record = ItemRecord(
        "tree",
        flat.root,
        tuple(flat.paths),
        tuple(leaves),
        tuple(table.distinct),
        options.compression,
        processes.count,
    )
    return PreparedItem(name, record, names, tuple(arrays), texts, tuple(table.every))


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe_all(flat: FlatTree) -> list[LeafSpec]:
    specs: list[LeafSpec] = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            where = format_path(path)
            raise UnsupportedLeaf(
                f"{where}: cannot save a jax.ShapeDtypeStruct: it has no values",
                leaf=where,
                type_name="jax.ShapeDtypeStruct",
            )
        specs.append(describe(leaf, path))
    return specs


class _ShardingTable:
    """The shardings of an item: each distinct one once, for our record, and one per leaf."""

    def __init__(self) -> None:
        self.distinct: list[dict[str, Any]] = []
        self.every: list[dict[str, Any] | None] = []
        self._positions: dict[Any, int | None] = {}
        self._described: dict[Any, dict[str, Any] | None] = {}

    def add(self, leaf: Any) -> int | None:
        """The position of a leaf's sharding; None for host leaves and uncommitted arrays."""
        if leaf is None:
            self.every.append(None)
            return None
        sharding = leaf.sharding
        if sharding not in self._described:
            described = _snapshot.describe_sharding(leaf)
            self._described[sharding] = described
        described = self._described[sharding]
        self.every.append(described)
        if described is None or not getattr(leaf, "committed", True):
            return None
        if sharding not in self._positions:
            self._positions[sharding] = len(self.distinct)
            self.distinct.append(described)
        return self._positions[sharding]


class _ChunkPlan:
    """Chunk shapes, computed once for all arrays that are alike."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._known: dict[Any, tuple[int, ...]] = {}

    def chunk(self, spec: LeafSpec, regions: list[Region]) -> tuple[int, ...]:
        key = (spec.stored_dtype, spec.stored_shape, tuple(regions))
        found = self._known.get(key)
        if found is None:
            shape = spec.stored_shape
            itemsize = spec.stored_bytes // max(1, int(np.prod(shape))) or 1
            found = chunk_shape(shape, regions, itemsize, self._chunk_bytes)
            self._known[key] = found
        return found
