"""The reading half of ``Checkpointer``: queries, restore and load."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core import _adapters, _load
from ckpt_core._directory.run_metadata import read_run_metadata
from ckpt_core._directory.step_names import check_step
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._options import Options
from ckpt_core._results import CheckpointInfo, Restored
from ckpt_core._run.branch import Branch
from ckpt_core._run.decision import SaveDecision
from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.in_flight import InFlight, settle_all
from ckpt_core._run.policies import keep
from ckpt_core._run.recovery import restore_newest
from ckpt_core._run.retention import Retention
from ckpt_core._run.saving import Saving
from ckpt_core._run.tiers import Tiers
from ckpt_core._run.turns import Turns, in_turn
from ckpt_core._run.unread import UnreadValues
from ckpt_core._verify import describe_opened


@dataclass(frozen=True)
class Parts:
    """The collaborators of a Checkpointer.

    Attributes:
        run: directory of the run.
        tiers: the steps of the run, local and persistent.
        retention: deletes steps that no policy keeps.
        branch: claims the directory and moves steps that training does not continue from.
        saving: writes new steps.
        decision: asks the save policy.
        saves: one entry per tier; the local tier is first.
        unread: restored values that the caller has not read yet.
        best: name and mode of the metric of ``best_step``.
    """

    run: RunDirectory
    tiers: Tiers
    retention: Retention
    branch: Branch
    saving: Saving
    decision: SaveDecision
    saves: list[InFlight]
    unread: UnreadValues
    best: tuple[str | None, str | None]


class Reading:
    """The half of a Checkpointer that changes no step: queries, restore and load."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turns = Turns(parts.run.path, parts.saves)

    @property
    def directory(self) -> str:
        """Absolute path, or URL, of the directory."""
        return self._parts.run.path

    def explain(self) -> dict[int, str]:
        """For every step on disk, whether retention keeps or deletes it, and why."""
        known = self._parts.retention.explain()
        local = "kept: one of the newest in local directories"
        return {step: known.get(step, local) for step in self.all_steps()}

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; reads the directory.

        With ``local_directory``, also the local steps that all processes hold, as of their last
        agreement: at construction, at each save and at each restore.
        """
        return self._parts.tiers.all()

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return self._parts.tiers.latest()

    def best_step(self) -> int | None:
        """The step with the best metric, or None; needs ``best_metric``."""
        metric, mode = self._parts.best
        if metric is None or mode is None:
            raise CheckpointError("best_step() needs Checkpointer(best_metric=, best_mode=)")
        return next(iter(keep.best(metric, mode=mode)(self._parts.run.steps.all_facts())), None)

    def metadata(self, step: int) -> Any:
        """What was saved as ``metadata=`` with a step."""
        return self._parts.tiers.open(step).metadata

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step."""
        return dict(self._parts.tiers.open(step).metrics)

    @property
    def run_metadata(self) -> Any:
        """JSON of the run that ``write_run_metadata`` wrote; None if there is none."""
        return read_run_metadata(self._parts.run.backend, self._parts.run.path)

    def inspect(self, step: int) -> CheckpointInfo:
        """Structure, shapes and sizes of a step, without its arrays; see ``ckpt_core.inspect``."""
        return describe_opened(self._parts.tiers.open(step))

    @in_turn
    def restore_latest(
        self,
        state: Any = _load.NO_STATE,
        /,
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
        """Restores the newest intact step; returns None if the directory has no step.

        Waits for running saves and blocks until all is read. All processes must call it.

        Claims the directory, unless ``read_only``: the next commit of an older run there fails. The
        next save then moves steps newer than the restored one to ``retired`` (in an object store it
        deletes them).

        A damaged step is skipped with a warning that names the damage, and is never deleted: the
        next save moves it to the directory ``damaged`` (in an object store it stays). If the
        targets do not match the checkpoint, no older step is tried, because the code is wrong and
        not the disk.

        Args:
            state: the target for steps written by ``save(step, state)``; in the result it is
                ``state``.
            strict_latest: raise if the newest step is damaged, instead of trying older ones.
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
        settle_all(self._parts.saves)
        request = _load.make_request(
            only, rename, cast, missing, unexpected, options or self._parts.run.options
        )
        chosen = _load.collect_targets(state, items, targets)
        self._parts.branch.begin_restore()
        restored = restore_newest(
            self._parts.run.path,
            lambda step: self._restore(step, chosen, request),
            strict_latest,
            lambda: self._parts.branch.note_listed(
                self._parts.decision.steps_on_first(self._parts.tiers.all)
            ),
            self._parts.run.damaged,
        )
        if restored is not None:
            self._parts.unread.watch(restored, chosen, unexpected)
            self._parts.branch.restored(restored.step)
        else:
            _adapters.notice(chosen.values())
        return restored

    @in_turn
    def restore(
        self,
        step: int,
        state: Any = _load.NO_STATE,
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
        """Restores one step into live objects, or into ``state`` as ``save(step, state)`` took it.

        See ``ckpt_core.restore``. All processes must call it.

        Claims the directory, and the next save moves newer steps away, as with ``restore_latest``.
        Restoring an older step only to compare is safe: a save continues from the newest earlier
        step that this Checkpointer restored or saved.
        """
        settle_all(self._parts.saves)
        request = _load.make_request(
            only, rename, cast, missing, unexpected, options or self._parts.run.options
        )
        chosen = _load.collect_targets(state, items, targets)
        step = check_step(step)
        self._parts.branch.begin_restore()
        restored = self._restore(step, chosen, request)
        self._parts.unread.watch(restored, chosen, unexpected)
        self._parts.branch.restored(step)
        return restored

    @in_turn
    def load(
        self, step: int, like: Any = None, /, *, item: str | None = None, **arguments: Any
    ) -> Any:
        """The saved tree of one step, as a new object; see ``ckpt_core.load``."""
        settle_all(self._parts.saves)
        arguments.setdefault("options", self._parts.run.options)
        request = _load.request_from("load", like, arguments)
        with self._handing_no_damage_on():
            return _load.load_checkpoint(self._parts.tiers.opening(step), like, item, request, step)

    def _restore(self, step: int, targets: Mapping[str, Any], request: Any) -> Restored:
        with self._handing_no_damage_on():
            return self._parts.tiers.restore(step, targets, request)

    @contextlib.contextmanager
    def _handing_no_damage_on(self) -> Generator[None]:
        """After damage, the next save hard-links no earlier files: they may be the damaged ones."""
        try:
            yield
        except CheckpointCorrupt:
            self._parts.saving.links.forget()
            raise

    def wait_for_new_step(
        self, after: int | None = None, timeout_secs: float | None = None
    ) -> int | None:
        """Blocks until the newest step is newer than ``after``; returns it, or None at the timeout.

        For an evaluator that follows a trainer. Lists the directory about once a second. With
        several processes, all must call it, and all get the answer of process 0.
        """
        seen = self._parts.run.steps.wait_for_newer(after, timeout_secs)
        return self._parts.decision.step_on_first(seen)


def _call_methods(cls: type, name: str) -> None:
    """Renames methods to ``<name>.<method>``, so that Python's TypeErrors name the public class."""
    for member in vars(cls).values():
        function: Any = getattr(member, "fget", member)
        while inspect.isfunction(function):
            function.__qualname__ = f"{name}.{function.__name__}"
            function = getattr(function, "__wrapped__", None)


_call_methods(Reading, "Checkpointer")
