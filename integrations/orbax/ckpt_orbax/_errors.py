"""Errors that Orbax's callers catch; each is also an error of ckpt and of the builtin type."""

from ckpt_core import CheckpointError, CheckpointExists, CheckpointNotFound


class InvalidLayoutError(CheckpointError, ValueError):
    """There is no checkpoint at the path, or none of the wanted form."""


class NoCheckpointError(InvalidLayoutError, CheckpointNotFound):
    """There is no checkpoint at the path."""


class DestinationExistsError(CheckpointExists, ValueError):
    """Something exists at the path, and ``overwrite=True`` was not given."""


class StepAlreadyExistsError(CheckpointExists, ValueError):
    """A checkpoint of this step exists."""


class StepNotFoundError(CheckpointNotFound):
    """There is no checkpoint of this step."""


class AlreadyExistsError(CheckpointError, ValueError):
    """The registry has an entry for this name or handler."""


class _Unquoted(CheckpointError, KeyError):
    __str__ = Exception.__str__  # KeyError shows its message in quotes


class NoEntryError(_Unquoted):
    """No handler takes this checkpointable."""


class MissingCheckpointablesError(_Unquoted):
    """The checkpoint has no checkpointable of a name."""


class TreeMismatchError(_Unquoted, ValueError):
    """Target and checkpoint differ; the cause, a ``StructureMismatch``, has all differences.

    Of the builtin types, Orbax raises a ValueError in ``load``, a KeyError in ``load_checkpointables``.
    """
