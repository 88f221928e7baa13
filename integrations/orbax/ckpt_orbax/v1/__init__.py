"""Orbax's second API on ckpt's engine: ``from ckpt_orbax import v1 as ocp``."""

from ckpt_orbax._refused import refusing
from ckpt_orbax._response import AsyncResponse
from ckpt_orbax.v1 import (
    arrays,
    errors,
    handlers,
    multihost,
    options,
    path,
    training,
)
from ckpt_orbax.v1._context import Context
from ckpt_orbax.v1._describe import is_orbax_checkpoint
from ckpt_orbax.v1.describing import (
    CheckpointMetadata,
    PyTreeMetadata,
    checkpointables_metadata,
    metadata,
    pytree_metadata,
)
from ckpt_orbax.v1.handlers import (
    AbstractCheckpointable,
    Checkpointable,
    CheckpointableHandler,
    StatefulCheckpointable,
)
from ckpt_orbax.v1.loading import (
    PLACEHOLDER,
    load,
    load_async,
    load_checkpointables,
    load_checkpointables_async,
    load_pytree,
    load_pytree_async,
)
from ckpt_orbax.v1.saving import (
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
    save_pytree,
    save_pytree_async,
)

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

__getattr__ = refusing(__name__)
