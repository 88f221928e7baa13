"""Orbax's names on ckpt's engine; Orbax itself is never imported.

::

    import ckpt_orbax as ocp              # was: import orbax.checkpoint as ocp
    from ckpt_orbax import v1 as ocp      # was: from orbax.checkpoint import v1 as ocp

    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))

The directories are Orbax's, and what ckpt adds is theirs: checksums, a commit that survives a power
cut, and speed. ``docs/moving_from_orbax.md`` has the native way, ``docs/api/orbax.md`` the names.
"""

from ckpt_orbax import (
    _lone_names,
    args as args,
    checkpoint_manager as checkpoint_manager,
    checkpoint_managers as checkpoint_managers,
    checkpoint_utils as checkpoint_utils,
    checkpointers as checkpointers,
    experimental as experimental,
    future as future,
    handlers as handlers,
    metadata as metadata,
    multihost as multihost,
    options as options,
    path as path,
    tree as tree,
    type_handlers as type_handlers,
    utils as utils,
    v1 as v1,
)
from ckpt_orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ckpt_orbax._options import CheckpointManagerOptions as CheckpointManagerOptions
from ckpt_orbax._refused import NotOffered as NotOffered, offer as _offer
from ckpt_orbax.args import CheckpointArgs as CheckpointArgs
from ckpt_orbax.checkpoint_manager import CheckpointManager as CheckpointManager
from ckpt_orbax.checkpointers import (
    AsyncCheckpointer as AsyncCheckpointer,
    Checkpointer as Checkpointer,
    PyTreeCheckpointer as PyTreeCheckpointer,
    StandardCheckpointer as StandardCheckpointer,
)
from ckpt_orbax.handlers import (
    ArrayCheckpointHandler as ArrayCheckpointHandler,
    AsyncCheckpointHandler as AsyncCheckpointHandler,
    CheckpointHandler as CheckpointHandler,
    CompositeCheckpointHandler as CompositeCheckpointHandler,
    DefaultCheckpointHandlerRegistry as DefaultCheckpointHandlerRegistry,
    JsonCheckpointHandler as JsonCheckpointHandler,
    PyTreeCheckpointHandler as PyTreeCheckpointHandler,
    StandardCheckpointHandler as StandardCheckpointHandler,
)
from ckpt_orbax.options import AsyncOptions as AsyncOptions
from ckpt_orbax.path import step as step
from ckpt_orbax.type_handlers import (
    ArrayRestoreArgs as ArrayRestoreArgs,
    RestoreArgs as RestoreArgs,
    SaveArgs as SaveArgs,
    SingleReplicaArrayRestoreArgs as SingleReplicaArrayRestoreArgs,
)

# Orbax's other names of these modules.
checkpoint_args, transform_utils = handlers, tree
pathways = test_utils = _lone_names

__version__ = "0.12.8"
"""The version of Orbax whose names these are, for programs that ask; ``ckpt_core.__version__`` is ckpt's."""

_offer(__name__)
