"""What each leaf shall become: decided before anything is read, and made of the stored arrays afterwards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._devices import shardings
from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch, UnsupportedLeaf
from ckpt_core._layout.regions import whole
from ckpt_core._lazy import jax
from ckpt_core._load.request import Request
from ckpt_core._read import Array, Parts, Want
from ckpt_core._results import LeafInfo
from ckpt_core._saved import SavedItem
from ckpt_core._tree import FlatTree, Path, format_path
from ckpt_core._tree.leaves import (
    LeafSpec,
    as_abstract,
    as_logical,
    converted,
    describe,
    dtype_from_name,
    family,
    from_host_array,
)
from ckpt_core.arguments import an, with_article

_NUMBERS = ("jax", "numpy", "numpy_scalar")
_SIXTY_FOUR = frozenset({"int64", "uint64", "float64", "complex128"})


_ORDINARY = (int, float, bool, complex, str, bytes, np.ndarray, np.generic, LeafSpec)
"""Leaves of targets that are taken as they are, beside those of jax. An adapter's ``wanted`` gets a pytree of ``LeafSpec``;
each one that it returns is loaded as it was saved.
"""


@dataclass(frozen=True)
class TargetTree:
    """The target of one item, as leaves."""

    like: Any  # what the caller passed; of a load the copy of a live object
    flat: FlatTree  # with the states of live objects in their places
    live: Sequence[tuple[Any, bool]]  # these, with whether one may stand there twice
    leaves: Sequence[Any]  # with a ``jax.ShapeDtypeStruct`` for any description of an array
    specs: Sequence[LeafSpec | None]  # what each asks for; None for one as it was saved
    places: Sequence[Path]  # that hold ``...``

    @classmethod
    def of(cls, like: Any, flat: FlatTree, live: Sequence[tuple[Any, bool]]) -> TargetTree:
        """Leaves of ``inspect`` that are no jax arrays are wanted as they were saved."""
        leaves, places = flat.leaves, list[Path]()
        ordinary = (jax.Array, jax.ShapeDtypeStruct, *_ORDINARY)
        if any(not issubclass(kind, ordinary) for kind in set(map(type, leaves))):
            leaves = [
                LeafSpec(leaf.kind, leaf.dtype, leaf.shape)
                if isinstance(leaf, LeafInfo) and leaf.kind != "jax"
                else as_abstract(leaf)
                for leaf in leaves
            ]
            places = [path for path, leaf in zip(flat.paths, leaves, strict=True) if leaf is ...]
        return cls(like, flat, live, leaves, list(map(_wanted_spec, flat.paths, leaves)), places)


def _wanted_spec(path: Path, leaf: Any) -> LeafSpec | None:
    """What a leaf of a target asks for; None: what was saved. UnsupportedLeaf if it is traced, or no checkpoint can hold it."""
    if isinstance(leaf, LeafSpec) or leaf is ...:
        return None
    try:
        return describe(leaf, path)
    except UnsupportedLeaf as error:
        if is_deleted(leaf):  # it still tells shape and dtype
            weak: bool = getattr(leaf, "weak_type", False)
            return describe(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak), path)
        text = f"{with_article(error.type_name or '')} cannot be a target, as no checkpoint holds one: give an array, "
        text += "a jax.ShapeDtypeStruct or a plain value of what was saved there, or load without a target"
        if isinstance(leaf, jax.core.Tracer):
            text = "it is being traced: load outside of jit and grad"
        raise UnsupportedLeaf(
            f"{error.leaf}: {text}", leaf=error.leaf, type_name=error.type_name
        ) from None


def is_deleted(leaf: Any) -> bool:
    """Whether an array was deleted, by donation or a restore that failed; one that is traced cannot say it."""
    traced = isinstance(leaf, jax.core.Tracer)
    return isinstance(leaf, jax.Array) and not traced and leaf.is_deleted()


def spec_as_saved(saved: LeafSpec, request: Request) -> LeafSpec:
    """The spec of a leaf that is loaded without a target."""
    if request.as_numpy and saved.kind in ("jax", "key"):
        dtype = saved.stored_dtype if saved.kind == "key" else saved.dtype
        saved = LeafSpec("numpy", dtype, saved.stored_shape)
    if request.dtype and saved.kind in _NUMBERS and saved.dtype.startswith(("float", "bfloat")):
        saved = LeafSpec(saved.kind, request.dtype, saved.shape)
    return saved


def _chosen(item: SavedItem, position: int, sharding: Any) -> Any:
    """The sharding that ``sharding=`` asks for."""
    if isinstance(sharding, jax.sharding.Mesh):
        saved = shardings.rebuild_sharding(item.shardings[position], sharding)
        return saved or jax.sharding.NamedSharding(sharding, jax.sharding.PartitionSpec())
    if isinstance(sharding, jax.sharding.Sharding):
        named = isinstance(sharding, jax.sharding.NamedSharding)
        if named and len(sharding.spec) > len(item.specs[position].shape):
            # passed for a whole pytree, of which this leaf has fewer dimensions
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        return sharding
    path = item.paths[position]
    if callable(sharding):
        found = sharding(format_path(path), item.specs[position])
    else:
        found = _at_path(sharding, path)
    if found is not None and not isinstance(found, jax.sharding.Sharding):
        raise TypeError(f"sharding= holds {an(found)} for leaf {format_path(path)}")
    return found


def _at_path(tree: Any, path: Path) -> Any:
    """The sharding of one leaf, from ``sharding=`` as a pytree of shardings or a prefix of one."""
    node = tree
    for entry in path:
        if node is None or isinstance(node, (jax.sharding.Sharding, jax.sharding.Mesh)):
            break
        try:
            named = isinstance(entry, str) and not isinstance(node, Mapping)
            node = getattr(node, str(entry)) if named else node[entry]
        except (KeyError, IndexError, AttributeError, TypeError):
            raise TypeError(
                f"sharding= has nothing for leaf {format_path(path)}: pass a Sharding, a Mesh, a tree of "
                "shardings with the structure of the checkpoint, or a function of (path, leaf)"
            ) from None
    return node


def _want(item: SavedItem, position: int, spec: LeafSpec, sharding: Any, as_numpy: bool) -> Want:
    saved = item.specs[position]
    if spec.kind == "jax" and spec.dtype in _SIXTY_FOUR:
        refuse_narrowing(spec.dtype, item.paths[position])
    dtype = None if spec.dtype == saved.dtype else _dtype_while_read(saved, spec)
    if as_numpy or spec.kind not in ("jax", "key"):
        maps = as_numpy and dtype is None and saved.kind in ("jax", "numpy") and saved.detail != ">"
        return Want(position, [whole(saved.stored_shape)], maps, None, dtype, spec)
    regions = [whole(saved.shape)]
    try:
        if sharding is not None:
            held = shardings.local_shards(sharding, True, saved.shape, jax.process_index())
            regions = [region for region, _, _ in held.mine]
    except ValueError as error:  # the mesh does not divide a dimension evenly
        mismatch = item.differs(item.paths[position], "sharding", saved, sharding)
        raise StructureMismatch([mismatch], advice=str(error)) from None
    if spec.kind == "key":
        words = saved.stored_shape[-1]
        regions = [(*region, (0, words)) for region in regions]
    return Want(position, regions, False, sharding, dtype, spec)


def refuse_narrowing(dtype: str, path: Path | str) -> None:
    """Raises CheckpointError if jax would narrow a 64-bit dtype to 32 bits."""
    flags: Any = jax.config  # its attributes have no types
    if dtype in _SIXTY_FOUR and not flags.jax_enable_x64:
        where = path if isinstance(path, str) else format_path(path)
        raise CheckpointError(
            f"{where}: {dtype} would lose half its bits: jax runs without 64-bit types. Call "
            'jax.config.update("jax_enable_x64", True) first, load with as_numpy=True, or give a target of 32 bits and '
            "cast=True"
        )


def wants_of(
    item: SavedItem,
    wanted: Sequence[tuple[int, LeafSpec, Any]],
    sharding: Any = None,
    as_numpy: bool = False,
) -> list[Want]:
    """What is read for leaves of the result, from each one's position in the item, spec, and leaf in the target, or None."""
    asked = [None if leaf is None else shardings.wanted_sharding(leaf) for _, _, leaf in wanted]
    there = (one for one in asked if one is not None)  # jax is imported for none else
    named = (one for one in there if isinstance(one, jax.sharding.NamedSharding))
    mesh = next((one.mesh for one in named if one.mesh.size > 1), None)
    # many leaves differ in their positions alone, unless sharding= depends on the path; equal specs are mostly one object
    alike = sharding is None or isinstance(sharding, (jax.sharding.Sharding, jax.sharding.Mesh))
    wants: list[Want] = []
    known: dict[Any, Want] = {}
    for (position, spec, leaf), chosen in zip(wanted, asked, strict=True):
        saved, described = item.specs[position], item.shardings[position]
        key = id(saved), id(described), id(spec), type(leaf), chosen
        if key not in known or not alike:
            if spec.kind not in ("jax", "key"):
                chosen = None
            elif sharding is not None:
                chosen = _chosen(item, position, sharding)
            elif chosen is None and not isinstance(leaf, jax.Array):
                chosen = _saved_sharding(item, position, mesh)
            known[key] = _want(item, position, spec, chosen, as_numpy)
        wants.append(known[key]._replace(leaf=position))
    return wants


def kind_of_result(saved: LeafSpec, wanted: LeafSpec) -> LeafSpec:
    """The spec of a leaf that is wanted as a Python number. A saved array stays one: else steps would compute in another dtype."""
    if saved.kind not in _NUMBERS:
        return wanted
    if family(saved.dtype) == family(wanted.dtype):
        return saved
    dtype = wanted.numpy_dtype  # the caller passed cast=True, else matching would have failed
    if saved.kind == "jax":
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return LeafSpec(saved.kind, dtype.name, saved.shape)


def _saved_sharding(item: SavedItem, position: int, mesh: Any = None) -> Any:
    """The saved sharding, if the devices allow it. For an abstract leaf beside others on a ``mesh``, it must be on that, or the
    leaf is replicated over it: arrays of one state must not be on different meshes.
    """
    described = item.shardings[position]
    # an array on one device comes back there, if as many processes run: the others hold no part of it
    elsewhere = item.run_processes == jax.process_count()
    saved = shardings.rebuild_sharding(described, elsewhere=elsewhere)
    on_mesh = isinstance(saved, jax.sharding.NamedSharding) and saved.mesh == mesh
    if mesh is None or described is None or on_mesh:
        return saved
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def check_room(item: SavedItem, wants: Sequence[Want], replaced: Sequence[Any] = ()) -> None:
    """Raises CheckpointError, before anything is read, if arrays exceed the free memory of the default device, or if several
    processes run and nothing says which holds what: neither the saved sharding nor the ``replaced`` leaf in that place.
    """
    unplaced = [
        (want.leaf, want.spec, leaf)
        for want, leaf in itertools.zip_longest(wants, replaced)
        if want.sharding is None and want.spec is not None and want.spec.kind in ("jax", "key")
    ]
    several = bool(unplaced) and jax.process_count() > 1
    for position, _, leaf in unplaced if several else ():
        described = item.shardings[position]
        if described is None or isinstance(leaf, jax.Array):
            continue
        where = format_path(item.paths[position])
        kind = described.get("sharding_type")
        on = described.get("device_str") or (described.get("device_mesh") or {}).get("mesh")
        raise CheckpointError(
            f"item {item.name!r}: several processes run and the saved sharding does not fit their devices: "
            f"{where} was saved with a {kind}{f' on {on!s:.80}' if on else ''}: give a target with shardings, "
            "or load with sharding= or as_numpy=True"
        )
    free = shardings.free_bytes() if unplaced else None
    needed = sum(spec.stored_bytes for _, spec, _ in unplaced)
    if free is not None and needed > free:
        raise CheckpointError(
            f"item {item.name!r}: {needed:,} bytes do not fit into the {free:,} free bytes of the "
            "default device: spread them by a target with shardings or load with sharding=, or keep them on "
            "the host with as_numpy=True"
        )


def _dtype_while_read(saved: LeafSpec, spec: LeafSpec) -> np.dtype[Any] | None:
    """``Want.dtype``: only floats are cast while reading, as ``value_of`` checks that a cast of integers changes no value."""
    if saved.kind not in ("jax", "numpy") or spec.kind not in ("jax", "numpy"):
        return None
    if not spec.dtype or spec.dtype == saved.dtype or saved.stored_dtype != saved.dtype:
        return None
    wanted = dtype_from_name(spec.dtype)
    floats = all(jax.dtypes.issubdtype(one, np.floating) for one in (saved.numpy_dtype, wanted))
    return wanted if floats and np.can_cast(saved.numpy_dtype, wanted, "unsafe") else None


def is_resharded(described: dict[str, Any] | None, sharding: Any) -> bool:
    """Whether ``sharding`` differs from the saved one; None is the default device in both."""
    if not described:
        return sharding is not None and len(sharding.device_set) > 1
    if sharding is None:
        shape = described.get("shape")
        sizes = [size for size in shape if isinstance(size, int)] if isinstance(shape, list) else []
        return described.get("sharding_type") == "NamedSharding" and math.prod(sizes) > 1
    saved = shardings.rebuild_sharding(described)
    return saved is None or saved != sharding


def value_of(saved: LeafSpec, want: Want, parts: Parts, path: Path, *, cast: bool) -> Any:
    """The value of one leaf, made of its regions in host memory. Raises StructureMismatch if they do not fit the wanted dtype."""
    spec = want.spec or saved
    if spec.kind == "key":
        if want.sharding is None and saved.kind != "key":
            raise CheckpointError(f"{format_path(path)}: not a PRNG key")
        keyed = {region[:-1]: part for region, part in parts.items()}
        return shardings.place_key(saved.shape, spec.dtype, want.sharding, keyed)
    if spec.kind == "jax":
        as_stored = spec.dtype == saved.dtype == saved.stored_dtype
        logical = parts if as_stored else _logical(saved, spec, parts, path, cast)
        dtype = None if logical else dtype_from_name(spec.dtype or saved.dtype)
        if logical and saved.detail == "weak" and spec.dtype == saved.dtype:
            (part,) = logical.values()
            weak = shardings.place_weak(part, want.sharding)
            if weak is not None:
                return weak
        return shardings.place(saved.shape, want.sharding, logical, dtype)
    (array,) = _logical(saved, spec, parts, path, cast).values()
    if saved.kind == "key":
        return array
    if spec.kind == "numpy":
        as_saved = saved.kind == "numpy" and (spec.dtype, spec.detail) == (saved.dtype, "")
        big_endian = (saved if as_saved else spec).detail == ">"
        return array.astype(array.dtype.newbyteorder(">")) if big_endian else array
    return array[()] if spec.kind == "numpy_scalar" else from_host_array(array, spec)


def _logical(saved: LeafSpec, spec: LeafSpec, parts: Parts, path: Path, cast: bool) -> Parts:
    """The stored parts, converted to the saved dtype, or to that of the target if it has one."""
    made = {region: as_logical(part, saved) for region, part in parts.items()}
    if not spec.dtype or spec.kind == "bytes" or saved.kind == "key":
        return made
    dtype, lost = dtype_from_name(spec.dtype), list[Array]()
    number = saved.kind in ("float", "complex")
    # what jit makes of a Python float is weakly typed, and rounded: such a target asks for that
    rounds = not number or cast or spec.detail == "weak"
    for region, array in made.items():
        made[region], beyond = converted(array, dtype, rounds=rounds, overflows=not number)
        lost += [beyond] if beyond.size else []
    if not lost:
        return made
    count, shown = sum(beyond.size for beyond in lost), str(lost[0].flat[0])
    if saved.shape:
        shown = f"{saved}, of which {count:,} do not fit, such as {shown}"
    advice = "A saved number does not fit the wanted dtype."
    if number and not cast:
        advice += " cast=True rounds it, unless it is too large."
    mismatch = Mismatch(format_path(path), "dtype", shown, str(spec))
    raise StructureMismatch([mismatch], advice=advice)
