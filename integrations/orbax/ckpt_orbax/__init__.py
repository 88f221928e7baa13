"""Orbax's names on ckpt's engine; Orbax itself is never imported.

::

    import ckpt_orbax as ocp              # was: import orbax.checkpoint as ocp
    from ckpt_orbax import v1 as ocp      # was: from orbax.checkpoint import v1 as ocp

    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))

The directories are Orbax's, and what ckpt adds is theirs: checksums, a commit that survives a power
cut, and speed. ``docs/moving_from_orbax.md`` has the list of what is offered, and the native way
beside it.
"""

from ckpt_orbax import multihost, pathways, v1
from ckpt_orbax._leaves import PLACEHOLDER
from ckpt_orbax._refused import NotOffered, missing_name
from ckpt_orbax.v0 import (
    args,
    checkpoint_manager,
    checkpoint_managers,
    checkpoint_utils,
    checkpointers,
    future,
    handlers,
    metadata,
    options,
    tree,
    type_handlers,
    utils,
)
from ckpt_orbax.v0.args import CheckpointArgs, register_with_handler
from ckpt_orbax.v0.checkpoint_manager import CheckpointManager, CheckpointManagerOptions
from ckpt_orbax.v0.checkpointers import (
    AsyncCheckpointer,
    Checkpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from ckpt_orbax.v0.future import Future
from ckpt_orbax.v0.handlers import (
    ArrayCheckpointHandler,
    AsyncCheckpointHandler,
    CheckpointHandler,
    CheckpointHandlerRegistry,
    CompositeCheckpointHandler,
    DefaultCheckpointHandlerRegistry,
    JsonCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from ckpt_orbax.v0.leaf_args import (
    ArrayRestoreArgs,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
)
from ckpt_orbax.v0.options import AsyncOptions
from ckpt_orbax.v1 import path
from ckpt_orbax.v1.path import step

__all__ = [
    "PLACEHOLDER",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "AsyncCheckpointer",
    "AsyncOptions",
    "CheckpointArgs",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "DefaultCheckpointHandlerRegistry",
    "Future",
    "JsonCheckpointHandler",
    "NotOffered",
    "PyTreeCheckpointHandler",
    "PyTreeCheckpointer",
    "RestoreArgs",
    "SaveArgs",
    "SingleReplicaArrayRestoreArgs",
    "StandardCheckpointHandler",
    "StandardCheckpointer",
    "args",
    "checkpoint_manager",
    "checkpoint_managers",
    "checkpoint_utils",
    "checkpointers",
    "future",
    "handlers",
    "metadata",
    "multihost",
    "options",
    "path",
    "pathways",
    "register_with_handler",
    "step",
    "tree",
    "type_handlers",
    "utils",
    "v1",
]


def __getattr__(name: str) -> object:
    raise missing_name("ckpt_orbax", name)
