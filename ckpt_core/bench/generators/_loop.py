# ruff: noqa: TID251 (measures other libraries, which are imported inside functions only)
"""Measures a training loop that saves, keeps a few steps and resumes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

import ckpt_core as ckpt
from ckpt_core import bench
from ckpt_core.bench._data import abstract, check_equal, total_bytes
from ckpt_core.bench.generators._save_load import data_of
from ckpt_core.bench.libraries import installed


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
        given, lib = data_of(context), installed(options.library)
        directory = _directory(context, options.use_local_directory)
        metrics, size = bench.Metrics(), total_bytes(given)
        state = _trained(given, options.trained)  # compiles
        if all(map(operator.is_, jax.tree.leaves(given), jax.tree.leaves(state))):
            raise ckpt.CheckpointError(f"trained: no leaf begins with {options.trained!r}")
        open_run = _ours if options.library == "ckpt" else _orbax
        manager, save, _ = open_run(directory, options)
        with bench.settle(), closing(manager), metrics.measure("train_steps"):
            for step in range(options.train_steps):
                with metrics.measure("step", ["time"]):
                    state = jax.block_until_ready(_trained(state, options.trained))
                with metrics.measure("save", ["time"]):
                    save(step, state)
            with metrics.measure("wait_until_finished", ["time"]):
                manager.wait_until_finished()
        saved = options.train_steps - 1 - (options.train_steps - 1) % options.save_interval_steps
        manager, _, restore = open_run(directory, options)
        with bench.settle(), closing(manager):
            with metrics.measure("restore", nbytes=size):
                step, loaded = restore(abstract(state))
                jax.block_until_ready(loaded)
            steps = list(manager.all_steps())
        if step != saved or len(steps) > options.max_to_keep:
            raise ckpt.CheckpointError(f"restored step {step} of {steps}, wanted {saved}")
        if saved == options.train_steps - 1:
            check_equal(state, loaded)
        notes = {"steps kept": str(len(steps)), "durable": lib.default_durability}
        return bench.TestResult(metrics=metrics, notes=notes)


def _directory(context: bench.TestContext, local: bool) -> Path:
    if not local:
        return context.path / "steps"
    if context.local_path is None:
        raise bench.Skipped("use_local_directory needs --local-directory")
    return context.local_path / "steps"


@jax.jit
def _halved(leaf: jax.Array) -> jax.Array:
    return leaf * 0.5 if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) else leaf


def _trained(state: Any, prefix: str) -> Any:
    """The state after a step that halves the leaves below the prefix and takes almost no time."""

    def step(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _halved(leaf) if isinstance(leaf, jax.Array) and name.startswith(prefix) else leaf

    return jax.tree.map_with_path(step, state)


_Manager = tuple[Any, Callable[[int, Any], Any], Callable[[Any], tuple[int | None, Any]]]
"""Of a library: an object to wait for, list and close; what saves a step; and what restores the latest one."""


def _ours(directory: Path, options: Any) -> _Manager:
    manager = ckpt.Checkpointer(
        directory,
        save_interval_steps=options.save_interval_steps,
        max_to_keep=options.max_to_keep,
        asynchronous=options.async_enabled,
    )

    def restore(like: Any) -> tuple[int | None, Any]:
        restored = manager.restore_latest(state=like)
        return (None, None) if restored is None else (restored.step, restored["state"])

    return manager, manager.save, restore


def _orbax(directory: Path, options: Any) -> _Manager:
    import orbax.checkpoint as ocp

    settings: Any = ocp.CheckpointManagerOptions(
        save_interval_steps=options.save_interval_steps,
        max_to_keep=options.max_to_keep,
        enable_async_checkpointing=options.async_enabled,
    )
    manager: Any = ocp.CheckpointManager(directory, options=settings)
    arguments: Any = ocp.args

    def restore(like: Any) -> tuple[int | None, Any]:
        step = manager.latest_step()
        return step, manager.restore(step, args=arguments.StandardRestore(like))

    def save(step: int, state: Any) -> None:
        manager.save(step, args=arguments.StandardSave(state))

    return manager, save, restore
