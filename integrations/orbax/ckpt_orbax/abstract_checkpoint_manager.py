"""The base of managers."""

from ckpt_orbax._refused import refusing
from ckpt_orbax.v0._abstract import AbstractCheckpointManager

__all__ = ["AbstractCheckpointManager"]

__getattr__ = refusing(__name__)
