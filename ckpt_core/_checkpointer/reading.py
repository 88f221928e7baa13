"""What a directory of steps can be asked, and how its steps are read."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Mapping
from typing import Any

from ckpt_core import _adapters, _load
from ckpt_core._checkpointer.branch import Branch
from ckpt_core._checkpointer.saving import Saving
from ckpt_core._checkpointer.turns import Turns, in_turn
from ckpt_core._decision import SaveDecision
from ckpt_core._directory import Form
from ckpt_core._errors import CheckpointCorrupt, CheckpointError
from ckpt_core._inflight import InFlight, settle_all
from ckpt_core._inspect import describe_opened
from ckpt_core._options import Options
from ckpt_core._policies import keep
from ckpt_core._policies.names import check_step
from ckpt_core._recovery import restore_newest
from ckpt_core._results import CheckpointInfo, Restored
from ckpt_core._retention import Retention
from ckpt_core._run_metadata import read_run_metadata
from ckpt_core._steps import Steps
from ckpt_core._tiers import Tiers
from ckpt_core._unread import UnreadValues


class Reading:
    """The half of a Checkpointer that changes nothing on disk."""

    _directory: str
    _turns: Turns
    _form: Form
    _steps: Steps
    _tiers: Tiers
    _options: Options
    _best: tuple[str | None, str | None]
    _retention: Retention
    _decision: SaveDecision
    _saves: list[InFlight]
    _damaged: set[int]
    _saving: Saving
    _unread: UnreadValues
    _branch: Branch

    @property
    def directory(self) -> str:
        """Absolute path, or URL, of the directory."""
        return self._directory

    def explain(self) -> dict[int, str]:
        """For every step on disk whether it stays at the next clean-up, and why."""
        known = self._retention.explain()
        local = "kept: one of the newest in local directories"
        return {step: known.get(step, local) for step in self.all_steps()}

    def all_steps(self) -> list[int]:
        """Every committed step, ascending; reads the directory.

        With ``local_directory`` also those that are complete on all processes there, as they
        agreed last: at the start, at each save and at ``restore_latest``.
        """
        return self._tiers.all()

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return self._tiers.latest()

    def best_step(self) -> int | None:
        """The step with the best metric, or None; needs ``best_metric``."""
        metric, mode = self._best
        if metric is None or mode is None:
            raise CheckpointError("best_step() needs Checkpointer(best_metric=, best_mode=)")
        return next(iter(keep.best(metric, mode=mode)(self._steps.all_facts())), None)

    def metadata(self, step: int) -> Any:
        """What was saved as ``metadata=`` with a step."""
        return self._tiers.open(step).metadata

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step."""
        return dict(self._tiers.open(step).metrics)

    @property
    def run_metadata(self) -> Any:
        """JSON of the run that ``write_run_metadata`` wrote; None where there is none."""
        return read_run_metadata(self._form, self._directory)

    def inspect(self, step: int) -> CheckpointInfo:
        """A step without its arrays; see ``ckpt_core.inspect``."""
        return describe_opened(self._tiers.open(step))

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
        settle_all(self._saves)
        request = _load.make_request(
            only, rename, cast, missing, unexpected, options or self._options
        )
        chosen = _load.collect_targets(state, items, targets)
        self._branch.begin_restore()
        restored = restore_newest(
            self._tiers,
            lambda step: self._restore(step, chosen, request),
            strict_latest,
            lambda steps: self._branch.saw(self._decision.steps_of_first(steps)),
            self._damaged,
        )
        if restored is not None:
            self._unread.watch(restored, chosen, unexpected)
            self._branch.restored(restored.step)
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
        settle_all(self._saves)
        request = _load.make_request(
            only, rename, cast, missing, unexpected, options or self._options
        )
        chosen = _load.collect_targets(state, items, targets)
        step = check_step(step)
        self._branch.begin_restore()
        restored = self._restore(step, chosen, request)
        self._unread.watch(restored, chosen, unexpected)
        self._branch.restored(step)
        return restored

    @in_turn
    def load(
        self, step: int, like: Any = None, /, *, item: str | None = None, **arguments: Any
    ) -> Any:
        """The saved tree of one step, as a new one; see ``ckpt_core.load``."""
        settle_all(self._saves)
        arguments.setdefault("options", self._options)
        request = _load.request_from("load", like, arguments)
        with self._handing_no_damage_on():
            return _load.load_checkpoint(self._tiers.opening(step), like, item, request, step)

    def _restore(self, step: int, targets: Mapping[str, Any], request: Any) -> Restored:
        with self._handing_no_damage_on():
            return self._tiers.restore(step, targets, request)

    @contextlib.contextmanager
    def _handing_no_damage_on(self) -> Generator[None]:
        """The next save writes all anew where damage was met: a damaged file may be shared."""
        try:
            yield
        except CheckpointCorrupt:
            self._saving.links.forget()
            raise

    def wait_for_new_step(
        self, after: int | None = None, timeout_secs: float | None = None
    ) -> int | None:
        """The newest step once it is newer than ``after``; None where none came in time.

        For an evaluator that follows a trainer; looks at the directory about once a second.
        """
        return self._steps.wait_for_newer(after, timeout_secs)


def _call_methods(cls: type, name: str) -> None:
    """Names methods after the class that users know: Python puts that into its own messages."""
    for member in vars(cls).values():
        function: Any = getattr(member, "fget", member)
        while inspect.isfunction(function):
            function.__qualname__ = f"{name}.{function.__name__}"
            function = getattr(function, "__wrapped__", None)


_call_methods(Reading, "Checkpointer")
