"""Orbax's manager for a replicator service: making one says what to use instead."""

from ckpt_orbax._refused import EMERGENCY, Refused


class ReplicatorCheckpointManager(Refused):
    """Refused when it is made."""

    why_not = EMERGENCY


class ReplicatorCheckpointManagerOptions(Refused):
    """Refused when it is made."""

    why_not = EMERGENCY


__all__ = ["ReplicatorCheckpointManager", "ReplicatorCheckpointManagerOptions"]
