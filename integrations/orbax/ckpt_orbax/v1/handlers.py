"""Handlers of checkpointables, and their registries."""

from ckpt_orbax.v1 import _registry
from ckpt_orbax.v1._registry import *  # noqa: F403

__all__: list[str] = []
__all__ += _registry.__all__
