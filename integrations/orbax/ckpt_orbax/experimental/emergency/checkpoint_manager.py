"""Orbax's emergency manager: making one says what to use instead."""

from ckpt_orbax._refused import EMERGENCY, Refused
from ckpt_orbax.v0.handlers import CheckpointHandler, PyTreeCheckpointHandler
from ckpt_orbax.v0.metadata import RootMetadata, StepMetadata
from ckpt_orbax.v0.options import MultiprocessingOptions


class CheckpointManager(Refused):
    """Refused when it is made."""

    why_not = EMERGENCY


class CheckpointManagerOptions(Refused):
    """Refused when it is made."""

    why_not = EMERGENCY


class LocalCheckpointOptions(Refused):
    """Refused when it is made."""

    why_not = EMERGENCY


class PersistentCheckpointOptions(Refused):
    """Refused when it is made."""

    why_not = EMERGENCY


__all__ = [
    "CheckpointHandler",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "LocalCheckpointOptions",
    "MultiprocessingOptions",
    "PersistentCheckpointOptions",
    "PyTreeCheckpointHandler",
    "RootMetadata",
    "StepMetadata",
]
