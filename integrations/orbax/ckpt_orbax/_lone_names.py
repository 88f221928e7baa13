"""The single names of Orbax's ``pathways``, ``test_utils``, ``path.atomicity`` and ``emergency`` that programs use."""

from __future__ import annotations

import enum
import shutil
import sys
from typing import Any

from ckpt_orbax._paths import as_path, as_text, exists
from ckpt_orbax._refused import not_offered


class CheckpointingImpl(enum.Enum):
    """Who writes arrays under Pathways; ckpt takes ``NO_DISPATCHER``, which is without Pathways."""

    COLOCATED_PYTHON = enum.auto()
    PERSISTENCE = enum.auto()
    NO_DISPATCHER = enum.auto()

    @classmethod
    def from_options(
        cls, *, use_colocated_python: bool = False, use_persistence_array_handler: bool = False
    ) -> CheckpointingImpl:
        """The first of those that are asked for, else ``NO_DISPATCHER``."""
        if use_colocated_python:
            return cls.COLOCATED_PYTHON
        return cls.PERSISTENCE if use_persistence_array_handler else cls.NO_DISPATCHER


class CommitFileTemporaryPath:
    """For ``temporary_path_class=``, which has no effect: ckpt's commits are atomic everywhere."""


def erase_and_create_empty(directory: Any) -> Any:
    """An empty directory at a path, whatever was there; its path."""
    path = as_path(as_text(directory))
    if exists(path):
        shutil.rmtree(path)
    path.mkdir()
    return path


class CheckpointManager:
    """An emergency manager: cannot be made, as the classes of its options; a program that only names them runs."""

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
