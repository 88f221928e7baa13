"""Orbax's second API on ckpt's engine: ``from ckpt_orbax import v1 as ocp``."""

import typing as _typing

from ckpt_orbax import (
    _checkpointables,
    _errors,
    _leaves,
    multihost as multihost,
    options as options,
    path as path,
)
from ckpt_orbax._checkpointables import (
    CheckpointableHandler as CheckpointableHandler,
    StatefulCheckpointable as StatefulCheckpointable,
)
from ckpt_orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ckpt_orbax.future import AsyncResponse as AsyncResponse
from ckpt_orbax.metadata import (
    CheckpointMetadata as CheckpointMetadata,
    is_orbax_checkpoint as is_orbax_checkpoint,
)
from ckpt_orbax.v1 import training as training
from ckpt_orbax.v1._context import Context as Context
from ckpt_orbax.v1._single import (
    checkpointables_metadata as checkpointables_metadata,
    load as load,
    load_async as load_async,
    load_checkpointables as load_checkpointables,
    load_checkpointables_async as load_checkpointables_async,
    load_pytree as load_pytree,
    load_pytree_async as load_pytree_async,
    metadata as metadata,
    pytree_metadata as pytree_metadata,
    save as save,
    save_async as save_async,
    save_checkpointables as save_checkpointables,
    save_checkpointables_async as save_checkpointables_async,
    save_pytree as save_pytree,
    save_pytree_async as save_pytree_async,
)

arrays, errors, handlers = _leaves, _errors, _checkpointables
PyTreeMetadata = Checkpointable = AbstractCheckpointable = _typing.Any
"""A saved tree with a description at each leaf; an object that is saved; a target for one."""
