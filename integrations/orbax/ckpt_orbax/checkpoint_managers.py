"""When to save and what to keep: Orbax's policies, and the steps as they see them.

A policy of your own is a class with ``should_save(step, previous_steps, *, context)``, or with
``should_preserve(checkpoints, *, context)``, which returns one bool for each checkpoint, oldest first.
They are asked at each step; with several processes, process 0 asks, and all do what it says. The newest
step stays on the disk, for resuming.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from ckpt_orbax._describe import Timed
from ckpt_orbax.options import MultiprocessingOptions

preservation_policy = save_decision_policy = sys.modules[__name__]
Described = TypeVar("Described")


@dataclass(frozen=True)
class CheckpointMetadata(Timed, Generic[Described]):
    """One step of a run.

    Attributes:
        step: its number.
        path: its directory.
        metadata: what ``metadata`` and ``checkpointables_metadata`` read; else None.
        init_timestamp_nsecs, commit_timestamp_nsecs: when the save began and was committed.
        custom_metadata: the value that was saved with the step.
        metrics: the metrics that were saved with the step.
    """

    step: int
    path: Any
    _: KW_ONLY
    metadata: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None
    metrics: Any = None

    @property
    def time(self) -> datetime.datetime:
        """When the step was committed, or, until then, its save began; the beginning of 1970 if neither is known."""
        return self.commit_timestamp or self.init_timestamp or _EPOCH


_EPOCH = datetime.datetime.fromtimestamp(0, tz=datetime.UTC)
Step = PolicyCheckpointInfo = CheckpointMetadata[None]
Steps = Sequence[Step]
Kept = Sequence[bool]
"""For each checkpoint, oldest first, whether it stays."""


# ------------------------------------------------------------------------------------ what to keep


@dataclass(kw_only=True)
class PreservationContext:
    """What a policy knows besides the steps.

    Attributes:
        now: the moment for which it is asked; None for the current one.
    """

    now: datetime.datetime | None = None


@runtime_checkable
class PreservationPolicy(Protocol):
    """Decides which steps stay."""

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        """For each checkpoint, oldest first, whether it stays."""
        ...


@dataclass
class PreserveAll(PreservationPolicy):
    """Keeps every step."""

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        return [True] * len(checkpoints)


@dataclass
class LatestN(PreservationPolicy):
    """Keeps the newest ``n`` steps; all for None."""

    n: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        first = 0 if self.n is None else len(checkpoints) - self.n
        return [position >= first for position in range(len(checkpoints))]


@dataclass
class EveryNSeconds(PreservationPolicy):
    """Keeps the first step, then each at least ``interval_secs`` after the last one kept."""

    interval_secs: int

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        interval = datetime.timedelta(seconds=self.interval_secs)
        return _spaced(checkpoints, lambda kept, step: step.time - kept.time >= interval)


@dataclass
class EveryNSteps(PreservationPolicy):
    """Keeps multiples of ``interval_steps``, or, not exactly, steps at least that far apart."""

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        interval = _interval(self.interval_steps)
        if self.exact_interval:
            kept = [checkpoint.step % interval == 0 for checkpoint in checkpoints]
        else:
            kept = _spaced(checkpoints, lambda last, step: step.step - last.step >= interval)
        return _last_of(kept, self.max_to_keep)


@dataclass
class EveryNStepsClosest(PreservationPolicy):
    """Keeps, for each multiple of ``interval_steps``, the step closest to it; and the newest."""

    interval_steps: int
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        interval = _interval(self.interval_steps)
        closest: dict[int, tuple[int, int]] = {}
        for position, checkpoint in enumerate(checkpoints):
            multiple = round(checkpoint.step / interval)
            distance = abs(checkpoint.step - multiple * interval)
            if multiple not in closest or distance <= closest[multiple][0]:
                closest[multiple] = distance, position
        kept = {position for _, position in closest.values()} | {len(checkpoints) - 1}
        return _last_of(
            [position in kept for position in range(len(checkpoints))], self.max_to_keep
        )


@dataclass(init=False)
class CustomSteps(PreservationPolicy):
    """Keeps the steps with these numbers."""

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = frozenset(steps)

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        return [checkpoint.step in self.steps for checkpoint in checkpoints]


@dataclass(kw_only=True)
class BestN(PreservationPolicy):
    """Keeps the ``n`` steps for which ``get_metric_fn(metrics)`` is greatest; least if ``reverse``."""

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        if self.n is None or len(checkpoints) <= self.n:
            return [True] * len(checkpoints)
        measured = [p for p, one in enumerate(checkpoints) if one.metrics is not None]
        measured.sort(
            key=lambda position: self.get_metric_fn(checkpoints[position].metrics),
            reverse=self.reverse,
        )
        best = set(measured[-self.n :] if self.n else ())
        spared = self.keep_checkpoints_without_metrics and self.n > 0
        return [
            position in best or (spared and one.metrics is None)
            for position, one in enumerate(checkpoints)
        ]


@dataclass
class LatestDuration(PreservationPolicy):
    """Keeps the steps of the last ``duration``, and those after the first of them."""

    duration: datetime.timedelta

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        oldest = (context.now or datetime.datetime.now(tz=datetime.UTC)) - self.duration
        recent = [position for position, one in enumerate(checkpoints) if one.time >= oldest]
        first = recent[0] if recent else len(checkpoints)
        return [position >= first for position in range(len(checkpoints))]


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keeps what one of the policies keeps."""

    policies: Sequence[Any]

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        kept = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        return (
            [any(flags) for flags in zip(*kept, strict=True)]
            if kept
            else [False] * len(checkpoints)
        )


BY_NUMBER = (PreserveAll, LatestN, EveryNSteps, EveryNStepsClosest, CustomSteps)
"""Policies that ask for the numbers of steps alone."""


def _interval(steps: int) -> int:
    if steps == 0:
        raise ValueError("interval_steps must not be 0")
    return steps


def _spaced(checkpoints: Sequence[Step], far: Callable[[Step, Step], bool]) -> list[bool]:
    """Keeps the first, then each that is ``far`` from the last one kept."""
    kept: list[bool] = []
    last: Step | None = None
    for checkpoint in checkpoints:
        kept.append(last is None or far(last, checkpoint))
        last = checkpoint if kept[-1] else last
    return kept


def _last_of(kept: list[bool], limit: int | None) -> list[bool]:
    """The last ``limit`` of those that are kept; all for None, and for 0 as in Orbax."""
    chosen = [position for position, keep in enumerate(kept) if keep]
    if not limit or len(chosen) <= limit:
        return kept
    stay = set(chosen[len(chosen) - limit :])
    return [position in stay for position in range(len(kept))]


# ------------------------------------------------------------------------------------ when to save


@dataclass(kw_only=True)
class DecisionContext:
    """What a policy knows besides the steps."""

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: MultiprocessingOptions


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved."""

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        """Whether to save ``step``, after ``previous_steps``."""
        ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves the steps that are multiples of ``interval``."""

    interval: int

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves the steps with these numbers."""

    steps: Container[int]

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return step.step in self.steps


@dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves whenever no save is running, and at most once in ``minimum_interval_secs``."""

    minimum_interval_secs: int | None = None

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        past = step.time - previous_steps[-1].time
        return past >= datetime.timedelta(seconds=self.minimum_interval_secs)


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves the step at which jax's preemption service says to stop."""

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """Saves if there is no step yet."""

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves if one of the policies does."""

    policies: Sequence[Any]

    def should_save(self, step: Step, previous_steps: Steps, *, context: DecisionContext) -> bool:
        asked = [
            policy.should_save(step, previous_steps, context=context) for policy in self.policies
        ]
        return any(asked)


def default_policy() -> SaveDecisionPolicy:
    """Orbax's: the first step, then whenever no save is running, and at a preemption."""
    return AnySavePolicy(
        [InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]
    )
