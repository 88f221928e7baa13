# ruff: noqa: TID251 (measures other libraries, which are imported inside functions only)
"""Measures a training loop that saves, keeps a few steps and resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

import ckpt_core as ckpt
from ckpt_core.bench._check import check_equal
from ckpt_core.bench._core import (
    BenchmarkOptions,
    BenchmarksGenerator,
    Skipped,
    TestContext,
    TestResult,
    benchmark_options,
)
from ckpt_core.bench._data import abstract, total_bytes
from ckpt_core.bench._measure import Metrics
from ckpt_core.bench._settle import settle
from ckpt_core.bench.libraries import library


@dataclass(frozen=True)
class CheckpointerLoopOptions(BenchmarkOptions):
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


@benchmark_options(CheckpointerLoopOptions)
class CheckpointerLoop(BenchmarksGenerator):
    """Measures ``train_steps``, in it each ``step`` and ``save``, and then ``restore``."""

    def test_fn(self, context: TestContext) -> TestResult:
        options: Any = context.options
        state = context.pytree
        if state is None:
            raise Skipped("needs a checkpoint_config with a spec or a path")
        directory = _directory(context, options.use_local_directory)
        train = _training(options.trained)
        metrics, size = Metrics(), total_bytes(state)
        state = train(state)  # compiles
        with settle(), _manager(directory, options) as manager, metrics.measure("train_steps"):
            for step in range(options.train_steps):
                with metrics.measure("step", ["time"]):
                    state = jax.block_until_ready(train(state))
                with metrics.measure("save", ["time"]):
                    manager.save(step, state)
            with metrics.measure("wait_until_finished", ["time"]):
                manager.wait()
        saved = options.train_steps - 1 - (options.train_steps - 1) % options.save_interval_steps
        with settle(), _manager(directory, options) as manager:
            with metrics.measure("restore", nbytes=size):
                step, loaded = manager.restore(abstract(state))
                jax.block_until_ready(loaded)
            steps = manager.steps()
        if step != saved or len(steps) > options.max_to_keep:
            raise ckpt.CheckpointError(f"restored step {step} of {steps}, wanted {saved}")
        if saved == options.train_steps - 1:
            check_equal(state, loaded)
        return TestResult(
            metrics=metrics, notes={"steps kept": str(len(steps)), "durable": manager.durable}
        )


def _directory(context: TestContext, local: bool) -> Path:
    if not local:
        return context.path / "steps"
    if context.local_path is None:
        raise Skipped("use_local_directory needs --local-directory")
    return context.local_path / "steps"


def _training(prefix: str) -> Callable[[Any], Any]:
    """A training step that halves the leaves below the prefix and takes almost no time."""

    @jax.jit
    def change(leaves: list[Any]) -> list[Any]:
        return [
            leaf * 0.5 if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) else leaf
            for leaf in leaves
        ]

    def train(state: Any) -> Any:
        paths, structure = jax.tree.flatten_with_path(state)
        leaves = [leaf for _, leaf in paths]
        chosen = [
            position
            for position, (path, leaf) in enumerate(paths)
            if isinstance(leaf, jax.Array)
            and jax.tree_util.keystr(path, simple=True, separator="/").startswith(prefix)
        ]
        if not chosen:
            raise ckpt.CheckpointError(f"trained: no leaf begins with {prefix!r}")
        changed = change([leaves[position] for position in chosen])
        for position, leaf in zip(chosen, changed, strict=True):
            leaves[position] = leaf
        return jax.tree.unflatten(structure, leaves)

    return train


class _Ours:
    durable = library("ckpt").default_durability

    def __init__(self, directory: Path, options: Any) -> None:
        self._checkpointer = ckpt.Checkpointer(
            directory,
            save_interval_steps=options.save_interval_steps,
            max_to_keep=options.max_to_keep,
            asynchronous=options.async_enabled,
        )

    def __enter__(self) -> _Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(self, step: int, state: Any) -> None:
        self._checkpointer.save(step, state)

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def steps(self) -> list[int]:
        return self._checkpointer.all_steps()

    def restore(self, like: Any) -> tuple[int | None, Any]:
        restored = self._checkpointer.restore_latest(state=like)
        return (None, None) if restored is None else (restored.step, restored["state"])


class _Orbax:
    durable = library("orbax_v0_manager").default_durability

    def __init__(self, directory: Path, options: Any) -> None:
        import orbax.checkpoint as ocp

        settings: Any = ocp.CheckpointManagerOptions(
            save_interval_steps=options.save_interval_steps,
            max_to_keep=options.max_to_keep,
            enable_async_checkpointing=options.async_enabled,
        )
        self._ocp: Any = ocp
        self._manager: Any = ocp.CheckpointManager(directory, options=settings)

    def __enter__(self) -> _Orbax:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        return list(self._manager.all_steps())

    def restore(self, like: Any) -> tuple[int | None, Any]:
        step = self._manager.latest_step()
        return step, self._manager.restore(step, args=self._ocp.args.StandardRestore(like))


def _manager(directory: Path, options: Any) -> _Ours | _Orbax:
    if options.library == "ckpt":
        return _Ours(directory, options)
    try:
        return _Orbax(directory, options)
    except ModuleNotFoundError as error:
        raise Skipped(f"orbax_v0_manager is not installed: {error}") from error
