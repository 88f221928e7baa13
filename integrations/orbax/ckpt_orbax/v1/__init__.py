"""Orbax's second API on ckpt's engine: ``from ckpt_orbax import v1 as ocp``."""

from typing import Any

from ckpt_orbax import _checkpointables as handlers
from ckpt_orbax import _errors as errors
from ckpt_orbax import _leaves as arrays
from ckpt_orbax import multihost, options, path
from ckpt_orbax._checkpointables import CheckpointableHandler, StatefulCheckpointable
from ckpt_orbax._leaves import PLACEHOLDER
from ckpt_orbax.future import AsyncResponse
from ckpt_orbax.metadata import CheckpointMetadata, is_orbax_checkpoint
from ckpt_orbax.v1 import training
from ckpt_orbax.v1._context import Context
from ckpt_orbax.v1._single import (
    checkpointables_metadata,
    load,
    load_async,
    load_checkpointables,
    load_checkpointables_async,
    load_pytree,
    load_pytree_async,
    metadata,
    pytree_metadata,
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
    save_pytree,
    save_pytree_async,
)

PyTreeMetadata = Checkpointable = AbstractCheckpointable = Any
"""A saved tree with a description at each leaf; an object that is saved; a target for one."""

__all__ = [
    "PLACEHOLDER",
    "AbstractCheckpointable",
    "AsyncResponse",
    "CheckpointMetadata",
    "Checkpointable",
    "CheckpointableHandler",
    "Context",
    "PyTreeMetadata",
    "StatefulCheckpointable",
    "arrays",
    "checkpointables_metadata",
    "errors",
    "handlers",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "multihost",
    "options",
    "path",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
]
