"""Managers for frequent steps in the memory of hosts: names that import, and say what to use when they are made."""

from __future__ import annotations

import sys
from typing import Any

from ckpt_orbax._refused import not_offered


class CheckpointManager:
    """Cannot be made, as the classes of its options; a program that only names them runs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise not_offered(
            f"emergency.{type(self).__name__}",
            "frequent steps in the memory or on the disks of hosts are the engine's own",
            "ckpt_core.Checkpointer(directory, local_directory=...), or CheckpointManager for the directory alone",
        )


class ReplicatorCheckpointManager(CheckpointManager):
    """As ``CheckpointManager``."""


CheckpointManagerOptions = LocalCheckpointOptions = PersistentCheckpointOptions = CheckpointManager
ReplicatorCheckpointManagerOptions = ReplicatorCheckpointManager
checkpoint_manager = replicator_checkpoint_manager = sys.modules[__name__]
