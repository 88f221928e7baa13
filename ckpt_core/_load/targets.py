"""What each leaf that is read shall become, decided before anything is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._devices import shardings, transfer
from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch, UnsupportedLeaf
from ckpt_core._layout.regions import Region, whole
from ckpt_core._lazy import jax
from ckpt_core._load.checkpoint import SavedItem
from ckpt_core._tree import Path, format_path
from ckpt_core._tree.leaves import LeafSpec, describe, dtype_from_name

_SIXTY_FOUR = frozenset({"int64", "uint64", "float64", "complex128"})


@dataclass(frozen=True)
class Target:
    """What one leaf shall become.

    Attributes:
        spec: kind, dtype and shape of the result.
        sharding: for jax arrays; None for uncommitted on the default device.
        regions: of the stored array that this process needs.
    """

    spec: LeafSpec
    sharding: Any
    regions: list[Region]


class SavedLeaf:
    """One leaf of a checkpoint before it is read, as ``Adapter.wanted`` gets and returns it.

    Returned, it asks for the leaf as it was saved.

    Attributes:
        kind: ``jax``, ``numpy``, ``key``, ``int``, ``float``, ``str`` and so on.
        shape: of an array.
        dtype: of an array, by name.
    """

    __slots__ = ("dtype", "kind", "shape")

    def __init__(self, spec: LeafSpec) -> None:
        self.kind, self.shape, self.dtype = spec.kind, spec.shape, spec.dtype


def describe_target(leaf: Any, path: Path) -> LeafSpec:
    """What a leaf of a target asks for.

    Raises:
        UnsupportedLeaf: a value that nothing which was saved can take the place of.
    """
    try:
        return describe(leaf, path)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(
            f"{error.leaf}: a {error.type_name} cannot be a target, as no checkpoint holds one: give an array, "
            "a jax.ShapeDtypeStruct or a plain value of what was saved there, or load without a target",
            leaf=error.leaf,
            type_name=error.type_name,
        ) from None


def plain_targets(
    item: SavedItem, positions: Sequence[int], *, sharding: Any, as_numpy: bool
) -> dict[int, Target]:
    """Targets for a load without ``like``: everything as it was saved."""
    targets: dict[int, Target] = {}
    # what lies alike has one target, unless a path may decide
    alike = sharding is None or isinstance(sharding, (jax.sharding.Sharding, jax.sharding.Mesh))
    known: dict[tuple[LeafSpec, int], Target] = {}
    for position in positions:
        spec = item.specs[position]
        key = (spec, id(item.shardings[position]))
        found = known.get(key) if alike else None
        if found is not None:
            targets[position] = found
            continue
        if as_numpy and spec.kind in ("jax", "key"):
            spec = LeafSpec(
                "numpy", spec.stored_dtype if spec.kind == "key" else spec.dtype, spec.stored_shape
            )
        chosen = (
            _chosen(item, position, sharding)
            if spec.kind in ("jax", "key") and not as_numpy
            else None
        )
        targets[position] = known[key] = _target(item, position, spec, chosen, as_numpy)
    return targets


def _chosen(item: SavedItem, position: int, sharding: Any) -> Any:
    """The sharding that ``sharding=`` asks for, or else the saved one where devices allow it."""
    described = item.shardings[position]
    if sharding is None:
        return shardings.rebuild_sharding(described)
    if isinstance(sharding, jax.sharding.Mesh):
        return shardings.rebuild_sharding(described, sharding) or jax.sharding.NamedSharding(
            sharding, jax.sharding.PartitionSpec()
        )
    if isinstance(sharding, jax.sharding.Sharding):
        return _fitting(sharding, item.specs[position])
    if callable(sharding):
        return sharding(format_path(item.paths[position]), item.specs[position])
    return _at_path(sharding, item.paths[position])


def _at_path(tree: Any, path: Path) -> Any:
    """The sharding that a tree of shardings, or a prefix of one, holds for a leaf."""
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
    if node is not None and not isinstance(node, jax.sharding.Sharding):
        raise TypeError(f"sharding= holds a {type(node).__name__} for leaf {format_path(path)}")
    return node


def _fitting(sharding: jax.sharding.Sharding, spec: LeafSpec) -> jax.sharding.Sharding:
    """One sharding for a whole tree: leaves of too few dimensions are replicated."""
    if isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.spec) > len(spec.shape):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding


def _target(
    item: SavedItem, position: int, spec: LeafSpec, sharding: Any, as_numpy: bool
) -> Target:
    saved = item.specs[position]
    if spec.kind == "jax":
        refuse_narrowing(spec.dtype, item.paths[position])
    if as_numpy or spec.kind not in ("jax", "key"):
        return Target(spec, None, [whole(saved.stored_shape)])
    try:
        regions = shardings.local_regions(sharding, saved.shape)
    except ValueError as error:  # a dimension that the mesh does not divide
        where = format_path(item.paths[position])
        mismatch = Mismatch(where, "sharding", str(saved), str(sharding), None, item.name or None)
        raise StructureMismatch([mismatch], advice=str(error)) from error
    if spec.kind == "key":
        words = saved.stored_shape[-1]
        regions = [(*region, (0, words)) for region in regions]
    return Target(spec, sharding, regions)


def refuse_narrowing(dtype: str, path: Path | str) -> None:
    flags: Any = jax.config  # which are not typed
    if dtype in _SIXTY_FOUR and not flags.jax_enable_x64:
        where = path if isinstance(path, str) else format_path(path)
        raise CheckpointError(
            f"{where}: {dtype} would lose half its bits: jax runs without 64-bit types. Set "
            "jax_enable_x64, load with as_numpy=True, or give a target of 32 bits and cast=True"
        )


def like_targets(item: SavedItem, wanted: Sequence[tuple[int, LeafSpec, Any]]) -> list[Target]:
    """Targets for leaves of a ``like``: (position saved, wanted spec, live or abstract leaf)."""
    mesh = _mesh_of(leaf for _, _, leaf in wanted)
    targets: list[Target] = []
    for position, spec, leaf in wanted:
        sharding = None
        if spec.kind in ("jax", "key"):
            sharding = shardings.wanted_sharding(leaf)
            if sharding is None and not isinstance(leaf, jax.Array):
                sharding = _default_sharding(item.shardings[position], mesh)
        targets.append(_target(item, position, spec, sharding, False))
    return targets


_PYTHON_NUMBERS = frozenset({"int", "float", "bool", "complex"})


def kind_of_result(saved: LeafSpec, wanted: LeafSpec) -> LeafSpec:
    """What a leaf becomes where a target of that description takes it: a saved array stays an array.

    A Python number in a target says that there is a number, not of which sort: another dtype, or
    none, would change what later steps compute in.
    """
    if wanted.kind not in _PYTHON_NUMBERS or saved.kind in _PYTHON_NUMBERS:
        return wanted
    if saved.kind not in ("jax", "numpy", "numpy_scalar"):
        return wanted
    kinds = {_family(saved.numpy_dtype), _family(wanted.numpy_dtype)}
    if len(kinds) == 1:
        return saved
    dtype = wanted.numpy_dtype  # a cast that was asked for
    if saved.kind == "jax":
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return LeafSpec(saved.kind, dtype.name, saved.shape)


def _family(dtype: np.dtype[Any]) -> str:
    """Numbers of one family fit a Python number of it: ints, floats, bools, complex ones."""
    for family in (np.integer, np.floating, np.complexfloating):
        if jax.dtypes.issubdtype(dtype, family):
            return family.__name__
    return dtype.name


def _mesh_of(leaves: Any) -> Any:
    for leaf in leaves:
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            sharding = shardings.wanted_sharding(leaf)
            if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
                return sharding.mesh
    return None


def _default_sharding(described: dict[str, Any] | None, mesh: Any) -> Any:
    """For an abstract leaf that does not say: as saved, but never off the mesh of its neighbours."""
    saved = shardings.rebuild_sharding(described)
    if mesh is None or described is None:
        return saved
    if isinstance(saved, jax.sharding.NamedSharding) and saved.mesh == mesh:
        return saved
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def check_room(item: SavedItem, targets: Sequence[Target], explicit: bool) -> None:
    """Refuses, before anything is read, a load that cannot end well.

    Raises:
        CheckpointError: the arrays exceed the default device's free memory, or several processes
            run and nothing says where arrays shall lie.
    """
    if explicit:
        return
    unplaced = [
        target.spec
        for target in targets
        if target.sharding is None and target.spec.kind in ("jax", "key")
    ]
    if unplaced and jax.process_count() > 1 and any(item.shardings):
        raise CheckpointError(
            f"item {item.name!r}: several processes run and the saved sharding does not fit their "
            "devices: give a target with shardings, or load with sharding= or as_numpy=True"
        )
    free = transfer.free_bytes()
    needed = sum(spec.stored_bytes for spec in unplaced)
    if free is not None and needed > free:
        raise CheckpointError(
            f"item {item.name!r}: {needed:,} bytes do not fit into the {free:,} free bytes of the "
            "default device: spread them by a target with shardings or load with sharding=, or keep them on "
            "the host with as_numpy=True"
        )


def dtype_while_read(saved: LeafSpec, spec: LeafSpec) -> np.dtype[Any] | None:
    """The dtype into which an array is converted block by block; None where all of it is looked at.

    Floats become other floats, whatever that rounds; of whole numbers each must come out the same.
    """
    if saved.kind not in ("jax", "numpy") or spec.kind not in ("jax", "numpy"):
        return None
    if not spec.dtype or spec.dtype == saved.dtype or saved.stored_dtype != saved.dtype:
        return None
    wanted = dtype_from_name(spec.dtype)
    floats = all(jax.dtypes.issubdtype(one, np.floating) for one in (saved.numpy_dtype, wanted))
    return wanted if floats else None


def is_resharded(described: dict[str, Any] | None, sharding: Any) -> bool:
    """Whether a sharding is another one than the saved; None is the default device, on either side."""
    if not described:
        return sharding is not None and len(sharding.device_set) > 1
    if sharding is None:
        shape = described.get("shape")
        sizes = [size for size in shape if isinstance(size, int)] if isinstance(shape, list) else []
        return described.get("sharding_type") == "NamedSharding" and math.prod(sizes) > 1
    saved = shardings.rebuild_sharding(described)
    return saved is None or saved != sharding
