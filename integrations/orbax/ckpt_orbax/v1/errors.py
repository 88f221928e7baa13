"""Errors that Orbax's callers catch; each is also an error of ckpt and of the builtin type."""

from __future__ import annotations

from ckpt_core import CheckpointError, CheckpointExists, CheckpointNotFound


class InvalidLayoutError(CheckpointError, ValueError):
    """There is no checkpoint at the path, or none of the wanted form."""


class NoCheckpointError(InvalidLayoutError, CheckpointNotFound):
    """There is no checkpoint at the path."""


class DestinationExistsError(CheckpointExists, ValueError):
    """Something exists at the path, and ``overwrite=True`` was not given."""


class DeletionInProgressError(CheckpointError, ValueError):
    """Never raised: ckpt deletes a step at once, and parts of one not at all."""


class DeletionRecoveryError(CheckpointError, ValueError):
    """Never raised: ckpt deletes a step at once, and parts of one not at all."""


class TreeMismatchError(CheckpointError, ValueError, KeyError):
    """Target and checkpoint differ; the cause, a ``StructureMismatch``, has all differences.

    Of the builtin types, Orbax raises the first in ``load``, the second in ``load_checkpointables``.
    """

    __str__ = Exception.__str__  # KeyError shows its message in quotes


class MissingCheckpointablesError(CheckpointError, KeyError):
    """The checkpoint has no checkpointable of a name."""

    __str__ = Exception.__str__  # KeyError shows its message in quotes


__all__ = [
    "DeletionInProgressError",
    "DeletionRecoveryError",
    "DestinationExistsError",
    "InvalidLayoutError",
    "MissingCheckpointablesError",
    "NoCheckpointError",
    "TreeMismatchError",
]
