"""``CheckpointManagerOptions``: when to save, what to keep, how steps are named; and what options mean to ckpt."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import jax

import ckpt_core as ckpt
from ckpt_orbax import checkpoint_managers as policies
from ckpt_orbax._refused import Refusals, refuse_options
from ckpt_orbax.options import AsyncOptions, FileOptions, MultiprocessingOptions


@dataclass
class CheckpointManagerOptions:
    """Options of a ``CheckpointManager``.

    Attributes:
        save_interval_steps: saves steps that are multiples of it, besides the first one of a run.
        max_to_keep: how many of the newest steps stay; with ``best_fn``, of the best.
        keep_time_interval: also one step in each such interval stays.
        keep_period: also steps that are multiples of it stay.
        best_fn: a number from the metrics of a step, by which the best steps stay.
        best_mode: ``"max"`` or ``"min"``.
        keep_checkpoints_without_metrics: with ``best_fn``, whether steps without metrics stay.
        step_prefix, step_format_fixed_length, step_name_format: names of the steps' directories.
        create: make the directory if it is missing.
        save_on_steps: also saves these steps.
        todelete_subdir: steps are moved into this directory instead of being deleted.
        read_only: never save or delete, nor make the directory.
        enable_async_checkpointing: a save returns once the arrays are copied.
        async_options, multiprocessing_options, file_options: see their classes.
        should_save_fn: called with a step and the newest one; instead of ``save_interval_steps`` and
            ``save_on_steps``.
        save_decision_policy: instead of all options that say when to save.
        preservation_policy: instead of all options that say what stays.
        save_root_metadata: write the manager's ``metadata``.
        prevent_write_metrics: do not store metrics.
        cleanup_tmp_directories, single_host_load_and_broadcast, enable_background_delete,
            num_deletion_threads, atomicity_options, temporary_path_class: of no effect.
        lightweight_initialize: leave metrics and times of earlier steps out.
        todelete_full_path, enable_per_process_directory_creation,
            enable_should_save_is_saving_in_progress_check: refused, except their defaults.
        engine: ckpt's own ``Options``, which Orbax does not have.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = field(default_factory=FileOptions)
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: Any = None
    preservation_policy: Any = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False
    engine: ckpt.Options = field(default_factory=ckpt.Options)

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', got {self.best_mode!r}")
        for name in ("max_to_keep", "keep_period", "save_interval_steps"):
            if isinstance(getattr(self, name), (str, float)):
                raise TypeError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        if self.max_to_keep is not None and self.max_to_keep < 0:
            raise ValueError(f"max_to_keep must not be negative, got {self.max_to_keep}")


@dataclass
class _ByFunction(policies.SaveDecisionPolicy):
    """Saves steps as a function of the step and the newest one says."""

    function: Callable[[int, int | None], bool]

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return self.function(step.step, previous_steps[-1].step if previous_steps else None)


def save_policy(options: CheckpointManagerOptions) -> Any:
    """When to save: by default multiples of the interval, the first step, and at a preemption."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    preempted = policies.PreemptionCheckpointingPolicy()
    if options.should_save_fn is not None:
        return policies.AnySavePolicy([_ByFunction(options.should_save_fn), preempted])
    saved: list[Any] = [preempted, policies.InitialSavePolicy()]
    if options.save_interval_steps:
        saved.append(policies.FixedIntervalPolicy(options.save_interval_steps))
    if options.save_on_steps is not None:
        saved.append(policies.SpecificStepsPolicy(options.save_on_steps))
    return policies.AnySavePolicy(saved)


def preservation_policy(options: CheckpointManagerOptions) -> Any:
    """What stays: by default all steps; ValueError for a policy and an option that it replaces."""
    if options.preservation_policy is not None:
        if options.max_to_keep or options.keep_period or options.keep_time_interval:
            raise ValueError(
                "preservation_policy replaces max_to_keep, keep_period and keep_time_interval: give either"
            )
        return options.preservation_policy
    kept: list[Any] = []
    if options.keep_period is not None:
        kept.append(policies.EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        kept.append(policies.EveryNSeconds(int(options.keep_time_interval.total_seconds())))
    if options.best_fn is None:
        return policies.AnyPreservationPolicy([*kept, policies.LatestN(options.max_to_keep)])
    best = policies.BestN(
        get_metric_fn=options.best_fn,
        reverse=options.best_mode == "min",
        n=options.max_to_keep,
        keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
    )
    return policies.AnyPreservationPolicy([*kept, best])


_PER_HOST = "for disks of each host, ckpt_core.Checkpointer(local_directory=)"
_OWN_BARRIERS = "ckpt's processes agree by their own barriers, which name who is missing"
_REFUSED_ASYNC: Refusals = {"barrier_sync_fn": (None, _OWN_BARRIERS)}
_REFUSED: Refusals = {
    "todelete_full_path": (None, "ckpt moves steps to a directory beside them", "todelete_subdir="),
    "enable_per_process_directory_creation": (
        False,
        "all processes write one directory",
        _PER_HOST,
    ),
    "enable_should_save_is_saving_in_progress_check": (
        True,
        "a policy always knows whether a save is running",
    ),
}


def engine_options(options: CheckpointManagerOptions) -> ckpt.Options:
    """The options of ckpt that those of a manager stand for; NotOffered if one of them would mean something else."""
    refuse_processes(options.multiprocessing_options)
    refuse_options("CheckpointManagerOptions({}={!r})", options, _REFUSED)
    trash = options.todelete_subdir
    changes = {} if trash is None else {"trash_directory": trash}
    return changed(options.engine, options.async_options, options.file_options, **changes)


def refuse_processes(
    options: MultiprocessingOptions | None, shown: str = "MultiprocessingOptions({}={!r})"
) -> None:
    """Raises NotOffered if not all processes take part, led by 0; ``shown`` formats a field and its value."""
    active = None if options is None else options.active_processes
    everyone = active if active is None or len(active) == jax.process_count() else None
    why = "all processes take part in a checkpoint"
    refusals: Refusals = {
        "primary_host": (0, "process 0 leads", _PER_HOST),
        "active_processes": (everyone, why, "save with all of them"),
    }
    if options is not None:
        refuse_options(shown, options, refusals)


def changed(
    engine: ckpt.Options, asynchronous: AsyncOptions | None, files: Any = None, **changes: Any
) -> ckpt.Options:
    """ckpt's options with the timeout of Orbax's, and a mode that takes permissions of complete directories away."""
    if asynchronous is not None:
        refuse_options("AsyncOptions({}=)", asynchronous, _REFUSED_ASYNC)
        if asynchronous.timeout_secs != AsyncOptions.timeout_secs:
            changes["timeout_secs"] = float(asynchronous.timeout_secs)
    mode = getattr(files, "path_permission_mode", None)
    if mode is None:
        return dataclasses.replace(engine, **changes)

    def restrict(event: ckpt.Event) -> None:
        if event.kind == "committed" and "://" not in event.path and jax.process_index() == 0:
            path = pathlib.Path(event.path)
            with contextlib.suppress(FileNotFoundError):  # it may have been deleted by now
                for directory in (path, *(child for child in path.iterdir() if child.is_dir())):
                    os.chmod(directory, directory.stat().st_mode & mode)

    listeners = [one for one in (restrict, engine.on_event) if one is not None]
    return dataclasses.replace(engine, on_event=ckpt.events.each(*listeners), **changes)
