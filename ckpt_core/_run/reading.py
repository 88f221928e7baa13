"""What a directory of steps can be asked, and how its steps are read."""

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
    """What a Checkpointer is made of.

    Attributes:
        run: its directory.
        tiers: the steps of it, wherever they lie.
        retention: which of them stay.
        branch: what a restore and a save take over.
        saving: writes new ones.
        decision: whether to.
        saves: what is under way.
        unread: restored values that nobody has taken yet.
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
    """The half of a Checkpointer that changes no step: asking, restoring and loading."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turns = Turns(parts.run.path, parts.saves)

    @property
    def directory(self) -> str:
        """Absolute path, or URL, of the directory."""
        return self._parts.run.path

    def explain(self) -> dict[int, str]:
        """For every step on disk whether it stays at the next clean-up, and why."""
        known = self._parts.retention.explain()
        local = "kept: one of the newest in local directories"
        return {step: known.get(step, local) for step in self.all_steps()}

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; reads the directory.

        With ``local_directory`` also those that are complete on all processes there, as they
        agreed last: at the start, at each save and at ``restore_latest``.
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
        """JSON of the run that ``write_run_metadata`` wrote; None where there is none."""
        return read_run_metadata(self._parts.run.backend, self._parts.run.path)

    def inspect(self, step: int) -> CheckpointInfo:
        """A step without its arrays; see ``ckpt_core.inspect``."""
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
        """The newest step that is whole, restored; None where the directory has no step.

        The directory is claimed for this writer, unless it is ``read_only``: the next commit of an
        older run in it fails. What is newer than the restored step by then makes way for the next
        save, moved to ``retired`` (in an object store: deleted).

        A damaged step is skipped with a warning that names the damage, and never deleted: the next
        save moves it to the directory ``damaged`` (in an object store it stays). A
        mismatch between code and checkpoint is raised: the code is wrong, not the disk.

        Args:
            state: the target where ``save(step, state)`` wrote the steps; in the result it is ``state``.
            strict_latest: raise instead of going back past a damaged step.
            (others: see ``ckpt_core.restore``)

        Raises:
            CheckpointCorrupt: there are steps, and none can be loaded.
            StructureMismatch: the targets do not fit.
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
            lambda: self._parts.branch.saw(
                self._parts.decision.steps_of_first(self._parts.tiers.all)
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
        """One step restored into live objects, or into ``state`` as ``save(step, state)`` took it.

        See ``ckpt_core.restore``.

        Claims the directory and decides what makes way for the next save, as ``restore_latest``. To
        compare with an older step in between is no step back: a save goes on from the newest one
        before it that was restored or saved here.
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
        """The saved tree of one step, as a new one; see ``ckpt_core.load``."""
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
        """The next save writes all anew where damage was met: a damaged file may be shared."""
        try:
            yield
        except CheckpointCorrupt:
            self._parts.saving.links.forget()
            raise

    def wait_for_new_step(
        self, after: int | None = None, timeout_secs: float | None = None
    ) -> int | None:
        """The newest step once it is newer than ``after``; None where none came in time.

        For an evaluator that follows a trainer; looks at the directory about once a second. Where several
        processes run, all must ask, and get what process 0 has seen.
        """
        seen = self._parts.run.steps.wait_for_newer(after, timeout_secs)
        return self._parts.decision.step_of_first(seen)


def _call_methods(cls: type, name: str) -> None:
    """Names methods after the class that users know: Python puts that into its own messages."""
    for member in vars(cls).values():
        function: Any = getattr(member, "fget", member)
        while inspect.isfunction(function):
            function.__qualname__ = f"{name}.{function.__name__}"
            function = getattr(function, "__wrapped__", None)


_call_methods(Reading, "Checkpointer")
