"""Orbax's policies in the form in which ckpt asks: functions of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_orbax.v1._step_metadata import CheckpointMetadata
from ckpt_orbax.v1.options import MultiprocessingOptions
from ckpt_orbax.v1.training import save_decision_policies as saving
from ckpt_orbax.v1.training.preservation_policies import PreservationContext

Step = CheckpointMetadata[None]


def save_policy(
    policy: Any,
    previous_steps: Callable[[], Sequence[Step]],
    multiprocessing: MultiprocessingOptions,
) -> ckpt.when.SavePolicy:
    """The policy as ckpt asks it; process 0 decides for all.

    Args:
        policy: an object with ``should_save``.
        previous_steps: gives the steps that are saved or being saved, oldest first.
        multiprocessing: what the policy may want to know of the processes.
    """

    def decide(step: int, context: ckpt.when.SaveContext) -> bool:
        now = CheckpointMetadata[None](step, None, commit_timestamp_nsecs=time.time_ns())
        told = saving.DecisionContext(
            is_saving_in_progress=context.saving,
            reached_preemption=context.preempted,
            multiprocessing_options=multiprocessing,
        )
        return bool(policy.should_save(now, previous_steps(), context=told))

    # A process without jax.distributed has no preemption service: there, as with Orbax, SIGTERM
    # ends it. Listening would let it live on without being told.
    listens = jax.distributed.is_initialized() and _asks_for_preemption(policy)
    return ckpt.when.SavePolicy(decide, repr(policy), listens)


def _asks_for_preemption(policy: Any) -> bool:
    if isinstance(policy, saving.AnySavePolicy):
        return any(_asks_for_preemption(one) for one in policy.policies)
    return not isinstance(
        policy,
        (
            saving.FixedIntervalPolicy,
            saving.SpecificStepsPolicy,
            saving.ContinuousCheckpointingPolicy,
            saving.InitialSavePolicy,
        ),
    )


def keep_policy(policy: Any) -> Any:
    """The policy as ckpt asks it; None keeps all."""
    if policy is None:
        return None

    def choose(facts: Sequence[Any]) -> list[int]:
        steps = [
            CheckpointMetadata[None](
                one.step,
                None,
                commit_timestamp_nsecs=int(one.created_unix_secs * 1e9),
                metrics=_nested(one.metrics) or None,
            )
            for one in facts
        ]
        kept = policy.should_preserve(steps, context=PreservationContext())
        return [one.step for one, stays in zip(facts, kept, strict=True) if stays]

    choose.__name__ = type(policy).__name__
    return choose


def _nested(numbers: Mapping[str, float]) -> dict[str, Any]:
    """The numbers by name; those with "/" in it also nested, as they may have been saved."""
    found: dict[str, Any] = {}
    for name, number in numbers.items():
        *parents, last = name.split("/")
        inside = found
        for parent in parents:
            below = inside.setdefault(parent, {})
            inside = below if isinstance(below, dict) else {}
        inside[last] = number
    return {**found, **numbers}


def as_saved(metrics: Any) -> tuple[Any, dict[str, Any]]:
    """Metrics as ckpt takes them: numbers by name, or an item with whatever JSON they are."""
    flat = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "fiub"
        for name, value in cast(Mapping[Any, Any], metrics).items()
    )
    if metrics is None or flat:
        return metrics, {}
    return None, {"metrics": ckpt.Json(metrics)}
