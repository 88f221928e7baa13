"""Errors of ``training.Checkpointer``."""

from __future__ import annotations

from ckpt_core import CheckpointExists, CheckpointNotFound


class StepAlreadyExistsError(CheckpointExists):
    """A checkpoint of this step exists, and ``overwrite=True`` was not given."""


class StepNotFoundError(CheckpointNotFound):
    """There is no checkpoint of this step."""
