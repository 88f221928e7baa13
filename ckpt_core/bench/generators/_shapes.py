"""Measures particular states: many leaves, one leaf of many, replicated arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench._check import check_equal
from ckpt_core.bench._data import abstract, total_bytes
from ckpt_core.bench.generators._save_load import (
    SaveLoadOptions,
    data_of,
    measure_load,
    measure_save,
    save_and_load,
    sharded_library,
)


@dataclass(frozen=True)
class UniformLeavesOptions(SaveLoadOptions):
    """Those of ``SaveLoad``, and the size of the state.

    Attributes:
        leaves: the number of arrays.
        leaf_bytes: the size of each, in float32.
    """

    leaves: int | list[int] = 1000
    leaf_bytes: int | list[int] = 1024


@bench.benchmark_options(UniformLeavesOptions)
class UniformLeaves(bench.BenchmarksGenerator):
    """``SaveLoad`` on equal arrays that it makes itself; small ones show the cost per leaf."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        options: Any = context.options
        if jax.process_count() > 1:
            raise bench.Skipped(
                "makes arrays of one process; use SaveLoad with a checkpoint_config"
            )
        result = save_and_load(context, _uniform(options.leaves, options.leaf_bytes // 4))
        for operation in ("save", "load"):
            for secs in result.metrics.values[operation]["0_basics/time_s"]:
                result.metrics.add(operation, "0_basics/us_per_leaf", secs / options.leaves * 1e6)
        return result


def _uniform(leaves: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {}
    for index in range(leaves):
        values = rng.standard_normal(max(1, length), np.float32)
        state.setdefault(f"layer_{index // 10}", {})[f"w{index % 10}"] = jax.device_put(values)
    return jax.block_until_ready(state)


@bench.benchmark_options(UniformLeavesOptions)
class ManySmallLeaves(UniformLeaves):
    """``UniformLeaves`` under a more familiar name."""


@dataclass(frozen=True)
class PartialLoadOptions(bench.BenchmarkOptions):
    """Attributes:
    only: patterns of the leaves to load; empty takes the first leaf.
    page_cache: as in ``SaveLoad``.
    """

    only: str | list[str] = ""
    page_cache: str | list[str] = "warm"


@bench.benchmark_options(PartialLoadOptions)
class PartialLoad(bench.BenchmarksGenerator):
    """Measures ``load_part``, and ``load`` of everything for comparison."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        options: Any = context.options
        state, path, metrics = data_of(context), context.path / "ckpt", bench.Metrics()
        ckpt.save(path, state)
        pattern = options.only or ckpt.inspect(path).items["state"].leaves[0].path
        loaded = None
        for name, only in (("load_part", pattern), ("load", "**")):
            load = functools.partial(ckpt.load, path, only=only)
            loaded = measure_load(metrics, context, path, load, name=name)
        check_equal(state, loaded)
        return bench.TestResult(metrics=metrics)


@dataclass(frozen=True)
class ReplicaParallelSaveOptions(SaveLoadOptions):
    """Those of ``SaveLoad``, and the number of saves.

    Attributes:
        num_savings: the number of saves in one run.
    """

    num_savings: int | list[int] = 1
    use_replica_parallel: bool | list[bool | None] | None = True


@bench.benchmark_options(ReplicaParallelSaveOptions)
class ReplicaParallelSave(bench.BenchmarksGenerator):
    """Measures ``save`` of arrays that are replicated on all devices; each device writes a part."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        options: Any = context.options
        data, lib = data_of(context), sharded_library(options)
        mesh = context.mesh or Mesh(np.array(jax.devices()), ("all",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(
            lambda leaf: jax.device_put(leaf, everywhere) if isinstance(leaf, jax.Array) else leaf,
            data,
        )
        state = jax.block_until_ready(state)
        metrics, like = bench.Metrics(), abstract(state)
        for number in range(options.num_savings):
            path = context.path / f"ckpt_{number}"
            measure_save(metrics, lib, path, state, total_bytes(state))
            check_equal(state, lib.load(path, like))
        return bench.TestResult(metrics=metrics, notes={"durable": lib.durability})
