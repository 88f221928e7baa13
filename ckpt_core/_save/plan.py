"""Plans how each leaf of a pytree is stored, and which process writes which part of it.

A training run saves the same pytree at every step, with different values. The plan depends on structure, shapes and
shardings alone. It is computed once and cached, with the metadata files that follow from it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._devices import shardings
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._format import orbax_files
from ckpt_core._format.record import ItemRecord, LeafRecord
from ckpt_core._layout.chunks import (
    CutRegion,
    WriterTurns,
    chunk_shape,
    cut_region,
    shared_chunk_bytes,
)
from ckpt_core._layout.regions import Region, region_size, whole
from ckpt_core._lazy import jax
from ckpt_core._save.agree import Fact, facts, layout_of
from ckpt_core._tree import FlatTree, Node, Path, format_path, stored_paths
from ckpt_core._tree.leaves import CHANGEABLE_KINDS, TEXT_KINDS, LeafSpec, describe
from ckpt_core._tree.patterns import pattern_to_regex, unmatched_patterns
from ckpt_core._words import some

_REMEMBERED = 16  # plans in the cache: a Checkpointer saves few different items, to two tiers

Rules = Mapping[str, str | None]
"""For each pattern of paths, the codec of the leaves that it matches; None for no compression."""
Compression = str | tuple[str, tuple[tuple[str, str | None], ...]] | None
"""A codec for all leaves; or the name of the item, and pairs of a path pattern and a codec."""


class TreeSignature(NamedTuple):
    """All of a pytree but its values. Two pytrees of equal signature share one plan."""

    root: Node
    paths: tuple[Path, ...]
    specs: tuple[LeafSpec, ...]
    shardings: tuple[tuple[Any, bool] | None, ...]  # of jax and key arrays; whether it is committed
    stored: tuple[Any, ...]  # the same of the stored array: for a PRNG key array, of its key data
    shared: tuple[tuple[int, ...], ...] = ()  # positions of one object that its owner can change

    def __hash__(self) -> int:
        # hashing all leaves would cost more than comparing with the few plans in the cache
        return hash((len(self.paths), self.paths[:1], self.paths[-1:]))


class PlannedLeaf(NamedTuple):
    """How one leaf is stored; leaves that are stored alike share one object."""

    spec: LeafSpec
    chunk: tuple[int, ...]
    held: shardings.LocalShards | None  # of jax arrays: the shards that this process holds
    writes: tuple[tuple[int, tuple[Region, ...]], ...]  # position in ``held.mine``, regions written
    size_bytes: int  # that this process writes
    codec: str | None
    whole: Region | None = None  # all of an array on one device, written here as it is: faster


@dataclass(frozen=True)
class TreePlan:
    """How a pytree is stored: everything but its values."""

    names: tuple[str, ...]
    leaves: tuple[PlannedLeaf, ...]
    record: ItemRecord
    shardings: tuple[dict[str, Any] | None, ...]  # in Orbax's JSON form
    signature: TreeSignature = field(compare=False, repr=False)
    own: bool = False  # a process-local checkpoint

    @functools.cached_property
    def texts(self) -> tuple[int, ...]:
        """Positions of the leaves that are stored as text."""
        kinds = (leaf.spec.kind for leaf in self.leaves)
        return tuple(position for position, kind in enumerate(kinds) if kind in TEXT_KINDS)

    def facts(self, values: Mapping[str, str] | None = None) -> Iterator[Fact]:
        """All facts that must be equal on all processes, leaf by leaf; ``values`` are ``PreparedItem.values``."""
        signature = self.signature
        told = ((values or {}).get(name, "") for name in self.names)
        described = zip(self.leaves, signature.stored, signature.shardings, told, strict=True)
        return facts(signature.root, described, self.own)

    @functools.cached_property
    def layout(self) -> str:
        """Digest of all facts but values; computed once for each plan."""
        return layout_of(self.facts())

    @functools.cached_property
    def one_per_process(self) -> frozenset[str]:
        """Names of the arrays of which every process has one of its own, by custom with equal values."""
        return frozenset(
            name
            for name, stored in zip(self.names, self.signature.stored, strict=True)
            if stored is None
            or (isinstance(stored[0], jax.sharding.SingleDeviceSharding) and not stored[1])
        )

    @functools.cached_property
    def coverage(self) -> str:
        """A digest of which regions this process holds."""
        digest = hashlib.sha256()
        for name, leaf, stored in zip(self.names, self.leaves, self.signature.stored, strict=True):
            if leaf.held is None or name in self.one_per_process:
                continue
            # the same region on another process is another array
            mine = stored[0].is_fully_addressable
            found = sorted(
                (region, holders if mine else ()) for region, holders, _ in leaf.held.mine
            )
            digest.update(repr((name, found)).encode(errors="surrogatepass"))
        return digest.hexdigest()

    @functools.cached_property
    def files(self) -> tuple[tuple[str, bytes], ...]:
        """Name and content of the metadata files of the item that Orbax reads."""
        specs = [leaf.spec for leaf in self.leaves]
        chunks = [leaf.chunk for leaf in self.leaves]
        return (
            (orbax_files.ITEM_METADATA, orbax_files.item_metadata(self.record.tree, specs)),
            (orbax_files.SHARDING_FILE, orbax_files.sharding_file(self.names, self.shardings)),
            (orbax_files.ARRAY_METADATA, orbax_files.array_metadatas(self.names, specs, chunks)),
        )


def signature_of(flat: FlatTree) -> tuple[TreeSignature, list[Any]]:
    """The signature of a pytree, and its leaves, with PRNG key arrays as their key data; UnsupportedLeaf says path and
    type. The caller waits: specs and shardings that thousands of arrays share are made once, and compared fast as one
    object.
    """
    specs: list[LeafSpec] = []
    placed: list[tuple[Any, bool] | None] = []
    stored: list[tuple[Any, bool] | None] = []
    data = list(flat.leaves)
    classes: set[type] = set()  # array classes whose aval determines the spec
    alike: dict[int, tuple[Any, LeafSpec]] = {}  # by id of the aval, which the value keeps alive
    of_numpy: dict[tuple[Any, ...], LeafSpec] = {}  # by dtype and shape
    first: dict[int, int] = {}  # by id of an object that can be changed: where it stands first
    again: dict[int, list[int]] = {}  # and where, if at several places
    before: Any = None  # sharding of the previous array: most arrays have the same one
    was_committed, where = True, None
    for position, leaf in enumerate(flat.leaves):
        known = alike.get(id(leaf.aval)) if type(leaf) in classes else None
        if known is not None and not leaf.is_deleted():
            sharding, committed = leaf.sharding, getattr(leaf, "committed", True)
            if sharding != before or committed != was_committed:
                before, was_committed, where = sharding, committed, _bound(leaf)
            specs.append(known[1])
            placed.append(where)
            stored.append(where)
            continue
        spec = of_numpy.get((leaf.dtype, leaf.shape)) if type(leaf) is np.ndarray else None
        if spec is None:
            spec = _described(leaf, flat.paths[position])
            if type(leaf) is np.ndarray:
                of_numpy[leaf.dtype, leaf.shape] = spec
        bound = _bound(leaf) if spec.kind in ("jax", "key") else None
        specs.append(spec)
        placed.append(bound)
        if spec.kind in CHANGEABLE_KINDS:
            before_it = first.setdefault(id(leaf), position)
            if before_it != position:
                again.setdefault(id(leaf), [before_it]).append(position)
        if spec.kind == "jax" and (aval := getattr(leaf, "aval", None)) is not None:
            classes.add(type(leaf))
            alike[id(aval)] = aval, spec
        if spec.kind == "key":
            with jax.ensure_compile_time_eval():  # where a function is being traced
                data[position] = jax.random.key_data(leaf)
            bound = _bound(data[position])
        stored.append(bound)
    signature = TreeSignature(
        flat.root,
        tuple(flat.paths),
        tuple(specs),
        tuple(placed),
        tuple(stored),
        tuple(map(tuple, sorted(again.values()))),
    )
    return signature, data


def _described(leaf: Any, path: Path) -> LeafSpec:
    spec = describe(leaf, path)
    if type(leaf) is jax.ShapeDtypeStruct:
        where = format_path(path)
        raise UnsupportedLeaf(
            f"{where}: cannot save a jax.ShapeDtypeStruct: it has no values",
            leaf=where,
            type_name="jax.ShapeDtypeStruct",
        )
    return spec


def _bound(array: Any) -> tuple[Any, bool]:
    """The sharding of an array, and whether it is committed; one object for all equal pairs."""
    return _same_pair(array.sharding, getattr(array, "committed", True))


@functools.lru_cache(1024)
def _same_pair(sharding: Any, committed: bool) -> tuple[Any, bool]:
    return sharding, committed


@functools.lru_cache(_REMEMBERED)
def plan_tree(
    signature: TreeSignature,
    process: int,
    process_count: int,
    chunk_bytes: int,
    compression: Compression,
    own: bool = False,
) -> TreePlan:
    """The plan of one process for pytrees of this signature; UnsupportedLeaf if two leaves have the same array name."""
    names = tuple(
        orbax_files.check_names(signature.paths, stored_paths(signature.root, signature.paths))
    )
    if isinstance(compression, tuple):
        codecs = codecs_of(compression[0], signature.paths, dict(compression[1]))
    else:
        codecs = [compression] * len(names)
    planner = LeafPlanner(process, chunk_bytes, own)
    planned = [
        planner.leaf(spec, stored, codec)
        for spec, stored, codec in zip(signature.specs, signature.stored, codecs, strict=True)
    ]
    placed = [bound and bound[0] for bound in signature.shardings]
    distinct = dict.fromkeys(one for one in placed if one is not None)
    described = {one: shardings.describe_sharding(one) for one in distinct}
    places = {one: place for place, one in enumerate(described)}
    # the name of a type that Orbax does not describe: the array lies somewhere all the same
    saved = [form or {"sharding_type": type(one).__name__} for one, form in described.items()]
    records: list[LeafRecord] = []
    alike: dict[tuple[int, int], LeafRecord] = {}  # by ids of leaf and sharding
    for leaf, bound in zip(planned, signature.shardings, strict=True):
        record = alike.get((id(leaf), id(bound)))
        if record is None:
            place = places[bound[0]] if bound is not None and bound[1] else None
            record = LeafRecord(leaf.spec, leaf.chunk, place, leaf.codec)
            alike[id(leaf), id(bound)] = record
        records.append(record)
    record = ItemRecord(
        "tree",
        signature.root,
        signature.paths,
        tuple(records),
        tuple(saved),
        1 if own else process_count,
        shared=signature.shared,
    )
    forms = tuple(map(described.get, placed))
    return TreePlan(names, tuple(planned), record, forms, signature, own)


_Shards = tuple[CutRegion, ...]


class LeafPlanner:
    """Plans the leaves of a pytree, in order. What follows from spec and sharding, which many share, is computed once."""

    def __init__(self, process: int, chunk_bytes: int, own: bool) -> None:
        self._own = own
        self._process = process
        self._chunk_bytes = chunk_bytes
        self._turns = WriterTurns()
        # by ids of spec and of its entry in ``TreeSignature.stored``, which the first value holds, and codec
        self._known: dict[tuple[int, int, str | None], tuple[Any, PlannedLeaf, _Shards]] = {}

    def leaf(self, spec: LeafSpec, stored: Any, codec: str | None) -> PlannedLeaf:
        """How one leaf is stored; ``stored`` is its entry of ``TreeSignature.stored``."""
        key = id(spec), id(stored), codec
        if key not in self._known:
            self._known[key] = stored, *self._planned(spec, stored, codec)
        _, planned, shared = self._known[key]
        return self._taking(planned, shared) if shared else planned

    def _planned(
        self, spec: LeafSpec, stored: Any, codec: str | None
    ) -> tuple[PlannedLeaf, _Shards]:
        """The leaf; and its shards here if other processes hold some, too, and this leaf takes its turn among those like it."""
        if spec.kind in TEXT_KINDS:
            return PlannedLeaf(spec, (), None, (), 0, codec), ()
        everything = whole(spec.stored_shape)
        if stored is None:  # a numpy array, a number or bytes: written by process 0
            leaf = PlannedLeaf(spec, self._chunk(spec, (everything,), 1), None, (), 0, codec)
            if self._process > 0 and not self._own:
                return leaf, ()
            return leaf._replace(writes=((0, (everything,)),), size_bytes=spec.stored_bytes), ()
        sharding, committed = stored
        held = shardings.local_shards(sharding, committed, spec.stored_shape, self._process)
        chunk = self._chunk(spec, held.cuts, 1 if self._own else held.most_holders)
        mine = (self._process,)
        shards = tuple(
            cut_region(region, mine if self._own else holders, chunk, spec.numpy_dtype.itemsize)
            for region, holders, _ in held.mine
        )
        as_it_is = (
            type(sharding) is jax.sharding.SingleDeviceSharding
            and [shard.region for shard in shards] == [everything]
            and (spec.kind == "key" or spec.stored_dtype == spec.dtype)
        )
        leaf = PlannedLeaf(spec, chunk, held, (), 0, codec, everything if as_it_is else None)
        if any(len(shard.holders) > 1 for shard in shards):
            return leaf, shards
        return self._taking(leaf, shards), ()

    def _taking(self, leaf: PlannedLeaf, shards: _Shards) -> PlannedLeaf:
        """The leaf with the regions of each shard that this process writes."""
        takes: list[tuple[int, tuple[Region, ...]]] = []
        total_bytes = 0
        for position, shard in enumerate(shards):
            regions, size_bytes = self._turns.regions(shard, self._process)
            if regions:
                takes.append((position, regions))
                total_bytes += size_bytes
        as_it_is = leaf.whole if takes else None
        return leaf._replace(writes=tuple(takes), size_bytes=total_bytes, whole=as_it_is)

    def _chunk(self, spec: LeafSpec, cuts: tuple[Region, ...], holders: int) -> tuple[int, ...]:
        """The chunk shape of an array, the same on all processes: within all ``cuts``, of which ``holders`` write parts."""
        itemsize = spec.numpy_dtype.itemsize
        size_bytes = itemsize * max(map(region_size, cuts))
        limit = shared_chunk_bytes(size_bytes, holders, self._chunk_bytes)
        return chunk_shape(spec.stored_shape, cuts, itemsize, limit)


def codecs_of(item: str, paths: Sequence[Path], rules: Rules) -> list[str | None]:
    """The codec of every leaf, by the first pattern that matches its path, in the item or with the item; None if none does."""
    compiled = [(pattern_to_regex(pattern), codec) for pattern, codec in rules.items()]
    found: list[str | None] = []
    for path in paths:
        inside = format_path(path)
        names = inside, f"{item}/{inside}" if path else item
        fitting = (codec for rule, codec in compiled if any(map(rule.fullmatch, names)))
        found.append(next(fitting, None))
    return found


def refuse_unmatched(rules: Rules, items: Iterable[tuple[str, Sequence[Path]]]) -> None:
    """Raises ValueError if a pattern matches no leaf of any item: it is a mistake."""
    trees = list(items)
    for pattern in unmatched_patterns(list(rules), trees):
        names = [format_path(path) for _, paths in trees for path in paths]
        raise ValueError(
            f"Options.compression: the pattern {pattern!r} matches no leaf; leaves are {some(names)}"
        )
