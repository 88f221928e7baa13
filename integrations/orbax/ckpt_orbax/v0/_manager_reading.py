"""What a ``CheckpointManager`` knows of the steps, and how it restores them."""

from __future__ import annotations

from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_core.arguments import answering
from ckpt_orbax import multihost
from ckpt_orbax._paths import as_path, as_text
from ckpt_orbax.v0._checkpointer import restored_items
from ckpt_orbax.v0._item_handlers import ItemHandlers
from ckpt_orbax.v0._registration import is_args
from ckpt_orbax.v0._restoring import restored_item
from ckpt_orbax.v0.args import CheckpointArgs, Composite
from ckpt_orbax.v0.manager_options import CheckpointManagerOptions
from ckpt_orbax.v0.metadata import RootMetadata, StepMetadata, described_step, described_tree
from ckpt_orbax.v0.utils import checkpoint_steps
from ckpt_orbax.v1.training._steps import Steps

DEFAULT_ITEM_NAME = "default"
"""Name of the item of a manager that saves one object without a name."""
METRIC_ITEM_NAME = "metrics"
"""Name of the directory with the metrics of a step."""


class Reading:
    """The half of a CheckpointManager that changes nothing."""

    _engine: ckpt.Checkpointer
    _options: CheckpointManagerOptions
    _steps: Steps
    _items: ItemHandlers
    _names: Any
    _single: bool | None
    _run_metadata: dict[str, Any] | None

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return as_path(self._engine.directory)

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps that are saved or being saved, ascending, as of the last save here.

        Args:
            read: list the directory again.
        """
        if read:
            self._steps.look()
        return self._steps.begun()

    def latest_step(self) -> int | None:
        """The newest step that is saved or being saved, or None; see ``all_steps``."""
        return self._steps.newest()

    def best_step(self) -> int | None:
        """The step with the best metrics by ``best_fn``; without that, the newest; None if there is none."""
        best_fn = self._options.best_fn
        if best_fn is None:
            return self.latest_step()
        measured = [one for one in self._steps.with_running() if one.metrics is not None]
        if self._options.best_mode == "min":
            return min(reversed(measured), key=lambda one: best_fn(one.metrics), default=_NONE).step
        return max(reversed(measured), key=lambda one: best_fn(one.metrics), default=_NONE).step

    def reload(self) -> None:
        """Lists the directory again, where others may have saved or deleted."""
        self._steps.look(light=False)

    def reached_preemption(self, step: int) -> bool:
        """Whether jax's preemption service says to save this step and stop; False without it."""
        return multihost.reached_preemption(step)

    def metrics(self, step: int) -> Any:
        """The metrics that were saved with a step, or None."""
        return described_step(self._inspect(step), None).metrics or None

    def metadata(self, step: int | None = None) -> Any:
        """What a step says of itself, without its arrays; what was said of the whole run for None.

        Raises:
            FileNotFoundError: there is no such step.
        """
        if step is None:
            return RootMetadata(custom_metadata=self._root_metadata())
        info = self._inspect(step)
        return described_step(info, self._described_items(info))

    def item_metadata(self, step: int | None) -> Any:
        """The tree of a step, or a Composite of trees, with a description at each leaf.

        Raises:
            ValueError: there is no step number.
        """
        if step is None:
            raise ValueError("a step number is needed: only steps have items")
        metadata: StepMetadata = self.metadata(step)
        return metadata.item_metadata

    def _described_items(self, info: CheckpointInfo) -> Any:
        trees = {
            name: described_tree(info, item)
            for name, item in info.items.items()
            if not (name == METRIC_ITEM_NAME and item.form == "json")
        }
        return trees[DEFAULT_ITEM_NAME] if self._is_single(info) else Composite(**trees)

    def _root_metadata(self) -> dict[str, Any]:
        return self._engine.run_metadata or self._run_metadata or {}

    def _is_single(self, info: CheckpointInfo) -> bool:
        """Whether the manager saves one object without a name; the first checkpoint decides."""
        if self._single is None:
            self._single = DEFAULT_ITEM_NAME in info.items
        return self._single

    def _inspect(self, step: int, directory: Any = None) -> CheckpointInfo:
        self._engine.wait_until_finished()
        if directory is None and step in self._steps.numbers():
            return self._engine.inspect(step)
        place = as_path(self._engine.directory if directory is None else as_text(directory))
        try:
            return ckpt.inspect(str(place / self._names.build_name(step)))
        except ckpt.CheckpointNotFound as error:
            held = ", ".join(map(str, self.all_steps())) or "none"
            raise ckpt.CheckpointNotFound(f"{place}: no step {step}; there are: {held}") from error

    # ----------------------------------------------------------------------------------- restores

    @answering
    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: Any = None,
        args: CheckpointArgs | None = None,
    ) -> Any:
        """What was saved as a step, verified; waits for a running save.

        Args:
            step: its number; None for the newest.
            items, restore_kwargs: the earlier form of ``args``: targets, and other arguments.
            directory: of another run.
            args: how the object, or each of the items of a Composite, is wanted. None: as saved.

        Returns:
            The object; or a Composite, if the items have names.

        Raises:
            FileNotFoundError: there is no such step.
            KeyError: the step lacks an item.
            ValueError: target and checkpoint differ, or the arguments do not fit what was saved.
        """
        if step is None:
            steps = self.all_steps() if directory is None else checkpoint_steps(directory)
            if not steps:
                raise ckpt.CheckpointNotFound(f"No steps found in {directory or self.directory}.")
            step = max(steps)
        if isinstance(step, str):
            raise TypeError(f"step must be an integer, got the text {step!r}")
        info = self._inspect(step, directory)
        self._is_single(info)
        self.check_args(items, args)
        if args is None:
            args = self._restore_args(items, restore_kwargs)
        if not self._single:
            return restored_items(info, args, self._items, self._engine_options)
        if DEFAULT_ITEM_NAME not in info.items:
            held = ", ".join(info.items) or "none"
            raise KeyError(
                f'Item "{DEFAULT_ITEM_NAME}" was not found in the checkpoint: it has {held}'
            )
        handler = (
            self._items.known(DEFAULT_ITEM_NAME)
            if args is None
            else self._items.of_args(DEFAULT_ITEM_NAME, args)
        )
        return restored_item(info, DEFAULT_ITEM_NAME, args, handler, self._engine_options)

    @property
    def _engine_options(self) -> ckpt.Options:
        return self._options.engine

    def _restore_args(self, items: Any, restore_kwargs: Any) -> CheckpointArgs | None:
        """The arguments that the earlier form of a restore stands for; None to restore all."""
        if items is None and restore_kwargs is None:
            return None
        if self._single:
            return self._items.args_for(DEFAULT_ITEM_NAME, False, items, **(restore_kwargs or {}))
        items, kwargs = items or {}, restore_kwargs or {}
        return Composite(
            **{
                name: self._items.args_for(name, False, items.get(name), **(kwargs.get(name) or {}))
                for name in {**items, **kwargs}
            }
        )

    def check_args(self, items: Any, args: Any) -> None:
        """Raises ValueError if arguments are of the wrong kind for this manager."""
        if is_args(items):
            raise ValueError(
                "CheckpointArgs came as `items`, the earlier form: write args=ocp.args..., by its name"
            )
        if args is None:
            return
        if not is_args(args):
            raise ValueError(f"args must be CheckpointArgs, got a {type(args).__name__}")
        if self._single and isinstance(args, Composite):
            raise ValueError(
                "Cannot provide `args` of type `Composite` when dealing with a single, unnamed (default) "
                "checkpointable object. Give the arguments of the object itself"
            )
        if not self._single and not isinstance(args, Composite):
            raise ValueError(
                "Must provide `args` of type `Composite` when dealing with multiple checkpointable "
                "objects. Write args=ocp.args.Composite(state=...)"
            )


class _No:
    step = None


_NONE: Any = _No()
