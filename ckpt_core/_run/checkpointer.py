"""``Checkpointer``: saves, keeps, restores and deletes the steps of one training run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt_core._directory import StepNames, check_step, read_run_metadata, write_run_metadata
from ckpt_core._errors import CheckpointError
from ckpt_core._fork import HOME, forked
from ckpt_core._load import NOT_PASSED, collect_targets, make_request
from ckpt_core._operation import logger
from ckpt_core._options import Options, checked_options, of_local_steps, unknown_argument
from ckpt_core._results import CheckpointInfo, RestoredStep, html_of_directory
from ckpt_core._run import restoring
from ckpt_core._run.in_flight import in_turn, raise_failures, wait_and_raise, wait_for_others
from ckpt_core._run.policies import choose_keep_policy, choose_save_policy, keep, when
from ckpt_core._run.run import Run
from ckpt_core._run.steps import open_run
from ckpt_core._save import NOTHING, RecordFields, collect_items, metrics_of
from ckpt_core._verify import describe_opened
from ckpt_core.arguments import answering, check_flags


class Checkpointer:
    """A directory of checkpoints, one per step, for one training run.

    Step ``n`` is the state after the 0-based step ``n`` was completed: save after the update, and
    resume with ``n + 1``. With several processes, all must make the same calls in the same order.

    Methods may be called from any thread. Saves, restores and deletions run one at a time; a call
    waits until the previous one has returned. A call from inside another one (from a signal
    handler, a listener or a policy) raises ``CheckpointError``. Queries (``all_steps``,
    ``latest_step``, ``metrics``, ...) and ``wait_until_finished`` do not wait for other calls.

    Args:
        directory: contains the step directories; created if missing. A path, or a URL with
            ``memory://``, ``s3://`` or ``gs://``.
        save_interval_steps: save every step that is a multiple of this; 1 by default.
        max_to_keep: keep this many of the newest steps; with ``best_metric``, this many of the best
            and the newest one. By default all steps are kept.
        keep_period: also keep every step that is a multiple of this.
        best_metric: name of the metric that ranks the steps.
        best_mode: ``"min"`` or ``"max"``; required with ``best_metric``.
        save_policy, keep_policy: policies of ``ckpt.when`` and ``ckpt.keep``, instead of the above.
        step_prefix, step_format_fixed_length: names of step directories, as in Orbax.
        asynchronous: ``save`` returns after the snapshot; a background thread writes it.
        read_only: never write or claim the directory; for evaluators. Without it, a restore claims
            the directory, and the next save of another run there fails.
        local_directory: a fast disk or memory file system (tmpfs) of each host, shared between
            hosts or not. Every save goes there first; each process writes all shards that it holds.
            The newest ``Options.local_max_to_keep`` steps stay there. A background thread then
            writes to ``directory`` the steps that ``Options.persist_policy`` selects, steps saved
            with ``force=True``, and steps saved after the run was asked to stop. ``restore_latest``
            takes the newest step that all processes have or, see ``Options.partners``, can get.
        options: see ``Options``.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with ckpt.Checkpointer(directory, max_to_keep=2) as checkpointer:
        ...     for step in range(4):
        ...         _ = checkpointer.save(step, {"w": jnp.full(2, step)})
        >>> ckpt.Checkpointer(directory).all_steps()
        [2, 3]

        Every step in memory, every hundredth on the disk:

        >>> run, memory = tempfile.mkdtemp(), tempfile.mkdtemp()  # such as /dev/shm/ckpt
        >>> options = ckpt.Options(persist_policy=ckpt.when.every_steps(100))
        >>> with ckpt.Checkpointer(run, local_directory=memory, options=options) as checkpointer:
        ...     for step in range(98, 103):
        ...         _ = checkpointer.save(step, {"w": jnp.full(2, step)})
        >>> with ckpt.Checkpointer(run, local_directory=memory, options=options) as checkpointer:
        ...     restored = checkpointer.restore_latest(state={"w": jnp.zeros(2, jnp.int32)})
        ...     checkpointer.all_steps(), restored.step
        ([100, 102], 102)
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
        HOME.is_used = True
        if os.getpid() != HOME.pid:
            raise forked()
        if not type(asynchronous) is type(read_only) is bool:
            check_flags(asynchronous=asynchronous, read_only=read_only)
        steps = open_run(
            directory,
            StepNames(step_prefix, step_format_fixed_length),
            checked_options(options),
            read_only,
        )
        self._run = Run(
            steps,
            choose_save_policy(save_policy, save_interval_steps),
            choose_keep_policy(keep_policy, max_to_keep, keep_period, best_metric, best_mode),
            local_directory=local_directory,
            asynchronous=asynchronous,
        )
        unused = of_local_steps(steps.options) if local_directory is None and not read_only else []
        if unused:
            logger.warning(
                "%s: Options.%s has no effect without Checkpointer(local_directory=): every step that is saved goes "
                "to this directory",
                steps.directory,
                ", ".join(unused),
            )
        self._best = best_metric, best_mode

    @in_turn
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
        """Saves a step if the policy, or ``ckpt save-now``, wants it; True if a save was started (asynchronous) or done.

        Returns False if the policy declines, or if this Checkpointer already saved or restored the step, so an
        extra save after the training loop does no harm; with ``force=True``, if the persistent directory has it,
        too. All processes must call it.

        After an older step was restored, or a rollback, a later number goes on from there, and the steps that
        are left are retired. A number beyond all steps goes on from the newest one.

        Blocks until the snapshot is taken; with ``asynchronous=False``, until the step is
        committed. First waits for a running save; with ``local_directory``, only in the tiers that
        take this step.

        Args:
            step: number of the step that was just completed.
            state: one pytree or object; or name items instead.
            metrics: numbers of this step, for ``best_metric`` and ``keep.best``. Nested ones and text are
                kept by ``items={"metrics": ckpt.Json({...})}``: their numbers count as ``eval/loss``.
            metadata: your own JSON-serializable value.
            force: save regardless of the policies, and in the persistent directory too; also a step
                that is older than the newest one, from which restore_latest still goes on.
            overwrite: replace a step that is on disk; of another history, the steps after it are retired too.
            items: named items, for names that are also parameters of this method.
            **named: named items.

        Raises:
            CheckpointExists: a step of this number, or newer ones, by another writer are on disk,
                and this Checkpointer has not restored an older step.
            RestoredValueIgnored: a restored value was never read, or an item of the restored step was
                not restored, and something is being saved under its name.
            Exception: the error of the previous asynchronous save, with its own type.
        """
        if not type(force) is type(overwrite) is bool:
            check_flags(force=force, overwrite=overwrite)
        self._run.refuse_unless_open("save")
        raise_failures(self._run.slots)
        self._run.preemption.step = step = check_step(step)
        chosen = collect_items(state, items, named)
        fields = RecordFields(state is not NOTHING, metadata, metrics_of(metrics, chosen))
        return self._run.save(step, chosen, fields, force=force, overwrite=overwrite)

    @in_turn
    def should_save(self, step: int) -> bool:
        """Whether the policy wants this step; with several processes, all must call it."""
        step, run = check_step(step), self._run
        if run.steps.read_only:
            return False
        return run.decision.wants(step, run.slots[0].running, run.latest)

    @in_turn
    def restore_latest(
        self,
        state: Any = NOT_PASSED,
        /,
        *,
        items: Mapping[str, Any] | None = None,
        only: Any = None,
        rename: Any = None,
        cast: bool = False,
        missing: str = "error",
        unexpected: str = "error",
        static: str = "error",
        strict_latest: bool = False,
        options: Options | None = None,
        **targets: Any,
    ) -> RestoredStep | None:
        """Restores the newest intact step; returns None if the directory has no step.

        Waits for running saves and blocks until all is read. All processes must call it.

        Claims the directory, unless ``read_only``: the next commit of an older run there fails. The
        next save then moves steps newer than the restored one to ``retired`` (in an object store it
        deletes them).

        A damaged step is skipped with a warning that names the damage. The next save moves it to
        the directory ``damaged`` (in an object store, a save of the same number replaces it). If
        the targets do not match the checkpoint, no older step is tried, because the code is wrong
        and not the disk.

        Args:
            state: the target for steps written by ``save(step, state)``; in the result it is
                ``state``.
            strict_latest: raise, instead of trying older ones, if the newest step is damaged, of a branch that the run left (in
                a copy), or a local one of another number of processes or other shardings.
            (others: see ``ckpt_core.restore``)

        Raises:
            CheckpointCorrupt: there are steps, and none can be loaded.
            StructureMismatch: the targets do not match the checkpoint.

        Example:
            >>> import ckpt_core as ckpt, jax.numpy as jnp, tempfile
            >>> with ckpt.Checkpointer(tempfile.mkdtemp()) as checkpointer:
            ...     _ = checkpointer.save(7, {"w": jnp.arange(3)})
            ...     restored = checkpointer.restore_latest({"w": jnp.zeros(3, jnp.int32)})
            >>> restored.step, restored.state["w"].tolist()
            (7, [0, 1, 2])
        """
        if type(strict_latest) is not bool:
            check_flags(strict_latest=strict_latest)
        wait_and_raise(self._run.slots)
        options = options or self._run.steps.options
        request = make_request(only, rename, cast, missing, unexpected, options, static=static)
        targets = collect_targets(state, items, targets)
        return restoring.restore_latest(self._run, targets, request, strict_latest)

    @in_turn
    def restore(
        self,
        step: int,
        state: Any = NOT_PASSED,
        /,
        *,
        items: Mapping[str, Any] | None = None,
        only: Any = None,
        rename: Any = None,
        rules: Any = None,
        cast: bool = False,
        missing: str = "error",
        unexpected: str = "error",
        static: str = "error",
        options: Options | None = None,
        **targets: Any,
    ) -> RestoredStep:
        """Restores one step into live objects, or into ``state`` as ``save(step, state)`` took it.

        See ``ckpt_core.restore``. All processes must call it.

        Claims the directory, and the next save moves newer steps away, as with ``restore_latest``.
        Restoring an older step only to compare is safe: a save of a number beyond the newest step that
        this Checkpointer restored or saved continues from that one.
        """
        wait_and_raise(self._run.slots)
        options = options or self._run.steps.options
        request = make_request(
            only, rename, cast, missing, unexpected, options, rules=rules, static=static
        )
        targets = collect_targets(state, items, targets)
        return restoring.restore(self._run, step, targets, request)

    @in_turn
    def load(
        self, step: int, like: Any = None, /, *, item: str | None = None, **arguments: Any
    ) -> Any:
        """The saved tree of one step, as a new object; see ``ckpt_core.load``."""
        wait_and_raise(self._run.slots)
        self._at_rest(step)
        return restoring.load(self._run, step, like, item, arguments)

    @property
    def directory(self) -> str:
        """Absolute path, or URL, of the directory."""
        return self._run.steps.directory

    def _at_rest(self, step: int | None = None) -> Run:
        """The run, once nobody else in this process saves this step, or any."""
        steps = self._run.steps
        self._run.listed = True  # its caller gets to know what the run holds
        name = "" if step is None else steps.names.name(check_step(step))
        wait_for_others(self._run.slots, steps.options.timeout_secs, name)
        return self._run

    def explain(self) -> dict[int, str]:
        """For every step on disk, whether retention keeps or deletes it, and why."""
        steps, run = self.all_steps(), self._run
        known = run.disk.explain(run.trail.damaged)
        return {
            step: known.get(step, "kept: one of the newest in local directories") for step in steps
        }

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; reads the directory.

        With ``local_directory``, also the local steps that all processes hold, as of their last
        agreement: at construction, at each save and at each restore. A read-only one of a single process looks again.
        """
        return self._at_rest().all()

    def latest_step(self) -> int | None:
        """The newest committed step, or None; raises OSError if a newer one in a local directory cannot be read."""
        run = self._at_rest()
        newest = run.latest()
        if run.local is not None:
            run.local.refuse_older(-1 if newest is None else newest)
        return newest

    def best_step(self) -> int | None:
        """The step with the best metric, in either tier, or None; needs ``best_metric``.

        A damaged step is none. One whose record cannot be read now, as at an I/O error, may be the best: ``OSError``.
        """
        metric, mode = self._best
        if not (metric and mode):
            raise CheckpointError("best_step() needs Checkpointer(best_metric=, best_mode=)")
        return next(iter(keep.ranking(self._at_rest().facts(), metric, mode)), None)

    def metadata(self, step: int) -> Any:
        """What was saved as ``metadata=`` with a step."""
        return self._at_rest(step).open(step).metadata

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step."""
        return dict(self._at_rest(step).open(step).metrics)

    @property
    def run_metadata(self) -> Any:
        """JSON of the run that ``write_run_metadata`` wrote; None if there is none."""
        return read_run_metadata(self._run.steps.backend, self.directory)

    def inspect(self, step: int) -> CheckpointInfo:
        """Structure, shapes and sizes of a step, without its arrays; see ``ckpt_core.inspect``."""
        return describe_opened(self._at_rest(step).open(step))

    def wait_for_new_step(
        self, after: int | None = None, timeout_secs: float | None = None
    ) -> int | None:
        """Blocks until the newest step is newer than ``after``; returns it, or None at the timeout.

        For evaluators. Lists the directory about once a second, and no local ones. All processes get that of process 0.

        Retention does not delete the step until the next call, ``close``, or the end of this object; in an
        object store, for the ``Options.delete_grace_secs`` of the program that saves. Training that goes back
        behind it, and ``delete``, remove it all the same.
        """
        return self._run.following.wait(after, timeout_secs)

    @property
    def should_stop(self) -> bool:
        """Whether this run was asked to stop, such as by SIGTERM; the first access starts listening.

        A handler that was installed before is still called. If there was none, the first signal is
        only recorded and the second one ends the process. If it came just after ``when.preempted()`` was asked, the loop
        goes on to the next step, which is saved. With several processes, jax's preemption service handles the signal
        instead, so that all stop at the same step; all must ask.
        """
        return self._run.preemption.should_stop

    def reached_preemption(self, step: int) -> bool:
        """Whether to save this step and stop; the same on all processes, which all must call it."""
        return self._run.preemption.reached(step)

    @in_turn
    def write_run_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Writes JSON about the whole run, in Orbax's file for it; all may call it, process 0 writes."""
        self._run.refuse_unless_open("write_run_metadata")
        if self._run.steps.processes.index == 0:
            write_run_metadata(self._run.steps.backend, self.directory, metadata)

    @in_turn
    def delete(self, step: int) -> None:
        """Deletes a step in all tiers, after running saves; all processes must call it.

        Raises:
            CheckpointNotFound: there is no such step.
            CheckpointError: the step is being read, or another writer has taken the directory over.
        """
        restoring.delete(self._run, step)

    @in_turn
    def rollback_to(self, step: int) -> list[int]:
        """Deletes every step newer than ``step``, so that training resumes from it; returns them.

        If there is no such step, from the newest one before it; if none is as old, from the beginning. Waits for
        running saves. All processes must call it.
        """
        return restoring.rollback_to(self._run, step)

    def wait_until_finished(self) -> None:
        """Blocks until no save is running; every save started before is then durable in its tiers.

        Raises:
            GraceExceeded: the run was asked to stop, and ``Options.grace_secs`` have passed.
            Exception: the error of a failed save, with its own type.
        """
        wait_and_raise(self._run.slots, self._run.preemption.secs_left)

    @in_turn
    def close(self) -> None:
        """Waits for running saves and releases the directory; raises the error of a failed save."""
        raise_failures(self._run.slots, self._run.end())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if os.getpid() != HOME.pid:  # a forked child must not close what its parent still uses
            return
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # The error raised inside the with block is the one to show; ours becomes a note on it.
            error.add_note(
                f"ckpt: closing {self.directory} failed too: {type(failure).__name__}: {failure}"
            )

    def __repr__(self) -> str:
        return f"<Checkpointer {self.directory}: {self._run.state()}>"

    def _repr_html_(self) -> str:
        return html_of_directory(self.directory, self._run.state(), self.all_steps())


# its type stays its own
setattr(Checkpointer, "__init__", answering(Checkpointer.__init__, unknown_argument))  # noqa: B010
