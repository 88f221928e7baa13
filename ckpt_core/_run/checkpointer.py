"""``Checkpointer``: saves, keeps, restores and deletes the steps of one training run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any

from ckpt_core._directory.run_metadata import write_run_metadata
from ckpt_core._directory.step_names import StepNames, check_step
from ckpt_core._errors import CheckpointError, GraceExceeded
from ckpt_core._fork import HOME_PID
from ckpt_core._options import Options, checked_options
from ckpt_core._run.branch import Branch
from ckpt_core._run.decision import SaveDecision
from ckpt_core._run.directory import RunDirectory, open_run_directory
from ckpt_core._run.fence import Fence
from ckpt_core._run.in_flight import InFlight, raise_failures, settle_all, wait_for_all
from ckpt_core._run.policies import keep, when
from ckpt_core._run.policies.arguments import check_metrics, choose_keep_policy, choose_save_policy
from ckpt_core._run.preemption import Preemption
from ckpt_core._run.reading import Parts, Reading
from ckpt_core._run.retention import Retention
from ckpt_core._run.saving import Saving
from ckpt_core._run.tiers import LocalTier, StepToSave, Tiers, find_run, local_root
from ckpt_core._run.turns import in_turn
from ckpt_core._run.unread import UnreadValues
from ckpt_core._save import NOTHING, RecordFields, collect_items


class Checkpointer(Reading):
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
            with ``force=True``, and steps saved after the run was told to stop. ``restore_latest``
            takes the newest step that is complete on all processes, in either place.
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
        names = StepNames(step_prefix, step_format_fixed_length)
        run = open_run_directory(directory, names, checked_options(options), read_only)
        root = None if local_directory is None else local_root(local_directory)
        policy = choose_keep_policy(keep_policy, max_to_keep, keep_period, best_metric, best_mode)
        saves: list[InFlight] = []
        self._fence = Fence(run.path, run.backend)
        retention = Retention(run, policy)
        branch = Branch(run, self._fence, retention)
        saving = Saving(run, saves, branch, asynchronous)
        when_to = choose_save_policy(save_policy, save_interval_steps)
        persist = run.options.persist_policy
        listening = when_to if persist is None else when.any_of(when_to, persist)
        self._preemption = Preemption(run.processes, listening, run.options)
        self._closed = False
        self._local: LocalTier | None = None
        if root is not None:
            lineage = find_run(run.backend, run.path, run.processes, run.options, not read_only)
            self._local = LocalTier(root, lineage, names, run.processes, run.options, read_only)
            branch.set_local(self._local)
            saving.set_local(self._local)
        tiers = Tiers(run.steps, self._local)
        # Pass functions, not bound methods: a reference cycle would delay garbage collection.
        decision = _deciding(when_to, run, self._preemption, tiers.latest)
        self._persist = (
            None if persist is None else _deciding(persist, run, self._preemption, run.steps.latest)
        )
        super().__init__(
            Parts(
                run,
                tiers,
                retention,
                branch,
                saving,
                decision,
                saves,
                UnreadValues(),
                (best_metric, best_mode),
            )
        )
        if not read_only and run.processes.index == 0:
            retention.clean()

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
        """Saves a step if the policy wants it; True if a save was started (asynchronous) or done.

        Returns False if the policy declines, or if this Checkpointer already saved the step, so an
        extra save after the training loop does no harm. All processes must call it.

        Blocks until the snapshot is taken; with ``asynchronous=False``, until the step is
        committed. First waits for a running save; with ``local_directory``, only in the tiers that
        take this step.

        Args:
            step: number of the step that was just completed.
            state: one pytree or object; or name items instead.
            metrics: numbers of this step, for ``best_metric`` and ``keep.best``.
            metadata: your own JSON-serializable value.
            force: save regardless of the policies, and in the persistent directory too.
            overwrite: replace a step that is on disk.
            items: named items, for names that are also parameters of this method.
            **named: named items.

        Raises:
            CheckpointExists: a step of this number, or newer ones, by another writer are on disk,
                and this Checkpointer has not restored an older step.
            RestoredValueIgnored: a restored value was never read, or an item of the restored step was
                not restored, and something is being saved under its name.
            Exception: the error of the previous asynchronous save, with its own type.
        """
        self._refuse_if_read_only("save")
        raise_failures(self._parts.saves)
        self._preemption.note_step(step := check_step(step))
        chosen = collect_items(state, items, named)
        numbers = check_metrics(metrics)
        overwrite = (
            overwrite or step in self._parts.saving.maybe_not_durable
        )  # a failed save of this step may have left it on disk
        begun = {running.step for running in self._parts.saves}
        if not overwrite and (step in self._parts.run.mine or step in begun):
            self._parts.branch.log_repeat(step)
            return False
        self._parts.unread.check(chosen)
        if not force and not self._wants(step):
            return False
        persists = self._local is None or force or self._persists(step)
        self._parts.saving.make_way(persists)
        self._parts.branch.make_room(step, overwrite, persists)
        fields = RecordFields(state is not NOTHING, metadata, numbers)
        what = StepToSave(step, chosen, fields)
        self._parts.saving.start(what, overwrite, persists, lambda: self._began(step, persists))
        return True

    def _began(self, step: int, persists: bool) -> None:
        self._parts.decision.save_began(step)
        if persists and self._persist is not None:
            self._persist.save_began(step)

    def _persists(self, step: int) -> bool:
        """Whether this save also goes to the persistent directory; all processes must call it."""
        # After a stop signal the host and its local disk may be gone before the next run starts.
        last = self._preemption.wants(step) or self._preemption.will_stop
        return (
            self._persist is None
            or self._persist.wants(step, self._parts.saving.in_flight.running)
            or last
        )

    @in_turn
    def should_save(self, step: int) -> bool:
        """Whether the policy wants this step; with several processes, all must call it."""
        return self._wants(check_step(step))

    def _wants(self, step: int) -> bool:
        return not self._parts.run.read_only and self._parts.decision.wants(
            step, self._parts.saves[0].running
        )

    @property
    def should_stop(self) -> bool:
        """Whether this run was told to stop, such as by SIGTERM; the first access starts listening.

        A handler that was installed before is still called. If there was none, the first signal is
        only recorded and the second one ends the process. With several processes, jax's preemption
        service handles the signal instead, so that all stop at the same step; all must ask.
        """
        return self._preemption.should_stop

    def reached_preemption(self, step: int) -> bool:
        """Whether to save this step and stop; the same on all processes, which all must call it."""
        return self._preemption.reached(step)

    @in_turn
    def write_run_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Writes JSON about the whole run next to its steps, in the file that Orbax uses for it.

        All processes may call it; process 0 writes.
        """
        self._refuse_if_read_only("write_run_metadata")
        if self._parts.run.processes.index == 0:
            write_run_metadata(self._parts.run.backend, self.directory, metadata)

    @in_turn
    def delete(self, step: int) -> None:
        """Deletes a step in all tiers, after running saves; all processes must call it.

        Raises:
            CheckpointNotFound: there is no such step.
            CheckpointError: the step is being read, or another writer has taken the directory over.
        """
        self._refuse_if_read_only("delete")
        step = check_step(step)
        settle_all(self._parts.saves)
        self._parts.decision.agree_on_call(f"delete step {step}")
        in_local = self._local is not None and step in self._local.complete
        self._parts.branch.before_delete(step, self._parts.tiers.latest)

        def delete() -> None:
            if not in_local or step in self._parts.run.steps.all():
                self._parts.retention.delete(step)

        with self._forgetting([step]):
            self._parts.decision.run_on_first(delete)
            if self._local is not None:
                self._local.delete_where(lambda other: other == step)

    @in_turn
    def rollback_to(self, step: int) -> list[int]:
        """Deletes every step newer than ``step``, so that training resumes from it; returns them.

        Waits for running saves. All processes must call it.
        """
        self._refuse_if_read_only("rollback_to")
        step = check_step(step)
        settle_all(self._parts.saves)
        self._parts.decision.agree_on_call(f"roll back to step {step}")
        steps = self._parts.decision.steps_on_first(self.all_steps)
        self._parts.branch.before_delete_newer(step)
        newer = [other for other in steps if other > step]
        with self._forgetting(newer):
            self._parts.decision.run_on_first(lambda: self._parts.retention.delete_newer(step))
            if self._local is not None:
                self._local.delete_where(lambda other: other > step)
        return newer

    @contextlib.contextmanager
    def _forgetting(self, deleted: list[int]) -> Generator[None]:
        """Forgets those of the steps that are gone, also when the deletion fails or is interrupted."""
        mine = self._parts.run.mine
        own = mine & {*deleted}
        # Already before the deletion, as an interrupt may come during the `finally` below. A step that
        # is forgotten though it exists makes way for the next save of its number; one that is deleted
        # and not forgotten would never be saved again.
        mine -= own
        try:
            yield
        finally:
            mine |= own - set(self._parts.branch.forget(deleted))
            self._parts.decision.forget()

    def wait_until_finished(self) -> None:
        """Blocks until no save is running; every save started before is then durable in its tiers.

        Raises:
            GraceExceeded: the run was told to stop, and ``Options.grace_secs`` have passed.
            Exception: the error of a failed save, with its own type.
        """
        settle_all(self._parts.saves, self._preemption.secs_left)

    @in_turn
    def close(self) -> None:
        """Waits for running saves and releases the directory; raises the error of a failed save."""
        raise_failures(self._parts.saves, self._end())

    def _end(self) -> GraceExceeded | None:
        """Waits for running saves and releases the claims; an error if the grace period ran out."""
        self._closed = True
        late = wait_for_all(self._parts.saves, self._preemption.secs_left)
        self._preemption.close()
        if not any(running.running for running in self._parts.saves):
            self._fence.close()
            if self._local is not None:
                self._local.close()
        return late

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if os.getpid() == HOME_PID:  # a forked child must not close what its parent still uses
            self._leave(error)

    @in_turn
    def _leave(self, error: BaseException | None) -> None:
        late = self._end()
        try:
            raise_failures(self._parts.saves, late)
        except BaseException as failure:
            if error is None:
                raise
            # The error raised inside the with block is the one to show; ours becomes a note on it.
            error.add_note(
                f"ckpt: closing {self.directory} failed too: {type(failure).__name__}: {failure}"
            )

    def __repr__(self) -> str:
        return f"<Checkpointer {self.directory}: {self._state()}>"

    def _state(self) -> str:
        if self._closed:
            return "closed"
        saving = [str(save.step) for save in self._parts.saves if save.running]
        return (
            f"saving step {saving[0]}"
            if saving
            else "read only"
            if self._parts.run.read_only
            else "open"
        )

    def _refuse_if_read_only(self, what: str) -> None:
        if self._closed:
            raise CheckpointError(f"{self.directory}: this Checkpointer was closed")
        if self._parts.run.read_only:
            raise CheckpointError(
                f"{self.directory}: {what}() on a Checkpointer with read_only=True"
            )


def _deciding(
    policy: when.Decision,
    run: RunDirectory,
    preemption: Preemption,
    newest: Callable[[], int | None],
) -> SaveDecision:
    return SaveDecision(policy, run.processes, preemption, newest, run.options.timeout_secs)
