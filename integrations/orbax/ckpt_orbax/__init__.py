"""Orbax's names on ckpt's engine; Orbax itself is never imported.

::

    import ckpt_orbax as ocp              # was: import orbax.checkpoint as ocp
    from ckpt_orbax import v1 as ocp      # was: from orbax.checkpoint import v1 as ocp

    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))

The directories are Orbax's, and what ckpt adds is theirs: checksums, a commit that survives a power
cut, and speed. ``docs/moving_from_orbax.md`` has the native way, ``docs/api/orbax.md`` the names.
"""

import sys

from ckpt_core.arguments import answer_for_classes
from ckpt_orbax import (
    abstract_checkpoint_manager,
    aggregate_handlers,
    args,
    arrays,
    checkpoint_args,
    checkpoint_manager,
    checkpoint_managers,
    checkpoint_utils,
    checkpointers,
    experimental,
    future,
    handlers,
    logging,
    metadata,
    msgpack_utils,
    multihost,
    options,
    path,
    pathways,
    serialization,
    test_utils,
    transform_utils,
    tree,
    type_handlers,
    utils,
    v1,
)
from ckpt_orbax._leaves import PLACEHOLDER
from ckpt_orbax._refused import NotOffered, is_face, refusing
from ckpt_orbax.path import step
from ckpt_orbax.transform_utils import merge_trees
from ckpt_orbax.v0._abstract import AbstractCheckpointer, AbstractCheckpointManager
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
    BasePyTreeCheckpointHandler,
    CheckpointHandler,
    CheckpointHandlerRegistry,
    CompositeCheckpointHandler,
    CompositeOptions,
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

__version__ = "0.12.8"
"""The version of Orbax whose names these are, for programs that ask; ``ckpt_core.__version__`` is ckpt's."""

__all__ = [
    "AbstractCheckpointManager",
    "AbstractCheckpointer",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "AsyncCheckpointer",
    "AsyncOptions",
    "BasePyTreeCheckpointHandler",
    "CheckpointArgs",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "CompositeOptions",
    "DefaultCheckpointHandlerRegistry",
    "Future",
    "JsonCheckpointHandler",
    "NotOffered",
    "PLACEHOLDER",
    "PyTreeCheckpointHandler",
    "PyTreeCheckpointer",
    "RestoreArgs",
    "SaveArgs",
    "SingleReplicaArrayRestoreArgs",
    "StandardCheckpointHandler",
    "StandardCheckpointer",
    "__version__",
    "abstract_checkpoint_manager",
    "aggregate_handlers",
    "args",
    "arrays",
    "checkpoint_args",
    "checkpoint_manager",
    "checkpoint_managers",
    "checkpoint_utils",
    "checkpointers",
    "experimental",
    "future",
    "handlers",
    "logging",
    "merge_trees",
    "metadata",
    "msgpack_utils",
    "multihost",
    "options",
    "path",
    "pathways",
    "register_with_handler",
    "serialization",
    "step",
    "test_utils",
    "transform_utils",
    "tree",
    "type_handlers",
    "utils",
    "v1",
]

for _name, _module in [*sys.modules.items()]:
    if _name.startswith("ckpt_orbax."):
        answer_for_classes(
            one
            for one in vars(_module).values()
            if isinstance(one, type) and one.__module__.startswith("ckpt_orbax.")
        )
    if is_face(_name):
        vars(_module)["__getattr__"] = refusing(_name)
