"""``CheckpointManager``: the steps of one run."""

from __future__ import annotations

import dataclasses
import datetime
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointExists
from ckpt_core.arguments import answering
from ckpt_orbax._paths import as_text, has_metadata_file, refuse_another_series
from ckpt_orbax._refused import not_offered
from ckpt_orbax.v0 import manager_options
from ckpt_orbax.v0._abstract import AbstractCheckpointer, AbstractCheckpointManager
from ckpt_orbax.v0._item_handlers import ItemHandlers
from ckpt_orbax.v0._manager_reading import DEFAULT_ITEM_NAME, METRIC_ITEM_NAME, Reading
from ckpt_orbax.v0._registration import is_args
from ckpt_orbax.v0._saving import item_to_save
from ckpt_orbax.v0.args import CheckpointArgs, Composite
from ckpt_orbax.v0.checkpointers import AsyncCheckpointer, Checkpointer
from ckpt_orbax.v0.handlers import (
    CheckpointHandler,
    CheckpointHandlerRegistry,
    CompositeCheckpointHandler,
    JsonCheckpointHandler,
)
from ckpt_orbax.v0.manager_options import CheckpointManagerOptions
from ckpt_orbax.v0.metadata import RootMetadata, StepMetadata
from ckpt_orbax.v0.options import AsyncOptions, FileOptions, MultiprocessingOptions
from ckpt_orbax.v1.path.step import prefix_and_length, standard_name_format
from ckpt_orbax.v1.training._decisions import as_saved, keep_policy, save_policy
from ckpt_orbax.v1.training._steps import Steps

METADATA_ITEM_NAME = "metadata"
"""Name of the directory with the metadata of the run."""


class StepAlreadyExistsError(CheckpointExists, ValueError):
    """A checkpoint of this step exists."""


@dataclasses.dataclass
class CheckpointInfo:
    """A step, for functions that choose among steps; ckpt's own policies get ``PolicyCheckpointInfo``.

    Attributes:
        step: its number.
        time: when its save began.
        metrics: of the step, or None.
    """

    step: int
    time: datetime.datetime
    metrics: Any = None


class CheckpointManager(Reading):
    """Saves, keeps and restores the steps of one run, under Orbax's names.

    Args:
        directory: contains the steps. A path, or a URL of a bucket.
        checkpointers: the earlier form of ``item_handlers``: a Checkpointer, or one for each item.
        options: when to save, what to keep.
        metadata: a dict of JSON about the whole run, written when its directory has none yet.
        item_names: items of a Composite, whose handlers the arguments will tell.
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
        if logger is not None:
            raise not_offered(
                "CheckpointManager(logger=)",
                "Orbax's loggers get Orbax's statistics",
                "CheckpointManagerOptions(engine=ckpt_core.Options(on_event=...)), or ckpt_core.events",
            )
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
        self._begin_engine(as_text(directory), options, background)
        self._run_metadata = None
        if metadata is not None and options.save_root_metadata:
            if options.read_only:
                self._run_metadata = dict(metadata)
            elif not has_metadata_file(self._engine):
                self._engine.write_run_metadata(dict(metadata))

    def _begin_engine(
        self, directory: str, options: CheckpointManagerOptions, background: bool
    ) -> None:
        heard = manager_options.engine_options(options)
        prefix, length = options.step_prefix, options.step_format_fixed_length
        if options.step_name_format is not None:
            prefix, length = prefix_and_length(options.step_name_format)
        self._names = options.step_name_format or standard_name_format(
            step_prefix=prefix, step_format_fixed_length=length
        )
        refuse_another_series(directory, prefix, options.step_name_format)
        self._steps = steps = Steps(self._names, options.lightweight_initialize)
        if options.create and "://" not in directory:
            mode = manager_options.mode_of(options)
            os.makedirs(directory, 0o777 if mode is None else mode, exist_ok=True)
        listeners = [
            one for one in (heard.on_event, self._steps.noticed, self._ended) if one is not None
        ]
        self._engine = ckpt.Checkpointer(
            directory,
            save_policy=save_policy(
                manager_options.save_policy(options),
                steps.with_running,
                options.multiprocessing_options,
            ),
            keep_policy=keep_policy(manager_options.preservation_policy(options)),
            step_prefix=prefix,
            step_format_fixed_length=length,
            asynchronous=background,
            read_only=options.read_only,
            options=dataclasses.replace(heard, on_event=ckpt.events.each(*listeners)),
        )
        steps.use(self._engine)
        steps.numbers()

    def _ended(self, event: ckpt.Event) -> None:
        """Listener of the engine: calls the function that is to be told of each save."""
        options = self._options.async_options
        callback = None if options is None else options.post_finalization_callback
        if callback is not None and event.kind == "committed":
            threading.Thread(target=callback, name="ckpt-post-finalization").start()

    # -------------------------------------------------------------------------------------- saves

    def should_save(self, step: int) -> bool:
        """Whether ``save`` would save this step; with several processes, all must call it."""
        if self._options.read_only:
            return False
        newest = self._steps.newest()
        return (newest is None or step > newest) and self._engine.should_save(step)

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
        self.check_args(items, args)
        if self._options.read_only or not (force or self.should_save(step)):
            return False
        self._engine.wait_until_finished()
        if step in self._steps.numbers():
            raise StepAlreadyExistsError(
                f"{self.directory}: Checkpoint for step {step} already exists: delete({step}) first"
            )
        wanted = self._save_args(items, save_kwargs) if args is None else self._by_name(args)
        saved = {
            name: item_to_save(name, one, self._items.of_args(name, one))
            for name, one in wanted.items()
        }
        return self._begin(step, saved, metrics, custom_metadata)

    def _begin(self, step: int, items: dict[str, Any], metrics: Any, metadata: Any) -> bool:
        if self._options.prevent_write_metrics:
            metrics = None
        numbers, told = as_saved(metrics)
        self._steps.begin(step, metrics)
        try:
            begun = self._engine.save(
                step, items={**items, **told}, metrics=numbers, metadata=metadata, force=True
            )
        except BaseException as error:
            self._steps.abandon(step)
            if isinstance(error, ckpt.CheckpointExists):
                raise StepAlreadyExistsError(
                    f"{error}. By this manager: reload(), and restore(latest_step()) goes on from there; delete({step}) removes one"
                ) from error
            raise
        if not begun:
            self._steps.abandon(step)
        return begun

    def _by_name(self, args: CheckpointArgs) -> Mapping[str, Any]:
        return args if isinstance(args, Composite) else {DEFAULT_ITEM_NAME: args}

    def _save_args(self, items: Any, save_kwargs: Any) -> Mapping[str, Any]:
        """The arguments that the earlier form of a save stands for, by item."""
        if self._single:
            items, save_kwargs = {DEFAULT_ITEM_NAME: items}, {DEFAULT_ITEM_NAME: save_kwargs}
        kwargs = save_kwargs or {}
        return {
            name: self._items.args_for(name, True, value, **(kwargs.get(name) or {}))
            for name, value in items.items()
        }

    def is_saving_in_progress(self) -> bool:
        """Whether a save is being written."""
        return bool(self._steps.running)

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended; does not wait for one that is running."""
        if not self._steps.running:
            self._engine.wait_until_finished()

    # -------------------------------------------------------------------------- deletions, the end

    def delete(self, step: int) -> None:
        """Deletes a step, or moves it to ``todelete_subdir``; nothing with ``read_only``.

        Raises:
            FileNotFoundError: there is no such step.
        """
        if self._options.read_only:
            return
        self._engine.wait_until_finished()
        try:
            self._engine.delete(step)
        finally:
            self._steps.look()

    def wait_until_finished(self) -> None:
        """Blocks until no save is running; raises the error of a failed one."""
        self._engine.wait_until_finished()

    def close(self) -> None:
        """As ``wait_until_finished``, and releases the directory."""
        self._engine.close()
        self._items.close()

    def __enter__(self) -> CheckpointManager:
        self._engine.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._engine.__exit__(kind, error, trace)
        self._items.close()


def _check_given(checkpointers: Any, names: Any, by_name: Any, registry: Any) -> None:
    """Raises ValueError if items are described in two ways."""
    given = {
        "checkpointers": checkpointers,
        "item_names": names,
        "item_handlers": by_name,
        "handler_registry": registry,
    }
    present = [name for name, value in given.items() if value]
    together = set(present) == {"item_names", "item_handlers"} and isinstance(by_name, Mapping)
    if len(present) > 1 and not together:
        raise ValueError(f"{' and '.join(present)} are mutually exclusive: give one of them")


def _from_checkpointers(
    given: Any, options: CheckpointManagerOptions
) -> tuple[Any, bool, CheckpointManagerOptions]:
    """Handlers, whether saves go on in the background, and options, from Checkpointers."""
    each = list(given.values()) if isinstance(given, Mapping) else [given]
    for one in each:
        if not isinstance(one, Checkpointer):
            raise ValueError(f"checkpointers must be ocp.Checkpointer, got a {type(one).__name__}")
    background = [one for one in each if isinstance(one, AsyncCheckpointer)]
    if background and options.async_options is None:
        longest = max(background, key=lambda one: one.async_options.timeout_secs)
        options = dataclasses.replace(options, async_options=longest.async_options)
    if isinstance(given, Mapping):
        found: Any = {name: one.handler for name, one in given.items()}
    else:
        found = given.handler
    return found, bool(background), options


def is_async_checkpointer(checkpointer: Any) -> bool:
    """Whether a checkpointer saves in the background."""
    return isinstance(checkpointer, AsyncCheckpointer)


def determine_default_item_mode_from_args(args: Any) -> bool:
    """Whether arguments are of one object without a name."""
    return not isinstance(args, Composite)


__all__ = [
    "DEFAULT_ITEM_NAME",
    "METADATA_ITEM_NAME",
    "METRIC_ITEM_NAME",
    "AbstractCheckpointManager",
    "AbstractCheckpointer",
    "AsyncCheckpointer",
    "AsyncOptions",
    "CheckpointArgs",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "FileOptions",
    "JsonCheckpointHandler",
    "MultiprocessingOptions",
    "RootMetadata",
    "StepAlreadyExistsError",
    "StepMetadata",
    "determine_default_item_mode_from_args",
    "is_async_checkpointer",
]
