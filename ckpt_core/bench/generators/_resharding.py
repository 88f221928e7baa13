"""Measures loading onto another sharding, and reading once for all replicas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench._check import check_equal
from ckpt_core.bench._data import abstract, load_onto
from ckpt_core.bench.generators._save_load import (
    SaveLoadOptions,
    measure_load,
    sharded_library,
)


@dataclass(frozen=True)
class ReshardingOptions(SaveLoadOptions):
    """Those of ``SaveLoad``, and what to load.

    Attributes:
        reference_checkpoint_path: an existing checkpoint; null saves the suite's data first.
        reference_sharding_path: JSON file with the sharding of every leaf; null reverses the
            partition spec of every leaf on the suite's mesh, so that the shards differ.
    """

    reference_checkpoint_path: str | list[str | None] | None = None
    reference_sharding_path: str | list[str | None] | None = None

    def problem(self) -> str | None:
        if self.library != "ckpt" and self.reference_checkpoint_path is not None:
            return "loading an existing checkpoint is measured for ckpt only"
        return super().problem()


@bench.benchmark_options(ReshardingOptions)
class Resharding(bench.BenchmarksGenerator):
    """Measures ``load`` onto another sharding than that of the save."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        options: Any = context.options
        if options.reference_checkpoint_path is None:
            return _reshard_own(context)
        path = str(options.reference_checkpoint_path)
        metrics = bench.Metrics()
        sharding = options.reference_sharding_path
        loaded = measure_load(metrics, context, Path(path), lambda: load_onto(path, sharding))
        if not jax.tree.leaves(loaded):
            raise bench.Skipped(f"{path} holds no leaf")
        return bench.TestResult(metrics=metrics)


def _reshard_own(context: bench.TestContext) -> bench.TestResult:
    if context.pytree is None or context.mesh is None:
        raise bench.Skipped(
            "needs reference_checkpoint_path, or a checkpoint_config and a mesh_config"
        )
    turned = jax.tree.map(lambda leaf: _turned(leaf, context.mesh), abstract(context.pytree))
    return _save_then_load(context, turned, resharded=True)


def _save_then_load(context: bench.TestContext, like: Any, *, resharded: bool) -> bench.TestResult:
    """Saves the suite's arrays unmeasured, then measures a load onto the shardings of ``like``."""
    state, options = context.pytree, context.options
    lib = sharded_library(options)
    path, metrics = context.path / "ckpt", bench.Metrics()
    lib.save(path, state)
    loaded = measure_load(metrics, context, path, lambda: lib.load(path, like))
    for leaf, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(like), strict=True):
        if isinstance(wanted, jax.ShapeDtypeStruct) and leaf.sharding != wanted.sharding:
            raise ckpt.CheckpointError(f"loaded onto {leaf.sharding}, wanted {wanted.sharding}")
    # A process can compare its own shards only: with several, not if the sharding changed.
    if jax.process_count() == 1 or not resharded:
        check_equal(state, loaded)
    return bench.TestResult(metrics=metrics, notes={"durable": lib.durability})


def _turned(leaf: Any, mesh: Any) -> Any:
    """The array with its partition spec reversed; replicated if that does not divide its shape."""
    if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(leaf.sharding, NamedSharding):
        return leaf
    spec = list(leaf.sharding.spec) + [None] * (len(leaf.shape) - len(leaf.sharding.spec))
    turned = NamedSharding(mesh, PartitionSpec(*reversed(spec)))
    try:
        turned.shard_shape(leaf.shape)
    except ValueError:
        turned = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=turned)


@dataclass(frozen=True)
class LoadAndBroadcastOptions(ReshardingOptions):
    """Those of ``Resharding``, with broadcast turned on."""

    use_load_and_broadcast: bool | list[bool] = True


@bench.benchmark_options(LoadAndBroadcastOptions)
class LoadAndBroadcast(bench.BenchmarksGenerator):
    """Measures ``load`` of replicated arrays: one process reads each and sends it to the others."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        if context.pytree is None or context.mesh is None:
            raise bench.Skipped("needs a checkpoint_config and a mesh_config")
        return _save_then_load(context, abstract(context.pytree), resharded=False)
