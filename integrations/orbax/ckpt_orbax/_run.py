"""The run under both faces: ckpt's Checkpointer, the steps that it has, and Orbax's policies as ckpt asks them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_orbax import checkpoint_managers as policies
from ckpt_orbax._paths import as_path, as_text, refuse_another_series
from ckpt_orbax.checkpoint_managers import CheckpointMetadata, Step
from ckpt_orbax.metadata import TO_RESUME, metrics_of, only_to_resume, times_of
from ckpt_orbax.options import MultiprocessingOptions
from ckpt_orbax.path.step import prefix_and_length, standard_name_format


class Save:
    """One save of a step, from its beginning."""

    def __init__(self, metrics: Any) -> None:
        self.metrics, self.began_nsecs = metrics, time.time_ns()
        self.dropped = set[int]()  # what does not stay beside it
        self.over = threading.Event()
        self.error: BaseException | None = None


class Run:
    """A Checkpointer with its committed steps as of the last look, and the step that is being saved.

    It lists the directory when it is made, after each save and deletion of its own, and after ``look``. Its steps are
    those that Orbax would have kept; ``newest_step`` may be another one, which is kept only for resuming. ``light`` omits
    time and metrics of the steps until ``look(light=False)``; without a ``mode`` a missing directory stays missing;
    ``then`` is a listener behind those of ``options`` and the run; the Checkpointer gets ``**engine``.
    """

    def __init__(
        self,
        directory: Any,
        options: ckpt.Options,
        *,
        save: Any,
        keep: Any,
        multiprocessing: MultiprocessingOptions,
        names: Any = None,
        light: bool = False,
        metadata: Any = None,
        mode: int | None = 0o777,
        then: Callable[[ckpt.Event], None] | None = None,
        **engine: Any,
    ) -> None:
        self._names = names or standard_name_format()
        prefix, length = prefix_and_length(self._names)
        refuse_another_series(as_text(directory), prefix)
        self._light = light
        self._lock = threading.Lock()
        self._numbers: list[int] = []
        self._known: dict[int, Step] = {}
        self._begun: dict[int, Save] = {}
        self._keep = keep
        self._dropped: set[int] = set()
        self._marked: set[int] = set()  # on disk, as of the last look
        self._stale = self._marks_unread = True
        # The caller's listener first: a save whose listener has not returned goes on.
        listeners = [one for one in (options.on_event, self._notice, then) if one is not None]
        self.engine = ckpt.Checkpointer(
            as_text(directory),
            save_policy=_save_policy(save, self.described, multiprocessing),
            keep_policy=None if keep is None else self._kept_of,
            step_prefix=prefix,
            step_format_fixed_length=length,
            options=dataclasses.replace(options, on_event=ckpt.events.each(*listeners)),
            **engine,
        )
        if mode is not None and "://" not in self.engine.directory:
            os.makedirs(self.engine.directory, mode, exist_ok=True)  # callers look for it at once
        self.on_disk()
        if metadata is not None and self.engine.run_metadata is None:
            self.engine.write_run_metadata(metadata)

    def should_save(self, step: int) -> bool:
        """Whether a step is newer than all others, and the policy wants it."""
        return step > max(self.begun(), default=step - 1) and self.engine.should_save(step)

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        metrics: Any,
        metadata: Any,
        *,
        overwrite: bool = False,
    ) -> Save | None:
        """Begins a save, whatever the policy says; None if ckpt does not save the step.

        As with Orbax, an error of the policy that says what stays is raised once the save has begun.
        """
        numbers, as_json, step = *_as_saved(metrics), int(step)
        self._delete_newer(step)
        save, begun, error = Save(metrics), False, None
        others = [one for one in self.begun() if one != step]
        try:
            if self._keep is not None:
                asked = [*self._for_policy(others), self._of_save(step, save)]
                kept = self._keep.should_preserve(asked, context=policies.PreservationContext())
                save.dropped = {one.step for one, stay in zip(asked, kept, strict=True) if not stay}
                if step in save.dropped and (metadata is None or isinstance(metadata, dict)):
                    metadata = {**(metadata or {}), TO_RESUME: step}
        except Exception as caught:
            error = caught
        try:
            with self._lock:
                self._dropped.discard(step)
                self._marked.discard(step)
                self._begun = {one: of for one, of in self._begun.items() if not of.over.is_set()}
                self._begun[step] = save
            begun = self.engine.save(
                step,
                items={**items, **as_json},
                metrics=numbers,
                metadata=metadata,
                force=True,
                overwrite=overwrite,
            )
        finally:
            if not begun:
                with self._lock:
                    self._begun.pop(step, None)
        if error is not None:
            raise error
        return save if begun else None

    def _delete_newer(self, step: int) -> None:
        """Deletes steps that are kept only for resuming and are not older than one to be saved: with Orbax they are gone."""
        newer = {one for one in self.on_disk() if one >= step}
        if not newer or newer & set(self.begun()):
            return
        if step > 0:
            self.engine.rollback_to(step - 1)
            self.look()
            return
        for one in newer:
            self.delete(one)

    def _notice(self, event: ckpt.Event) -> None:
        """Listener of the engine: notes the end of a save, in the thread that saves."""
        if event.step is None or event.kind not in ("committed", "save_failed", "deleted"):
            return
        with self._lock:
            self._stale = True
            self._known.pop(event.step, None)  # another save may have replaced the step
            save = None if event.kind == "deleted" else self._begun.get(event.step)
            if save is not None and event.kind == "committed":
                self._dropped |= save.dropped
        if save is not None:
            save.error = event.error
            save.over.set()

    def wait_for(self, step: int, save: Save, timeout: float | None) -> bool:
        """Blocks until a save of its own is over; True, or its error, also after another call has raised that."""
        if timeout is not None and not save.over.wait(timeout):
            where = f"{self.engine.directory}: step {step}"
            raise TimeoutError(f"{where} is not saved after {timeout:g} s")
        self.engine.wait_until_finished()
        if save.error is not None:
            raise save.error
        return True

    def delete(self, step: int) -> None:
        """Deletes a step, after a running save."""
        self.engine.wait_until_finished()
        try:
            self.engine.delete(step)
        finally:
            self.look()

    def look(self, *, light: bool = True) -> None:
        """Lists the directory again at the next question; from then on with all of each step if not ``light``."""
        with self._lock:
            self._stale = self._marks_unread = True
            self._light = self._light and light

    def running(self) -> dict[int, Save]:
        """The steps that are being saved."""
        with self._lock:
            return {step: save for step, save in self._begun.items() if not save.over.is_set()}

    def on_disk(self) -> list[int]:
        """The committed steps, ascending, also one that is kept only for resuming."""
        with self._lock:
            if not self._stale:
                return list(self._numbers)
            # process 0 deletes what no policy keeps, and does not report it to the others
            self._stale = jax.process_index() > 0
        numbers = self.engine.all_steps()
        with self._lock:
            self._numbers = numbers
            self._known = {step: one for step, one in self._known.items() if step in numbers}
        return list(numbers)

    def numbers(self) -> list[int]:
        """The committed steps that Orbax would have, ascending."""
        running = self.running()
        return [step for step in self.begun() if step not in running]

    def begun(self) -> list[int]:
        """The steps that Orbax would have, committed or being saved, ascending."""
        # what runs first: a save that ends meanwhile is then in both, else in neither
        running, there = self.running(), self.on_disk()
        if self._marks_unread:
            self._marks_unread = False
            found = [(step, self.path(step)) for step in there]
            parts = () if self._keep is None else _parts(self._keep)
            keeps_none = [getattr(one, "n", 1) == 0 for one in parts]
            self._marked = only_to_resume(found, also_all=bool(keeps_none) and all(keeps_none))
        gone = self._dropped.union(self._marked, *(save.dropped for save in running.values()))
        return sorted({*there, *running} - gone)

    def newest_step(self) -> int | None:
        """The newest step of all, committed or being saved."""
        return max({*self.running(), *self.on_disk()}, default=None)

    def _for_policy(self, numbers: Sequence[int]) -> list[Step]:
        """Steps as policies see them; what cannot be read stays, and no policy learns of it."""
        if all(isinstance(one, policies.BY_NUMBER) for one in _parts(self._keep)):
            return [CheckpointMetadata(step, None) for step in numbers]
        steps: list[Step] = []
        for step in numbers:
            with contextlib.suppress(ckpt.CheckpointError, OSError):
                steps.append(self.describe(step, light=False))
        return steps

    def _kept_of(self, facts: Sequence[Any]) -> list[int]:
        """Policy of the engine: all but those that Orbax's policy did not keep at the saves that are committed."""
        there = {one.step for one in facts}
        with self._lock:
            saves = [save.dropped for step, save in self._begun.items() if step in there]
            return sorted(there - self._dropped.union(self._marked, *saves))

    def described(self) -> list[Step]:
        """The steps that are committed or being saved, oldest first."""
        steps: list[Step] = []
        for step in self.begun():
            with contextlib.suppress(ckpt.CheckpointNotFound):  # deleted since the last look
                steps.append(self.describe(step))
        return steps

    def describe(self, step: int, *, light: bool | None = None) -> Step:
        """What is known of a step; ``light`` leaves time and metrics out, by default as the run does."""
        save = self.running().get(step)
        if save is not None:
            return self._of_save(step, save)
        if self._light if light is None else light:
            return CheckpointMetadata(step, self.path(step))
        known = self._known.get(step)
        if known is None:
            info = self.engine.inspect(step)
            times, metrics = times_of(info), metrics_of(info)
            known = CheckpointMetadata[None](step, as_path(info.path), **times, metrics=metrics)
            self._known[step] = known
        return known

    def _of_save(self, step: int, save: Save) -> Step:
        return CheckpointMetadata(
            step, self.path(step), init_timestamp_nsecs=save.began_nsecs, metrics=save.metrics
        )

    def path(self, step: int, directory: str | None = None) -> Any:
        """Where a step is, or will be; in another directory, where it would be."""
        return as_path(directory or self.engine.directory) / self._names.build_name(step)


def _save_policy(
    policy: Any,
    previous_steps: Callable[[], Sequence[Step]],
    multiprocessing: MultiprocessingOptions,
) -> ckpt.when.SavePolicy:
    """Orbax's policy as ckpt asks it; process 0 decides for all."""

    def decide(step: int, context: ckpt.when.SaveContext) -> bool:
        now = CheckpointMetadata[None](step, None, commit_timestamp_nsecs=time.time_ns())
        known = policies.DecisionContext(
            is_saving_in_progress=context.saving,
            reached_preemption=context.preempted,
            multiprocessing_options=multiprocessing,
        )
        return bool(policy.should_save(now, previous_steps(), context=known))

    # A process without jax.distributed has no preemption service: there, as with Orbax, SIGTERM
    # ends it. If ckpt listened for SIGTERM, the process would live on, and no policy would learn of it.
    asks = any(not isinstance(one, policies.NEVER_AT_PREEMPTION) for one in _parts(policy))
    return ckpt.when.SavePolicy(decide, repr(policy), asks and jax.distributed.is_initialized())


def _parts(policy: Any) -> list[Any]:
    """The policies that are combined in one, or it alone."""
    if isinstance(policy, (policies.AnySavePolicy, policies.AnyPreservationPolicy)):
        return [part for one in policy.policies for part in _parts(one)]
    return [policy]


def _as_saved(metrics: Any) -> tuple[Any, dict[str, Any]]:
    """Metrics as ckpt takes them: numbers by name, or an item with whatever JSON they are."""
    flat = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiub"
        for name, value in cast(Mapping[Any, Any], metrics).items()
    )
    if metrics is None or flat:
        return metrics, {}
    return None, {"metrics": ckpt.Json(metrics)}
