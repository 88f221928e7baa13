"""Makes what a case runs on: ``context.mesh``, and ``context.pytree`` of synthetic arrays or of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core.bench._config import ArraySpec, CheckpointConfig, MeshConfig, PlainSpec
from ckpt_core.bench._core import Skipped
from ckpt_core.bench._schema import ConfigError, nearest


def make_mesh(config: MeshConfig | None) -> Any:
    """The ``jax.sharding.Mesh`` of a configuration, None for None; ``Skipped`` if its axes do not fit the devices."""
    if config is None:
        return None
    ici, dcn = (
        [(degrees or {}).get(axis, 1) for axis in config.mesh_axes]
        for degrees in (config.ici_parallelism, config.dcn_parallelism)
    )
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
    """A function that puts the data of a configuration onto a mesh as new jax arrays. Every run gets new ones: an array
    that was saved before may have cached its host copy, and one that was restored may share memory with the data that was
    read.
    """
    if config.path is not None:
        path, sharding = config.path, config.sharding_config_path
        return lambda _: jax.block_until_ready(load_onto(path, sharding))
    spec, rng = config.spec, np.random.default_rng(config.random_seed)
    tree = None if spec is None else _generate(spec, rng)
    return lambda mesh: jax.block_until_ready(_put(tree, mesh))


def _generate(spec: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, entry in spec.items():
        if isinstance(entry, PlainSpec):
            tree[name] = 0 if entry.kind == "int" else name
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


def load_onto(path: str, sharding_path: str | None) -> Any:
    """A checkpoint, loaded onto the shardings in a file or onto those it was saved with. The file maps ``a.b.c`` to
    ``{"shape", "dtype", "sharding": {"mesh": {"shape", "axes"}, "spec"}}``, as Orbax's framework writes it; ConfigError
    if it does not fit the checkpoint.
    """
    if sharding_path is None:
        return ckpt.load(path)
    wanted = _wanted_shardings(sharding_path)
    problems: list[str] = []
    for leaf in (leaf for item in ckpt.inspect(path).items.values() for leaf in item.leaves):
        name = leaf.path.replace("/", ".")
        if name not in wanted and leaf.kind == "jax":
            problems.append(f"lacks the leaf {name!r}{nearest(name, wanted)}")
        elif name in wanted and wanted[name][:2] != (leaf.shape, leaf.dtype):
            shape, dtype, _ = wanted[name]
            saved = f"{leaf.dtype}{list(leaf.shape)}"
            problems.append(f"{name}: wants {dtype}{list(shape)}, saved is {saved}")
    if problems:
        raise ConfigError(sharding_path, *problems)
    return ckpt.load(path, sharding=lambda leaf, _: wanted[leaf.replace("/", ".")][2])


def _wanted_shardings(file: str) -> dict[str, tuple[tuple[int, ...], str, NamedSharding]]:
    """Shape, dtype and sharding of each leaf in a sharding file."""
    try:
        return {
            name: (
                tuple(entry["shape"]),
                str(jax.numpy.dtype(entry["dtype"])),
                _named_sharding(entry["sharding"]),
            )
            for name, entry in json.loads(Path(file).read_text(encoding="utf-8")).items()
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ConfigError(file, f"is no sharding file: {error!r}") from error


def _named_sharding(described: Mapping[str, Any]) -> NamedSharding:
    shape, axes = described["mesh"]["shape"], described["mesh"]["axes"]
    count, there = int(np.prod(shape)), jax.device_count()
    if there < count:
        raise ConfigError("sharding", f"wants a mesh of {count} devices, there are {there}")
    spec = [tuple(entry) if isinstance(entry, list) else entry for entry in described["spec"]]
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(shape), tuple(axes))
    return NamedSharding(mesh, PartitionSpec(*spec))


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
