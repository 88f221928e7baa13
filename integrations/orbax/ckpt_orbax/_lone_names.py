"""The single names of Orbax's ``pathways``, ``test_utils`` and ``path.atomicity`` that programs use."""

from __future__ import annotations

import enum
import shutil
from typing import Any

from ckpt_orbax._paths import as_path, as_text, exists


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
