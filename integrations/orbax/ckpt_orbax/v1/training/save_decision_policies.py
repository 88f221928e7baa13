"""When to save: Orbax's policies, which are asked at each step.

A policy of your own is a class with ``should_save(step, previous_steps, *, context)``; ``step`` and
``previous_steps`` are ``CheckpointMetadata``, of which ``step``, ``time`` and ``metrics`` are known.
With several processes, process 0 asks, and all do what it says.
"""

from __future__ import annotations

import datetime
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ckpt_orbax.v1._step_metadata import CheckpointMetadata
from ckpt_orbax.v1.options import MultiprocessingOptions

Step = CheckpointMetadata[None]


@dataclass(kw_only=True)
class DecisionContext:
    """What a policy knows besides the steps."""

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: MultiprocessingOptions


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved."""

    def should_save(
        self, step: Step, previous_steps: Sequence[Step], *, context: DecisionContext
    ) -> bool:
        """Whether to save ``step``, after ``previous_steps``."""
        ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves the steps that are multiples of ``interval``."""

    interval: int

    def should_save(
        self, step: Step, previous_steps: Sequence[Step], *, context: DecisionContext
    ) -> bool:
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    """Saves the steps with these numbers."""

    steps: Container[int]

    def should_save(
        self, step: Step, previous_steps: Sequence[Step], *, context: DecisionContext
    ) -> bool:
        return step.step in self.steps


@dataclass(kw_only=True)
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves whenever no save is running, and at most once in ``minimum_interval_secs``."""

    minimum_interval_secs: int | None = None

    def should_save(
        self, step: Step, previous_steps: Sequence[Step], *, context: DecisionContext
    ) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        past = step.time - previous_steps[-1].time
        return past >= datetime.timedelta(seconds=self.minimum_interval_secs)


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    """Saves the step at which jax's preemption service says to stop."""

    def should_save(
        self, step: Step, previous_steps: Sequence[Step], *, context: DecisionContext
    ) -> bool:
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """Saves if there is no step yet."""

    def should_save(
        self, step: Step, previous_steps: Sequence[Step], *, context: DecisionContext
    ) -> bool:
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    """Saves if one of the policies does."""

    policies: Sequence[Any]

    def should_save(
        self, step: Step, previous_steps: Sequence[Step], *, context: DecisionContext
    ) -> bool:
        asked = [
            policy.should_save(step, previous_steps, context=context) for policy in self.policies
        ]
        return any(asked)


def default_policy() -> SaveDecisionPolicy:
    """Orbax's: the first step, then whenever no save is running, and at a preemption."""
    return AnySavePolicy(
        [InitialSavePolicy(), ContinuousCheckpointingPolicy(), PreemptionCheckpointingPolicy()]
    )
