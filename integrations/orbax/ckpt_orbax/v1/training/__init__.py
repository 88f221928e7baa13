"""Checkpoints of a training run."""

from ckpt_orbax.v1._step_metadata import CheckpointMetadata, RootMetadata
from ckpt_orbax.v1.training import (
    errors,
    pathways,
    preservation_policies,
    save_decision_policies,
)
from ckpt_orbax.v1.training._checkpointer import Checkpointer

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "pathways",
    "preservation_policies",
    "save_decision_policies",
]
