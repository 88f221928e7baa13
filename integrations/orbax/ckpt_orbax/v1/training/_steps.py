"""The steps of a run as ``training.Checkpointer`` knows them, without reading the directory each time."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

import ckpt_core as ckpt
from ckpt_orbax._paths import as_path
from ckpt_orbax.v1._describe import begun_nsecs, committed_nsecs, metrics_of
from ckpt_orbax.v1._step_metadata import CheckpointMetadata

Step = CheckpointMetadata[None]


_LOOK_SECS = 0.02


class SaveEnd:
    """The end of one save, told by the thread that saves.

    It has no lock: a signal handler that raises within ``threading.Event.wait`` would leave that locked, and the thread
    that saves would wait for it.
    """

    def __init__(self) -> None:
        self.told = False

    def wait(self, timeout_secs: float) -> bool:
        """Blocks until it is told, or the timeout; whether it is."""
        until = time.monotonic() + timeout_secs
        while not self.told and time.monotonic() < until:
            time.sleep(_LOOK_SECS)
        return self.told


class Steps:
    """Committed steps as of the last look, and the step that is being saved.

    It looks when it is made, after each save of its own, and when told to.

    Args:
        names: gives the directory name of a step.
        light: whether time and metrics of a step are left out.
    """

    def __init__(self, names: Any, light: bool) -> None:
        self._names = names
        self._light = light
        self._lock = threading.Lock()
        self._numbers: list[int] = []
        self._known: dict[int, Step] = {}
        self._begun: dict[int, SaveEnd] = {}
        self._told: dict[int, Any] = {}
        self._failed: dict[int, BaseException] = {}
        self._stale = True

    def use(self, engine: ckpt.Checkpointer) -> None:
        """Sets the Checkpointer that lists the steps."""
        self._engine = engine

    def noticed(self, event: ckpt.Event) -> None:
        """Listener of the engine: notes the end of a save, in the thread that saves."""
        if event.step is None or event.kind not in ("committed", "save_failed", "deleted"):
            return
        with self._lock:
            self._stale = True
            if event.error is not None:
                self._failed[event.step] = event.error
            ended = None if event.kind == "deleted" else self._begun.get(event.step)
        if ended is not None:
            ended.told = True

    def begin(self, step: int, metrics: Any = None) -> SaveEnd:
        """Notes that a save begins, with these metrics; gives what is told of its end."""
        with self._lock:
            self._failed.pop(step, None)
            self._known.pop(step, None)
            self._told = {step: metrics}  # one save runs at a time
            self._begun = {one: end for one, end in self._begun.items() if not end.told}
            self._begun[step] = ended = SaveEnd()
        return ended

    def abandon(self, step: int) -> None:
        """Notes that a save did not begin."""
        with self._lock:
            self._begun.pop(step, None)

    def failure(self, step: int) -> BaseException | None:
        """The error of the last save of a step."""
        return self._failed.get(step)

    @property
    def running(self) -> list[int]:
        """The steps that are being saved."""
        with self._lock:
            return [step for step, ended in self._begun.items() if not ended.told]

    def look(self, *, light: bool = True) -> None:
        """Lists the directory again.

        Args:
            light: False to describe all steps from now on.
        """
        with self._lock:
            self._stale = True
            if not light and self._light:
                self._light, self._known = False, {}

    def numbers(self) -> list[int]:
        """The committed steps, ascending."""
        with self._lock:
            if not self._stale:
                return list(self._numbers)
            # process 0 deletes what no policy keeps, and does not tell the others of it
            self._stale = jax.process_index() > 0
        numbers = self._engine.all_steps()
        with self._lock:
            self._numbers = numbers
            self._known = {step: one for step, one in self._known.items() if step in numbers}
        return list(numbers)

    def begun(self) -> list[int]:
        """The steps that are committed or being saved, ascending."""
        running = self.running  # first: a save that ends meanwhile is then in both, else in neither
        return sorted({*self.numbers(), *running})

    def newest(self) -> int | None:
        """The newest step that is committed or being saved."""
        return max(self.begun(), default=None)

    def describe(self, step: int) -> Step:
        """What is known of a committed step."""
        known = self._known.get(step)
        if known is None:
            known = self._known[step] = self._described(step)
        return known

    def all(self) -> list[Step]:
        """The committed steps, oldest first."""
        return [one for step in self.numbers() if (one := self._or_gone(step)) is not None]

    def with_running(self) -> list[Step]:
        """The steps that are committed or being saved, oldest first."""
        running = self.running  # first, as in `begun`
        steps = {one.step: one for one in self.all()}
        for step in running:
            steps.setdefault(
                step, CheckpointMetadata(step, self._path(step), metrics=self._told.get(step))
            )
        return [steps[step] for step in sorted(steps)]

    def _or_gone(self, step: int) -> Step | None:
        try:
            return self.describe(step)
        except ckpt.CheckpointNotFound:
            return None  # deleted since the last look

    def _described(self, step: int) -> Step:
        if self._light:
            return CheckpointMetadata(step, self._path(step))
        info = self._engine.inspect(step)
        return CheckpointMetadata(
            step,
            as_path(info.path),
            init_timestamp_nsecs=begun_nsecs(info),
            commit_timestamp_nsecs=committed_nsecs(info),
            metrics=metrics_of(info),
        )

    def _path(self, step: int) -> Any:
        return as_path(self._engine.directory) / self._names.build_name(step)
