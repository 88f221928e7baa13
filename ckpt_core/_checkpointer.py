"""A directory of steps: when to save, what to keep, and how to come back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt_core import _load, _processes
from ckpt_core._decision import SaveDecision
from ckpt_core._directory import refuse_file, resolve
from ckpt_core._errors import CheckpointError
from ckpt_core._fence import Fence
from ckpt_core._inflight import InFlight
from ckpt_core._inspect import describe_opened
from ckpt_core._options import Options, checked_options
from ckpt_core._policies import keep, when
from ckpt_core._policies.arguments import check_metrics, choose_keep_policy, choose_save_policy
from ckpt_core._policies.names import StepNames, check_step
from ckpt_core._preemption import Preemption
from ckpt_core._recovery import restore_newest
from ckpt_core._results import CheckpointInfo, Restored
from ckpt_core._retention import Retention
from ckpt_core._run_metadata import read_run_metadata, write_run_metadata
from ckpt_core._save import NOTHING, collect_items, form_for, prepare_save
from ckpt_core._steps import Steps
from ckpt_core._unread import UnreadValues


class Checkpointer:
    """A directory of checkpoints, one per step, for one training run.

    Step ``n`` is the state after the 0-based step ``n`` was completed: save after the update, and
    resume with ``n + 1``. Where several processes run, all must make the same calls.

    Args:
        directory: where steps lie; made if missing. A path, or ``memory://``, ``s3://``, ``gs://``.
        save_interval_steps: save steps that this divides.
        max_to_keep: keep this many of the newest steps (with ``best_metric``: of the best, and the
            newest besides).
        keep_period: also keep steps that this divides.
        best_metric: name of the metric that says which steps are best.
        best_mode: ``"min"`` or ``"max"``; required with ``best_metric``.
        save_policy, keep_policy: policies of ``ckpt.when`` and ``ckpt.keep``, instead of the above.
        step_prefix, step_format_fixed_length: names of step directories, as in Orbax.
        asynchronous: write in the background what ``save`` took a snapshot of.
        read_only: never write anything; for evaluators.
        options: see ``Options``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with ckpt.Checkpointer(directory, max_to_keep=2) as checkpointer:
        ...     for step in range(4):
        ...         _ = checkpointer.save(step, {"w": jnp.full(2, step)})
        >>> ckpt.Checkpointer(directory).all_steps()
        [2, 3]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_interval_steps: int | None = None,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        best_metric: str | None = None,
        best_mode: str | None = None,
        save_policy: when.Decision | None = None,
        keep_policy: keep.KeepPolicy | keep.Chooser | None = None,
        step_prefix: str | None = None,
        step_format_fixed_length: int | None = None,
        asynchronous: bool = True,
        read_only: bool = False,
        local_directory: str | os.PathLike[str] | None = None,
        options: Options | None = None,
    ) -> None:
        if local_directory is not None:
            raise NotImplementedError("local_directory= (a local tier) is not there yet")
        self._directory, local = resolve(directory)
        refuse_file(self._directory)
        self._form = form_for(self._directory, local)
        self._steps = Steps(
            self._directory, self._form, StepNames(step_prefix, step_format_fixed_length)
        )
        self._options = checked_options(options)
        policy = choose_keep_policy(keep_policy, max_to_keep, keep_period, best_metric, best_mode)
        self._damaged: set[int] = set()
        self._retention = Retention(self._steps, self._form, policy, self._options, self._damaged)
        self._best = (best_metric, best_mode)
        self._asynchronous = asynchronous
        self._read_only = read_only
        self._in_flight = InFlight(self._directory)
        self._mine: set[int] = set()
        self._unread = UnreadValues()
        self._fence = Fence(self._directory, self._form)
        self._processes = _processes.this_run()
        when_to = choose_save_policy(save_policy, save_interval_steps)
        self._preemption = Preemption(self._processes, when_to, self._options)
        self._decision = SaveDecision(
            when_to, self._processes, self._preemption, self.latest_step, self._options.timeout_secs
        )
        self._closed = False
        if not read_only and self._processes.index == 0:
            self._retention.clean()

    @property
    def directory(self) -> str:
        """Absolute path, or URL, of the directory."""
        return self._directory

    def save(
        self,
        step: int,
        state: Any = NOTHING,
        /,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        items: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> bool:
        """Whether a save of this step was started (asynchronous) or done (synchronous).

        False where the policy says no, and for a step that this Checkpointer wrote already, so the
        usual last save of a loop is harmless. While an earlier save is running, waits for it.

        Args:
            step: number of the step that was just completed.
            state: one pytree or object; or name items instead.
            metrics: numbers of this step, for ``best_metric`` and ``keep.best``.
            metadata: JSON of your own.
            force: save now, whatever the policy says.
            overwrite: replace a step that is on disk.
            items: named items whose names are arguments.
            **named: named items.

        Raises:
            CheckpointExists: another writer's step of this number, or newer ones, are on disk.
            RestoredValueIgnored: a restored value was never read and the old one is being saved.
            Exception: what made the previous asynchronous save fail, with its own type.
        """
        self._refuse_if_read_only("save")
        self._in_flight.raise_failure()
        self._preemption.is_at(step := check_step(step))
        chosen = collect_items(state, items, named)
        numbers = check_metrics(metrics)
        if not overwrite and (step in self._mine or step == self._in_flight.step):
            return False
        if not force and not self.should_save(step):
            return False
        self._unread.check(chosen)
        if self._options.on_pending == "fail":
            self._in_flight.refuse_if_running()
        self._in_flight.wait()
        if step in self._damaged and not overwrite:
            self._damaged.remove(step)
            self._decision.done_by_first(lambda: self._retention.set_aside(step))
        self._steps.refuse_taken(step, overwrite, self._damaged)
        work = prepare_save(
            self._steps.path(step) if overwrite else self._steps.new_path(step),
            chosen,
            single=state is not NOTHING,
            overwrite=overwrite,
            metadata=metadata,
            options=self._options,
            copy=self._asynchronous,
            metrics=numbers,
            guard=self._fence,
            step=step,
        )
        self._decision.save_began(step)

        def save_and_retain() -> None:
            work()
            self._mine.add(step)
            self._damaged.discard(step)
            if self._processes.index == 0:
                self._retention.apply(step)

        self._in_flight.start(step, save_and_retain) if self._asynchronous else save_and_retain()
        return True

    def should_save(self, step: int) -> bool:
        """Whether the policy wants this step; where several processes run, all must ask."""
        return not self._read_only and self._decision.wants(
            check_step(step), self._in_flight.running
        )

    @property
    def should_stop(self) -> bool:
        """Whether this run was told to stop (SIGTERM); asking makes it listen from then on.

        Whoever listened before still hears the signal; where nobody did, the first one is only noted
        and a second one ends the process. Of several, jax's service listens: all stop at one step.
        """
        return self._preemption.should_stop

    def reached_preemption(self, step: int) -> bool:
        """Whether to save this step and stop; all processes agree, where several run."""
        return self._preemption.reached(step)

    def explain(self) -> dict[int, str]:
        """For every step on disk whether it stays at the next clean-up, and why."""
        return self._retention.explain()

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; reads the directory."""
        return self._steps.all()

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return self._steps.latest()

    def best_step(self) -> int | None:
        """The step with the best metric, or None; needs ``best_metric``."""
        metric, mode = self._best
        if metric is None or mode is None:
            raise CheckpointError("best_step() needs Checkpointer(best_metric=, best_mode=)")
        return next(iter(keep.best(metric, mode=mode)(self._steps.all_facts())), None)

    def metadata(self, step: int) -> Any:
        """What was saved as ``metadata=`` with a step."""
        return self._steps.open(step).metadata

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step."""
        return dict(self._steps.open(step).metrics)

    @property
    def run_metadata(self) -> Any:
        """JSON of the run that ``write_run_metadata`` wrote; None where there is none."""
        return read_run_metadata(self._form, self._directory)

    def write_run_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Keeps JSON that belongs to the whole run beside its steps, where Orbax keeps it too."""
        self._refuse_if_read_only("write_run_metadata")
        if self._processes.index == 0:
            write_run_metadata(self._form, self._directory, metadata)

    def inspect(self, step: int) -> CheckpointInfo:
        """A step without its arrays; see ``ckpt_core.inspect``."""
        return describe_opened(self._steps.open(step))

    def delete(self, step: int) -> None:
        """Removes a step."""
        self._refuse_if_read_only("delete")
        step = check_step(step)
        self._in_flight.wait()
        self._decision.done_by_first(lambda: self._retention.delete(step))
        self._forget([step])

    def rollback_to(self, step: int) -> list[int]:
        """Retires every step newer than ``step``, so that training goes on from it; gives them."""
        self._refuse_if_read_only("rollback_to")
        step = check_step(step)
        self._in_flight.wait()
        steps = self._decision.steps_of_first(self.all_steps())
        self._decision.done_by_first(lambda: self._retention.delete_newer(step))
        return self._forget([other for other in steps if other > step])

    def _forget(self, deleted: list[int]) -> list[int]:
        self._mine.difference_update(deleted)
        self._damaged.difference_update(deleted)
        self._decision.forget()
        return deleted

    def restore_latest(
        self,
        *,
        items: Mapping[str, Any] | None = None,
        only: Any = None,
        rename: Any = None,
        cast: bool = False,
        missing: str = "error",
        unexpected: str = "error",
        strict_latest: bool = False,
        options: Options | None = None,
        **targets: Any,
    ) -> Restored | None:
        """The newest step that is whole, restored; None where the directory has no step.

        A damaged step is skipped with a warning that names the damage, and never deleted: when
        training saves a step of that number again, it is moved to the directory ``damaged``. A
        mismatch between code and checkpoint is raised: the code is wrong, not the disk.

        Args:
            strict_latest: raise instead of going back past a damaged step.
            (others: see ``ckpt_core.restore``)

        Raises:
            CheckpointCorrupt: there are steps, and none can be loaded.
            StructureMismatch: the targets do not fit.
        """
        self._in_flight.wait()
        request = _load.make_request(
            only, rename, cast, missing, unexpected, options or self._options
        )
        chosen = {**(items or {}), **targets}
        restored = restore_newest(
            self._steps,
            lambda step: _load.restore_checkpoint(self._steps.opening(step), chosen, request, step),
            strict_latest,
            lambda steps: self._decision.steps_of_first(steps),
            self._damaged,
        )
        if restored is not None:
            self._unread.watch(restored, chosen)
        return restored

    def restore(
        self,
        step: int,
        /,
        *,
        items: Mapping[str, Any] | None = None,
        only: Any = None,
        rename: Any = None,
        cast: bool = False,
        missing: str = "error",
        unexpected: str = "error",
        options: Options | None = None,
        **targets: Any,
    ) -> Restored:
        """One step restored into live objects; see ``ckpt_core.restore``."""
        self._in_flight.wait()
        request = _load.make_request(
            only, rename, cast, missing, unexpected, options or self._options
        )
        chosen = {**(items or {}), **targets}
        restored = _load.restore_checkpoint(
            self._steps.opening(step), chosen, request, check_step(step)
        )
        self._unread.watch(restored, chosen)
        return restored

    def load(
        self, step: int, like: Any = None, /, *, item: str | None = None, **arguments: Any
    ) -> Any:
        """The saved tree of one step, as a new one; see ``ckpt_core.load``."""
        self._in_flight.wait()
        arguments.setdefault("options", self._options)
        request = _load.request_from("load", like, arguments)
        return _load.load_checkpoint(self._steps.opening(step), like, item, request, step)

    def wait_for_new_step(
        self, after: int | None = None, timeout_secs: float | None = None
    ) -> int | None:
        """The newest step once it is newer than ``after``; None where none came in time.

        For an evaluator that follows a trainer; looks at the directory about once a second.
        """
        return self._steps.wait_for_newer(after, timeout_secs)

    def wait_until_finished(self) -> None:
        """Returns when no save is running; what was started before is then durable.

        Raises:
            GraceExceeded: the run was told to stop, and ``Options.grace_secs`` are over.
            Exception: what made the save fail, with its own type.
        """
        self._in_flight.wait(self._preemption.secs_left)

    def close(self) -> None:
        """Waits for a running save and ends the use of this object; raises what made it fail."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait_until_finished()
        finally:
            self._preemption.close()
            if not self._in_flight.running:
                self._fence.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except BaseException as failure:
            # the user's own error is what they must see; ours must not hide it
            error.add_note(
                f"ckpt: closing {self._directory} failed too: {type(failure).__name__}: {failure}"
            )

    def _refuse_if_read_only(self, what: str) -> None:
        if self._closed:
            raise CheckpointError(f"{self._directory}: this Checkpointer was closed")
        if self._read_only:
            raise CheckpointError(
                f"{self._directory}: {what}() on a Checkpointer with read_only=True"
            )
