"""The base of managers."""

from ckpt_orbax.v0._abstract import AbstractCheckpointManager

__all__ = ["AbstractCheckpointManager"]
