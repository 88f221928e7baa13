"""The generators that come with ckpt: the same work for ckpt, other libraries and the bare disk."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench._config import ArraySpec, CheckpointConfig
from ckpt_core.bench._data import abstract, check_equal, host_data, total_bytes
from ckpt_core.bench._machine import drop_page_cache, fsync_all, warm_free_memory
from ckpt_core.bench._measure import GB, RATE, TIME
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
        use_load_and_broadcast: one process reads what all hold, and sends it to the others.
    """

    library: str | list[str] = "ckpt"
    durable: bool | list[bool | None] | None = None
    async_enabled: bool | list[bool | None] | None = None
    page_cache: Literal["warm", "cold"] | list[str] = "warm"
    use_load_and_broadcast: bool | list[bool] = False


def _data_of(context: bench.TestContext) -> Any:
    """The data of the suite; raises ``Skipped`` if it has none."""
    if context.pytree is None:
        raise bench.Skipped("needs a checkpoint_config")
    return context.pytree


def _loaded(metrics: bench.Metrics, lib: Library, path: Path, like: Any) -> Any:
    """What a library loads; measures it, and the throughput by its bytes."""
    if lib.options.page_cache == "cold":
        drop_page_cache(path)
    with bench.settle(), metrics.measure("load"):
        loaded = jax.block_until_ready(lib.load(path, like))
    metrics.add("load", RATE, total_bytes(loaded) / metrics.values["load"][TIME][-1] / GB)
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
        prepared, size = lib.prepare(state), total_bytes(state)
        warm_free_memory(path.parent, size)
        with bench.settle(), metrics.measure("save", nbytes=size):
            if lib.background:
                with metrics.measure("save_blocking", ["time"]):
                    wait = lib.start_save(path, prepared)
                with metrics.measure("save_background", ["time"]):
                    wait()
            else:
                lib.save(path, prepared)
            if lib.adds_fsync:
                fsync_all(path)
        loaded = _loaded(metrics, lib, path, like)
        check_equal(state, lib.finish(loaded, like))
        return bench.TestResult(metrics=metrics, notes={"durable": lib.durability})


@dataclass(frozen=True)
class UniformLeavesOptions(SaveLoadOptions):
    """Those of ``SaveLoad``, the number of float32 arrays, and the bytes of each."""

    leaves: int | list[int] = 1000
    leaf_bytes: int | list[int] = 1024


@bench.benchmark_options(UniformLeavesOptions)
class UniformLeaves(SaveLoad):
    """``SaveLoad`` on equal arrays that it makes itself; small ones show the cost per leaf."""

    def state(self, context: bench.TestContext) -> Any:
        shape = (max(1, context.options.leaf_bytes // 4),)
        arrays = ArraySpec("float32", shape, count=context.options.leaves)
        return host_data(CheckpointConfig(spec={"params": arrays}))(context.mesh)


ManySmallLeaves = UniformLeaves  # the name under which Orbax's users look for it


@bench.benchmark_options(SaveLoadOptions)
class Resharding(bench.BenchmarksGenerator):
    """Measures ``load`` onto another sharding than that of the save."""

    def target(self, context: bench.TestContext) -> Any:
        """The abstract tree to load onto."""
        return jax.tree.map(lambda leaf: _turned(leaf, context.mesh), abstract(context.pytree))

    def test_fn(self, context: bench.TestContext) -> bench.TestResult:
        metrics, state = bench.Metrics(), context.pytree
        if state is None or context.mesh is None:
            raise bench.Skipped("needs a checkpoint_config and a mesh_config")
        lib, like = make_library(context.options, sharded=True), self.target(context)
        path = context.path / "ckpt"
        lib.save(path, state)
        loaded = _loaded(metrics, lib, path, like)
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
class LoadAndBroadcastOptions(SaveLoadOptions):
    """Those of ``SaveLoad``, with broadcast turned on."""

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
    max_to_keep, async_enabled: settings of the Checkpointer.
    trained: only leaves whose path begins with this text change from step to step; empty for all.
        The others stay the same array objects, like frozen weights.
    use_local_directory: save to ``--local-directory`` instead of the output.
    """

    library: Literal["ckpt", "orbax_v0_manager"] | list[str] = "ckpt"
    train_steps: int | list[int] = 5
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
        manager, _, restore = open_run(options, root / "steps")
        with bench.settle(), closing(manager):
            with metrics.measure("restore", nbytes=size):
                loaded = jax.block_until_ready(restore(abstract(state)))
            steps = sorted(manager.all_steps())
        if steps[-1] != options.train_steps - 1 or len(steps) > options.max_to_keep:
            raise ckpt.CheckpointError(f"kept the steps {steps} of {options.train_steps}")
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


# an object to wait for, list and close; what saves a step; and what restores the latest one
_Manager = tuple[Any, Callable[[int, Any], Any], Callable[[Any], Any]]


def _ours(options: Any, directory: Path) -> _Manager:
    manager: Any = ckpt.Checkpointer(
        directory, max_to_keep=options.max_to_keep, asynchronous=options.async_enabled
    )
    return manager, manager.save, lambda like: manager.restore_latest(state=like)["state"]


def _orbax(options: Any, directory: Path) -> _Manager:
    lib: Any = make_library(SaveLoadOptions(library=options.library))
    keep, background, args = options.max_to_keep, options.async_enabled, lib.api.args
    manager = lib.manager(directory, background=background, max_to_keep=keep)
    return (
        manager,
        lambda step, state: manager.save(step, args=args.StandardSave(state)),
        lambda like: manager.restore(manager.latest_step(), args=args.StandardRestore(like)),
    )
