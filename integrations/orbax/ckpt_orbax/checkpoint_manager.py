"""``CheckpointManager``: the steps of one run."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointExists
from ckpt_core.arguments import an, answering
from ckpt_orbax import multihost
from ckpt_orbax._errors import StepAlreadyExistsError as StepAlreadyExistsError
from ckpt_orbax._items import ItemHandlers, items_to_save, restored_item, restored_items
from ckpt_orbax._options import (
    CheckpointManagerOptions as CheckpointManagerOptions,
    engine_options,
    preservation_policy,
    save_policy,
)
from ckpt_orbax._paths import as_path, as_text
from ckpt_orbax._refused import refuse_logger
from ckpt_orbax._run import Run
from ckpt_orbax.args import CheckpointArgs, Composite
from ckpt_orbax.checkpoint_managers import Step
from ckpt_orbax.checkpointers import AsyncCheckpointer, Checkpointer as Checkpointer
from ckpt_orbax.handlers import is_args
from ckpt_orbax.metadata import (
    RootMetadata as RootMetadata,
    StepMetadata as StepMetadata,
    described_step,
    described_tree,
    is_metrics,
)
from ckpt_orbax.options import (
    AsyncOptions as AsyncOptions,
    FileOptions as FileOptions,
    MultiprocessingOptions as MultiprocessingOptions,
)
from ckpt_orbax.path.step import checkpoint_steps, standard_name_format

DEFAULT_ITEM_NAME = "default"
"""Name of the item of a manager that saves one object without a name."""
METADATA_ITEM_NAME = "metadata"
"""Name of the directory with the metadata of the run."""
CheckpointInfo = Step
"""A step, for functions that choose among steps."""


class CheckpointManager:
    """Saves, keeps and restores the steps of one run, under Orbax's names.

    Args:
        directory: contains the steps. A path, or a URL of a bucket.
        checkpointers: the earlier form of ``item_handlers``: a Checkpointer, or one for each item.
        options: when to save, what to keep.
        metadata: a dict of JSON about the whole run, written when its directory has none yet.
        item_names: items of a Composite, whose handlers follow from the arguments.
        item_handlers: a handler, or one for each item of a Composite.
        logger: refused, except None.
        handler_registry: handlers by item and class of arguments.

    Example:
        >>> import ckpt_orbax as ocp, jax.numpy as jnp, tempfile
        >>> options = ocp.CheckpointManagerOptions(max_to_keep=2)
        >>> with ocp.CheckpointManager(tempfile.mkdtemp(), options=options) as manager:
        ...     for step in range(3):
        ...         _ = manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(2, step)}))
        ...     manager.wait_until_finished()
        ...     manager.all_steps(), manager.restore(None)["w"].tolist()
        ([1, 2], [2, 2])
    """

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
    ) -> None:
        refuse_logger("CheckpointManager", logger)
        _check_given(checkpointers, item_names, item_handlers, handler_registry)
        self._options = options or CheckpointManagerOptions()
        options, background = self._options, self._options.enable_async_checkpointing
        self._single = None
        if checkpointers is not None:
            item_handlers, background, options = _from_checkpointers(checkpointers, options)
        if item_handlers is not None and not isinstance(item_handlers, Mapping):
            self._single, item_handlers = True, {DEFAULT_ITEM_NAME: item_handlers}
        elif item_names or item_handlers:
            self._single = False
        self._items = ItemHandlers(item_names or (), item_handlers, handler_registry)
        if metadata is not None:
            metadata = dict(metadata) if options.save_root_metadata else None
        self._run_metadata = metadata if options.read_only else None
        mode = getattr(options.file_options, "path_permission_mode", None)
        mode = 0o777 if mode is None else mode
        self._run = Run(
            directory,
            engine_options(options),
            save=save_policy(options),
            keep=preservation_policy(options),
            multiprocessing=options.multiprocessing_options,
            names=options.step_name_format
            or standard_name_format(
                step_prefix=options.step_prefix,
                step_format_fixed_length=options.step_format_fixed_length,
            ),
            light=options.lightweight_initialize,
            metadata=None if options.read_only else metadata,
            mode=mode if options.create and not options.read_only else None,
            then=self._call_back,
            asynchronous=background,
            read_only=options.read_only,
        )

    def _call_back(self, event: ckpt.Event) -> None:
        """Listener of the engine: calls the function that the options name, in a thread of its own."""
        options = self._options.async_options
        callback = None if options is None else options.post_finalization_callback
        if callback is not None and event.kind == "committed":
            threading.Thread(target=callback, name="ckpt-post-finalization").start()

    @property
    def directory(self) -> Any:
        """The directory of the steps."""
        return as_path(self._run.engine.directory)

    _directory = directory

    def all_steps(self, read: bool = False) -> list[int]:
        """The steps that the options keep, saved or being saved, ascending, as of the last save here.

        Args:
            read: list the directory again.
        """
        if read:
            self._run.look()
        return self._run.begun()

    def latest_step(self) -> int | None:
        """The newest step that is saved or being saved, or None; see ``all_steps``."""
        return max(self._run.begun(), default=None)

    @property
    def newest_step(self) -> int | None:
        """As ``latest_step``, also a step that the options do not keep: it stays until the next save, for resuming."""
        return self._run.newest_step()

    def best_step(self) -> int | None:
        """The step with the best metrics by ``best_fn``; without that, the newest; None if there is none."""
        best_fn = self._options.best_fn
        if best_fn is None:
            return self.latest_step()
        measured = [one for one in self._run.described() if one.metrics is not None]
        if not measured:
            return None
        least = self._options.best_mode == "min"
        return sorted(measured, key=lambda one: best_fn(one.metrics), reverse=least)[-1].step

    def reload(self) -> None:
        """Lists the directory again, where others may have saved or deleted."""
        self._run.look(light=False)

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
            found = self._run.engine.run_metadata or self._run_metadata or {}
            return RootMetadata(custom_metadata=found)
        info = self._inspect(step)
        items = {name: item for name, item in info.items.items() if not is_metrics(item)}
        trees = {name: described_tree(info, item) for name, item in items.items()}
        single = self._is_single(info)
        return described_step(info, trees[DEFAULT_ITEM_NAME] if single else Composite(**trees))

    def item_metadata(self, step: int | None) -> Any:
        """The tree of a step, or a Composite of trees, with a description at each leaf.

        Raises:
            ValueError: there is no step number.
        """
        if step is None:
            raise ValueError("a step number is needed: only steps have items")
        return self.metadata(step).item_metadata

    def _is_single(self, info: ckpt.CheckpointInfo) -> bool:
        """Whether the manager saves one object without a name; the first checkpoint decides."""
        if self._single is None:
            self._single = DEFAULT_ITEM_NAME in info.items
        return self._single

    def _inspect(self, step: int, directory: Any = None) -> ckpt.CheckpointInfo:
        self._run.engine.wait_until_finished()
        if directory is None and step in self._run.on_disk():
            return self._run.engine.inspect(step)
        path = self._run.path(step, None if directory is None else as_text(directory))
        try:
            return ckpt.inspect(str(path))
        except ckpt.CheckpointNotFound as error:
            held = ", ".join(map(str, self.all_steps())) or "none"
            what = f"{path.parent}: no step {step}; there are: {held}"
            raise ckpt.CheckpointNotFound(what) from error

    def should_save(self, step: int) -> bool:
        """Whether ``save`` would save this step; with several processes, all must call it."""
        return not self._options.read_only and self._run.should_save(step)

    @answering
    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: CheckpointArgs | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Begins the save of a step, if the options want it; whether it did.

        The arrays are copied when it returns, and a thread writes them: ``wait_until_finished`` says
        that a power cut cannot lose the step. All processes must call it.

        Args:
            step: its number; without ``force`` larger than those before.
            items, save_kwargs: the earlier form of ``args``: objects, and other arguments.
            metrics: JSON of this step, for ``best_fn`` and policies.
            force: save whatever the options say.
            args: what to save, or a Composite of several items.
            custom_metadata: a dict of JSON of this step.

        Raises:
            StepAlreadyExistsError: there is a step of this number, and ``force`` was given.
            ValueError: the arguments do not fit the manager, or there is nothing to save.
            Exception: the error of the save before.
        """
        if items is None and args is None:
            raise ValueError("Must provide `args` for `save`: such as ocp.args.StandardSave(tree)")
        if self._single is None and not is_args(items):
            self._single = not isinstance(args, Composite)
        self._check_args(items, args)
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        self._run.engine.wait_until_finished()
        if step in self._run.numbers():
            raise StepAlreadyExistsError(
                f"{self.directory}: Checkpoint for step {step} already exists: delete({step}) first"
            )
        if args is None:
            wanted = self._earlier_args(True, items, save_kwargs)
        else:
            wanted = args if isinstance(args, Composite) else {DEFAULT_ITEM_NAME: args}
        saved = items_to_save(wanted, self._items)
        kept = None if self._options.prevent_write_metrics else metrics
        try:
            return self._run.save(step, saved, kept, custom_metadata) is not None
        except CheckpointExists as error:
            raise StepAlreadyExistsError(
                f"{error}. By this manager: reload(), and restore(latest_step()) goes on from there; delete({step}) removes one"
            ) from error

    def _earlier_args(self, for_save: bool, items: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments that the earlier form of a save or restore stands for, by item."""
        if self._single:
            items, kwargs = {DEFAULT_ITEM_NAME: items}, {DEFAULT_ITEM_NAME: kwargs}
        items, kwargs = items or {}, kwargs or {}
        return {
            name: self._items.args_for(name, for_save, items.get(name), **(kwargs.get(name) or {}))
            for name in (items if for_save else {**items, **kwargs})
        }

    def is_saving_in_progress(self) -> bool:
        """Whether a save is being written."""
        return bool(self._run.running())

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended; does not wait for one that is running."""
        if not self._run.running():
            self._run.engine.wait_until_finished()

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
        self._check_args(items, args)
        if args is None and not (items is None and restore_kwargs is None):
            wanted = self._earlier_args(False, items, restore_kwargs)
            args = wanted[DEFAULT_ITEM_NAME] if self._single else Composite(**wanted)
        name, items = DEFAULT_ITEM_NAME, self._items
        if not self._single:
            return restored_items(info, args, items, self._options.engine)
        if name not in info.items:
            held = ", ".join(info.items) or "none"
            raise KeyError(f'Item "{name}" was not found in the checkpoint: it has {held}')
        handler = items.known(name) if args is None else items.of_args(name, args)
        return restored_item(info, name, args, handler, self._options.engine)

    def _check_args(self, items: Any, args: Any) -> None:
        """Raises ValueError if arguments are of the wrong kind for this manager."""
        if is_args(items):
            raise ValueError(
                "CheckpointArgs came as `items`, the earlier form: write args=ocp.args..., by its name"
            )
        if args is not None and not is_args(args):
            raise ValueError(f"args must be CheckpointArgs, got {an(args)}")
        if args is not None and bool(self._single) == isinstance(args, Composite):
            raise ValueError(
                "Cannot provide `args` of type `Composite` when dealing with a single, unnamed (default) "
                "checkpointable object. Give the arguments of the object itself"
                if self._single
                else "Must provide `args` of type `Composite` when dealing with multiple checkpointable "
                "objects. Write args=ocp.args.Composite(state=...)"
            )

    def delete(self, step: int) -> None:
        """Deletes a step, or moves it to ``todelete_subdir``; nothing with ``read_only``.

        Raises:
            FileNotFoundError: there is no such step.
        """
        if not self._options.read_only:
            self._run.delete(step)

    def wait_until_finished(self) -> None:
        """Blocks until no save is running; raises the error of a failed one."""
        self._run.engine.wait_until_finished()

    def close(self) -> None:
        """As ``wait_until_finished``, and releases the directory."""
        try:
            self._run.engine.close()
        finally:
            self._items.close()

    def __enter__(self) -> CheckpointManager:
        self._run.engine.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._run.engine.__exit__(kind, error, trace)
        finally:
            self._items.close()


def _check_given(checkpointers: Any, names: Any, by_name: Any, registry: Any) -> None:
    """Raises ValueError if items are described in two ways."""
    given = {"checkpointers": checkpointers, "item_names": names, "item_handlers": by_name}
    present = [name for name, one in {**given, "handler_registry": registry}.items() if one]
    together = set(present) == {"item_names", "item_handlers"} and isinstance(by_name, Mapping)
    if len(present) > 1 and not together:
        raise ValueError(f"{' and '.join(present)} are mutually exclusive: give one of them")


def _from_checkpointers(
    given: Any, options: CheckpointManagerOptions
) -> tuple[Any, bool, CheckpointManagerOptions]:
    """Handlers, whether saves go on in the background, and options, from Checkpointers."""
    each: Mapping[Any, Any] = given if isinstance(given, Mapping) else {DEFAULT_ITEM_NAME: given}
    for one in each.values():
        if not isinstance(one, Checkpointer):
            raise ValueError(f"checkpointers must be ocp.Checkpointer, got {an(one)}")
    background = [one for one in each.values() if isinstance(one, AsyncCheckpointer)]
    if background and options.async_options is None:
        longest = max(background, key=lambda one: one.async_options.timeout_secs)
        options = dataclasses.replace(options, async_options=longest.async_options)
    found = {name: one.handler for name, one in each.items()}
    return found if each is given else found[DEFAULT_ITEM_NAME], bool(background), options
