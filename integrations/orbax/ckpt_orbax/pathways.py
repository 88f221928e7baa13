"""The one name of Orbax's ``pathways`` that programs use where there is no Pathways."""

from __future__ import annotations

import enum


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


__all__ = ["CheckpointingImpl"]
