"""Managers, and the policies that say when they save and what they keep."""

from ckpt_orbax.v0._abstract import AbstractCheckpointManager
from ckpt_orbax.v0.checkpoint_manager import CheckpointManager, CheckpointManagerOptions
from ckpt_orbax.v1.training import preservation_policies as preservation_policy
from ckpt_orbax.v1.training import save_decision_policies as save_decision_policy
from ckpt_orbax.v1.training.preservation_policies import (
    AnyPreservationPolicy,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreservationContext,
    PreservationPolicy,
    PreserveAll,
)
from ckpt_orbax.v1.training.preservation_policies import Step as PolicyCheckpointInfo
from ckpt_orbax.v1.training.save_decision_policies import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)

__all__ = [
    "AbstractCheckpointManager",
    "AnyPreservationPolicy",
    "AnySavePolicy",
    "BestN",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "ContinuousCheckpointingPolicy",
    "CustomSteps",
    "DecisionContext",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "LatestDuration",
    "LatestN",
    "PolicyCheckpointInfo",
    "PreemptionCheckpointingPolicy",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
    "preservation_policy",
    "save_decision_policy",
]
