"""Managers for frequent steps in the memory of hosts: names that import, and say what to use instead."""

from ckpt_orbax.experimental.emergency import checkpoint_manager, replicator_checkpoint_manager

__all__ = ["checkpoint_manager", "replicator_checkpoint_manager"]
