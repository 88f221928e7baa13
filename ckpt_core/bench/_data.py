"""What a case runs on: ``context.mesh`` and ``context.pytree``; compares what was loaded with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core._errors import CheckpointError
from ckpt_core._format.checksums import bytes_of
from ckpt_core.bench._config import ArraySpec, CheckpointConfig, MeshConfig
from ckpt_core.bench._measure import Skipped


def make_mesh(config: MeshConfig | None) -> Any:
    """The ``jax.sharding.Mesh`` of a configuration, None for None; ``Skipped`` if its axes do not fit the devices."""
    if config is None:
        return None
    ici, dcn = config.degrees
    wanted, there = math.prod(ici) * math.prod(dcn), jax.device_count()
    if wanted != there:
        raise Skipped(f"the mesh {config.label} needs {wanted} devices, there are {there}")
    split: dict[str, Any] = {"allow_split_physical_axes": config.allow_split_physical_axes}
    try:
        if math.prod(dcn) > 1:
            devices = mesh_utils.create_hybrid_device_mesh(
                ici, dcn, process_is_granule=config.process_is_granule, **split
            )
        else:
            devices = mesh_utils.create_device_mesh(ici, **split)
    except (ValueError, NotImplementedError) as error:
        raise Skipped(f"the mesh {config.label} does not fit these devices: {error}") from error
    return Mesh(devices, config.mesh_axes)


def host_data(config: CheckpointConfig) -> Callable[[Any], Any]:
    """A function that puts the data of a configuration, which it makes once, onto a mesh. Every run gets new arrays: one that was
    saved may have cached its host copy, one that was restored may share memory with what was read.
    """
    if config.path is not None:
        path = config.path
        return lambda _: jax.block_until_ready(ckpt.load(path))
    spec, rng = config.spec, np.random.default_rng(config.random_seed)
    made = functools.cache(lambda: None if spec is None else _generate(spec, rng))
    return lambda mesh: jax.block_until_ready(_put(made(), mesh))


def _generate(spec: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, entry in spec.items():
        if isinstance(entry, str):
            tree[name] = 0 if entry == "int" else name
        elif not isinstance(entry, ArraySpec):
            tree[name] = _generate(entry, rng)
        elif entry.count is None:
            tree[name] = (_numbers(entry, rng), entry.sharding)
        else:
            width, one = len(str(entry.count - 1)), replace(entry, count=None)
            tree[name] = _generate({f"{n:0{width}}": one for n in range(entry.count)}, rng)
    return tree


def _numbers(spec: ArraySpec, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Normally distributed, like weights, so that compression ratios are realistic."""
    dtype = jax.numpy.dtype(spec.dtype)
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, spec.shape, dtype=dtype, endpoint=True)
    if jax.numpy.issubdtype(dtype, jax.numpy.floating) or dtype == np.complex64:
        return rng.standard_normal(spec.shape, dtype=np.float32).astype(dtype)
    return rng.integers(0, 2, spec.shape).astype(dtype)


def _put(tree: Any, mesh: Mesh | None) -> Any:
    if isinstance(tree, dict):
        return {name: _put(child, mesh) for name, child in tree.items()}
    if not isinstance(tree, tuple):
        return tree
    values, axes = tree
    if mesh is None and jax.process_count() == 1:
        return jax.device_put(values)
    if mesh is None:  # with several processes an array must span all of them
        mesh, axes = Mesh(np.array(jax.devices()), ("all",)), None
    spec = PartitionSpec(*(axes or ()))
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])


def total_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree; replicas are not counted again."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "nbytes"))


def abstract(tree: Any) -> Any:
    """The tree with shapes, dtypes and shardings in place of arrays."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(of, tree)


def names_of(tree: Any) -> list[str]:
    """A name for every leaf, in order."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


class WrongData(CheckpointError):
    """The loaded values differ from the saved ones; the measured run fails."""


def check_equal(expected: Any, found: Any) -> None:
    """Compares what this process holds of two trees, bit for bit; ``WrongData`` names the first leaf that differs."""
    leaves = names_of(expected), jax.tree.leaves(expected), jax.tree.leaves(found)
    for name, one, other in zip(*leaves, strict=True):
        if not _same(one, other):
            raise WrongData(f"the loaded leaf {name!r} is not the one that was saved")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, jax.Array) and not one.is_fully_addressable:
        ours, theirs = (
            {str(shard.index): shard.data for shard in array.addressable_shards}
            for array in (one, other)
        )
        return one.shape == other.shape and all(
            index in theirs and _same(data, theirs[index]) for index, data in ours.items()
        )
    a, b = np.asarray(one), np.asarray(other)
    # of bytes, NaN is equal to the same NaN, and -0.0 is not 0.0
    return (a.shape, a.dtype) == (b.shape, b.dtype) and np.array_equal(bytes_of(a), bytes_of(b))
