"""When to save and what to keep: Orbax's policies, and the steps as they see them.

A policy of your own is a class with ``should_save(step, previous_steps, *, context)``, or with
``should_preserve(checkpoints, *, context)``, which returns one bool for each checkpoint, oldest first.
Process 0 asks it, and all processes do what it says. The newest step stays on the disk, for resuming.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ckpt_orbax.metadata import Described, Tree
from ckpt_orbax.options import MultiprocessingOptions

preservation_policy = save_decision_policy = sys.modules[__name__]


@dataclass(frozen=True)
class CheckpointMetadata(Described[Tree]):
    """One step of a run: its number, directory and metrics. ``metadata`` is None but for what ``metadata`` and
    ``checkpointables_metadata`` read.
    """

    step: int
    path: Any
    metrics: Any = field(default=None, kw_only=True)

    @property
    def time(self) -> datetime.datetime:
        """When the step was committed, or, until then, its save began; the beginning of 1970 if neither is known."""
        return self.commit_timestamp or self.init_timestamp or _EPOCH


_EPOCH = datetime.datetime.fromtimestamp(0, tz=datetime.UTC)
Step = PolicyCheckpointInfo = CheckpointMetadata[None]
Steps = Sequence[Step]
Kept = Sequence[bool]
"""For each checkpoint, oldest first, whether it stays."""


@dataclass(kw_only=True)
class PreservationContext:
    """What a policy knows besides the steps: nothing yet, as in Orbax."""


@runtime_checkable
class PreservationPolicy(Protocol):
    """Decides which steps stay."""

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        """For each checkpoint, oldest first, whether it stays."""
        ...


class _OfPositions(PreservationPolicy):
    """A policy that says which positions stay."""

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        kept = set(self.positions(checkpoints))
        return [position in kept for position in range(len(checkpoints))]

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        raise NotImplementedError


@dataclass
class PreserveAll(_OfPositions):
    """Keeps every step."""

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        return range(len(checkpoints))


@dataclass
class LatestN(_OfPositions):
    """Keeps the newest ``n`` steps; all for None."""

    n: int | None = None

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        return range(0 if self.n is None else len(checkpoints) - self.n, len(checkpoints))


@dataclass
class EveryNSeconds(_OfPositions):
    """Keeps the first step, then each at least ``interval_secs`` after the last one kept."""

    interval_secs: int

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        interval = datetime.timedelta(seconds=self.interval_secs)
        return _spaced([one.time for one in checkpoints], interval)


@dataclass
class EveryNSteps(_OfPositions):
    """Keeps multiples of ``interval_steps``, or, not exactly, steps at least that far apart; of those the newest
    ``max_to_keep``, all for None, and for 0 as in Orbax.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        interval = self.interval_steps
        if interval == 0:
            raise ValueError("interval_steps must not be 0")
        steps = [one.step for one in checkpoints]
        if self.exact_interval:
            kept = [position for position, step in enumerate(steps) if step % interval == 0]
        else:
            kept = _spaced(steps, interval)
        return kept[-self.max_to_keep :] if self.max_to_keep else kept


@dataclass(init=False)
class CustomSteps(_OfPositions):
    """Keeps the steps with these numbers."""

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = frozenset(steps)

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        return (position for position, one in enumerate(checkpoints) if one.step in self.steps)


@dataclass(kw_only=True)
class BestN(_OfPositions):
    """Keeps the ``n`` steps for which ``get_metric_fn(metrics)`` is greatest; least if ``reverse``."""

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        if self.n is None or len(checkpoints) <= self.n:
            return range(len(checkpoints))
        if self.n == 0:
            return ()
        metrics = {at: one.metrics for at, one in enumerate(checkpoints)}
        without = [at for at in metrics if metrics[at] is None]
        measured = [at for at in metrics if metrics[at] is not None]
        measured.sort(key=lambda at: self.get_metric_fn(metrics[at]), reverse=self.reverse)
        return measured[-self.n :] + (without if self.keep_checkpoints_without_metrics else [])


@dataclass
class LatestDuration(_OfPositions):
    """Keeps the steps of the last ``duration``, and those after the first of them."""

    duration: datetime.timedelta

    def positions(self, checkpoints: Steps) -> Iterable[int]:
        oldest = datetime.datetime.now(tz=datetime.UTC) - self.duration
        recent = (position for position, one in enumerate(checkpoints) if one.time >= oldest)
        return range(next(recent, len(checkpoints)), len(checkpoints))


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keeps what one of the policies keeps."""

    policies: Sequence[Any]

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> Kept:
        kept = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        none: Kept = [False] * len(checkpoints)
        return [any(flags) for flags in zip(none, *kept, strict=True)]


BY_NUMBER = (PreserveAll, LatestN, EveryNSteps, CustomSteps)
"""Policies that ask for the numbers of steps alone."""


def _spaced(values: Sequence[Any], interval: Any) -> list[int]:
    """The position of the first value, then of each at least ``interval`` behind the last one chosen."""
    kept: list[int] = []
    for position, value in enumerate(values):
        if not kept or value - values[kept[-1]] >= interval:
            kept.append(position)
    return kept


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
        # each is asked, also one behind the first that saves
        wants = [one.should_save(step, previous_steps, context=context) for one in self.policies]
        return any(wants)


NEVER_AT_PREEMPTION = (
    FixedIntervalPolicy,
    SpecificStepsPolicy,
    ContinuousCheckpointingPolicy,
    InitialSavePolicy,
)
"""Policies that do not ask whether the run is to stop."""


def default_policy() -> SaveDecisionPolicy:
    """Orbax's: the first step, then whenever no save is running, and at a preemption."""
    return AnySavePolicy(
        [InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]
    )
