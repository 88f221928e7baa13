"""The generators that come with ckpt; a suite file may name them without their module.

A generator measures with ``context.options.library``: the same work for ckpt, other libraries and the bare disk.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench._config import ArraySpec, CheckpointConfig
from ckpt_core.bench._data import abstract, check_equal, host_data, load_onto, total_bytes
from ckpt_core.bench._machine import drop_page_cache, fsync_all, warm_free_memory
from ckpt_core.bench._measure import DEFAULT_KEYS, GB, RATE, TIME
from ckpt_core.bench.libraries import LIBRARIES, Library, make_library


@dataclass(frozen=True)
class SaveLoadOptions(bench.BenchmarkOptions):
    """What to save and load with; null leaves a setting to the library.

    Attributes:
        library: ``ckpt``, ``orbax_v1``, ``orbax_v1_uncompressed``, ``orbax_v0_manager``,
            ``torch_dcp``, ``torch_save``, ``safetensors``, ``numpy_savez``, ``equinox``, ``floor``.
        durable: whether the save survives a power cut once it has returned. If a library leaves the
            fsync out, true adds it inside the measured time and the table says so.
        async_enabled: save in the background; null does so if the library can.
        page_cache: ``cold`` drops the saved files from the page cache before they are loaded.
        use_ocdbt, use_zarr3, use_compression, use_replica_parallel,
        enable_replica_parallel_separate_folder, use_load_and_broadcast, chunk_byte_size,
        save_concurrent_gb, restore_concurrent_gb, metric_tracemalloc_enabled: as in Orbax's
            framework.
    """

    library: str | list[str] = "ckpt"
    durable: bool | list[bool | None] | None = None
    async_enabled: bool | list[bool | None] | None = None
    page_cache: Literal["warm", "cold"] | list[str] = "warm"
    use_ocdbt: bool | list[bool | None] | None = None
    use_zarr3: bool | list[bool | None] | None = None
    use_compression: bool | list[bool | None] | None = None
    use_replica_parallel: bool | list[bool | None] | None = None
    enable_replica_parallel_separate_folder: bool | list[bool] = False
    use_load_and_broadcast: bool | list[bool] = False
    chunk_byte_size: int | list[int | None] | None = None
    save_concurrent_gb: float | list[float | None] | None = None
    restore_concurrent_gb: float | list[float | None] | None = None
    metric_tracemalloc_enabled: bool = False


def _data_of(context: bench.TestContext) -> Any:
    """The data of the suite; raises ``Skipped`` if it has none."""
    if context.pytree is None:
        raise bench.Skipped("needs a checkpoint_config with a spec or a path")
    return context.pytree


def _metric_keys(options: Any) -> list[str]:
    """The metrics to measure; tracemalloc only on request, because it slows everything down."""
    traced = getattr(options, "metric_tracemalloc_enabled", False)
    return [*DEFAULT_KEYS, "tracemalloc"] if traced else [*DEFAULT_KEYS]


def _measure_save(
    metrics: bench.Metrics, lib: Library, path: Path, prepared: Any, size: int
) -> None:
    """Measures one save; if it continues in the background, also its two parts."""
    warm_free_memory(path.parent, size)
    with bench.settle(), metrics.measure("save", _metric_keys(lib.options), nbytes=size):
        if lib.background:
            with metrics.measure("save_blocking", ["time"]):
                wait = lib.start_save(path, prepared)
            with metrics.measure("save_background", ["time"]):
                wait()
        else:
            lib.save(path, prepared)
        if lib.adds_fsync:
            fsync_all(path)


def _measure_load(
    metrics: bench.Metrics,
    context: bench.TestContext,
    path: Path,
    load: Callable[[], Any],
    name: str = "load",
) -> Any:
    """Measures a load of ``path``, and the throughput by the bytes of what it loaded; returns that."""
    if context.options.page_cache == "cold":
        drop_page_cache(path)
    with bench.settle(), metrics.measure(name, _metric_keys(context.options)):
        loaded = jax.block_until_ready(load())
    metrics.add(name, RATE, total_bytes(loaded) / metrics.values[name][TIME][-1] / GB)
    return loaded


@bench.benchmark_options(SaveLoadOptions)
class SaveLoad(bench.BenchmarksGenerator):
    """Measures ``save`` (in it ``save_blocking`` and ``save_background``), then ``load``."""

    def state(self, context: bench.TestContext) -> Any:
        """What is saved."""
        return _data_of(context)

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        lib, state = make_library(context.options), self.state(context)
        metrics, like, path = bench.Metrics(), abstract(state), context.path / "ckpt"
        prepared = lib.prepare(state)
        _measure_save(metrics, lib, path, prepared, total_bytes(state))
        loaded = _measure_load(metrics, context, path, lambda: lib.load(path, like))
        check_equal(state, lib.finish(loaded, like))
        return bench.TestResult(metrics=metrics, notes={"durable": lib.durability})


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
class UniformLeaves(SaveLoad):
    """``SaveLoad`` on equal arrays that it makes itself; small ones show the cost per leaf."""

    def state(self, context: bench.TestContext) -> Any:
        shape = (max(1, context.options.leaf_bytes // 4),)
        arrays = ArraySpec("float32", shape, count=context.options.leaves)
        return host_data(CheckpointConfig(spec={"params": arrays}))(context.mesh)


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
        state, path, metrics = _data_of(context), context.path / "ckpt", bench.Metrics()
        ckpt.save(path, state)
        pattern = options.only or ckpt.inspect(path).items["state"].leaves[0].path
        loaded = None
        for name, only in (("load_part", pattern), ("load", "**")):
            load = functools.partial(ckpt.load, path, only=only)
            loaded = _measure_load(metrics, context, path, load, name=name)
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
        data, lib = _data_of(context), make_library(context.options, sharded=True)
        mesh = context.mesh or Mesh(np.array(jax.devices()), ("all",))
        everywhere = NamedSharding(mesh, PartitionSpec())

        def replicated(leaf: Any) -> Any:
            return jax.device_put(leaf, everywhere) if isinstance(leaf, jax.Array) else leaf

        state = jax.block_until_ready(jax.tree.map(replicated, data))
        metrics, like = bench.Metrics(), abstract(state)
        for number in range(options.num_savings):
            path = context.path / f"ckpt_{number}"
            _measure_save(metrics, lib, path, state, total_bytes(state))
            check_equal(state, lib.load(path, like))
        return bench.TestResult(metrics=metrics, notes={"durable": lib.durability})


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


@bench.benchmark_options(ReshardingOptions)
class Resharding(bench.BenchmarksGenerator):
    """Measures ``load`` onto another sharding than that of the save."""

    def target(self, context: bench.TestContext) -> Any:
        """The abstract tree to load onto."""
        return jax.tree.map(lambda leaf: _turned(leaf, context.mesh), abstract(context.pytree))

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        metrics, state = bench.Metrics(), context.pytree
        reference = context.options.reference_checkpoint_path
        if reference is not None:
            if context.options.library != "ckpt":
                raise bench.Skipped("loading an existing checkpoint is measured for ckpt only")
            sharding = context.options.reference_sharding_path
            load = functools.partial(load_onto, reference, sharding)
            _measure_load(metrics, context, Path(reference), load)
            return bench.TestResult(metrics=metrics)
        if state is None or context.mesh is None:
            raise bench.Skipped(
                "needs reference_checkpoint_path, or a checkpoint_config and a mesh_config"
            )
        lib, like = make_library(context.options, sharded=True), self.target(context)
        path = context.path / "ckpt"
        lib.save(path, state)
        loaded = _measure_load(metrics, context, path, lambda: lib.load(path, like))
        for leaf, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(like), strict=True):
            if isinstance(wanted, jax.ShapeDtypeStruct) and leaf.sharding != wanted.sharding:
                raise ckpt.CheckpointError(f"loaded onto {leaf.sharding}, wanted {wanted.sharding}")
        # A process can compare its own shards only: with several, not if the sharding changed.
        if jax.process_count() == 1 or like == abstract(state):
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
class LoadAndBroadcast(Resharding):
    """Measures ``load`` of replicated arrays: one process reads each and sends it to the others."""

    def target(self, context: bench.TestContext) -> Any:
        return abstract(context.pytree)


@dataclass(frozen=True)
class CheckpointerLoopOptions(bench.BenchmarkOptions):
    """Attributes:
    library: ``ckpt`` or ``orbax_v0_manager``.
    train_steps: the number of steps.
    save_interval_steps, max_to_keep, async_enabled: settings of the Checkpointer.
    trained: only leaves whose path begins with this text change from step to step; empty for all.
        The others stay the same array objects, like frozen weights.
    use_local_directory: save to ``--local-directory`` instead of the output.
    """

    library: Literal["ckpt", "orbax_v0_manager"] | list[str] = "ckpt"
    train_steps: int | list[int] = 5
    save_interval_steps: int | list[int] = 1
    max_to_keep: int | list[int] = 2
    async_enabled: bool | list[bool] = True
    trained: str | list[str] = ""
    use_local_directory: bool | list[bool] = False


@bench.benchmark_options(CheckpointerLoopOptions)
class CheckpointerLoop(bench.BenchmarksGenerator):
    """Measures ``train_steps``, in it each ``step`` and ``save``, and then ``restore``."""

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        options: Any = context.options
        given = _data_of(context)
        root = context.local_path if options.use_local_directory else context.path
        if root is None:
            raise bench.Skipped("use_local_directory needs --local-directory")
        metrics, size = bench.Metrics(), total_bytes(given)
        state = _trained(given, options.trained)  # compiles
        if all(map(operator.is_, jax.tree.leaves(given), jax.tree.leaves(state))):
            raise ckpt.CheckpointError(f"trained: no leaf begins with {options.trained!r}")
        open_run = _ours if options.library == "ckpt" else _orbax
        manager, save, _ = open_run(options, root / "steps")
        with bench.settle(), closing(manager), metrics.measure("train_steps"):
            for step in range(options.train_steps):
                with metrics.measure("step", ["time"]):
                    state = jax.block_until_ready(_trained(state, options.trained))
                with metrics.measure("save", ["time"]):
                    save(step, state)
            with metrics.measure("wait_until_finished", ["time"]):
                manager.wait_until_finished()
        saved = options.train_steps - 1 - (options.train_steps - 1) % options.save_interval_steps
        manager, _, restore = open_run(options, root / "steps")
        with bench.settle(), closing(manager):
            with metrics.measure("restore", nbytes=size):
                loaded = jax.block_until_ready(restore(abstract(state)))
            steps = sorted(manager.all_steps())
        if steps[-1] != saved or len(steps) > options.max_to_keep:
            raise ckpt.CheckpointError(f"kept the steps {steps}, wanted {saved} as the newest")
        if saved == options.train_steps - 1:
            check_equal(state, loaded)
        durable = LIBRARIES[options.library].default_durability
        notes = {"steps kept": str(len(steps)), "durable": durable}
        return bench.TestResult(metrics=metrics, notes=notes)


@jax.jit
def _halved(leaf: jax.Array) -> jax.Array:
    return leaf * 0.5 if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) else leaf


def _trained(state: Any, prefix: str) -> Any:
    """The state after a step that halves the leaves below the prefix and takes almost no time."""

    def step(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _halved(leaf) if isinstance(leaf, jax.Array) and name.startswith(prefix) else leaf

    return jax.tree.map_with_path(step, state)


_Manager = tuple[Any, Callable[[int, Any], Any], Callable[[Any], Any]]
"""Of a library: an object to wait for, list and close; what saves a step; and what restores the latest one."""


def _ours(options: Any, directory: Path) -> _Manager:
    manager: Any = ckpt.Checkpointer(
        directory,
        save_interval_steps=options.save_interval_steps,
        max_to_keep=options.max_to_keep,
        asynchronous=options.async_enabled,
    )
    return manager, manager.save, lambda like: manager.restore_latest(state=like)["state"]


def _orbax(options: Any, directory: Path) -> _Manager:
    orbax = make_library(SaveLoadOptions(library=options.library)).api
    settings = orbax.CheckpointManagerOptions(
        save_interval_steps=options.save_interval_steps,
        max_to_keep=options.max_to_keep,
        enable_async_checkpointing=options.async_enabled,
    )
    manager = orbax.CheckpointManager(directory, options=settings)
    return (
        manager,
        lambda step, state: manager.save(step, args=orbax.args.StandardSave(state)),
        lambda like: manager.restore(manager.latest_step(), args=orbax.args.StandardRestore(like)),
    )
