"""Orbax's names on ckpt's engine; Orbax itself is never imported.

::

    import ckpt_orbax as ocp              # was: import orbax.checkpoint as ocp
    from ckpt_orbax import v1 as ocp      # was: from orbax.checkpoint import v1 as ocp

    with ocp.CheckpointManager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))

The directories are Orbax's, and what ckpt adds is theirs: checksums, a commit that survives a power
cut, and speed. ``docs/moving_from_orbax.md`` has the native way, ``docs/api/orbax.md`` the names.
"""

from ckpt_orbax import args as args
from ckpt_orbax import checkpoint_manager as checkpoint_manager
from ckpt_orbax import checkpoint_managers as checkpoint_managers
from ckpt_orbax import checkpoint_utils as checkpoint_utils
from ckpt_orbax import checkpointers as checkpointers
from ckpt_orbax import experimental as experimental
from ckpt_orbax import future as future
from ckpt_orbax import handlers as handlers
from ckpt_orbax import metadata as metadata
from ckpt_orbax import multihost as multihost
from ckpt_orbax import options as options
from ckpt_orbax import path as path
from ckpt_orbax import tree as tree
from ckpt_orbax import type_handlers as type_handlers
from ckpt_orbax import utils as utils
from ckpt_orbax import v1 as v1
from ckpt_orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ckpt_orbax._modules import checkpoint_args as checkpoint_args
from ckpt_orbax._modules import pathways as pathways
from ckpt_orbax._modules import test_utils as test_utils
from ckpt_orbax._modules import transform_utils as transform_utils
from ckpt_orbax._options import CheckpointManagerOptions as CheckpointManagerOptions
from ckpt_orbax._refused import NotOffered as NotOffered
from ckpt_orbax._refused import offer as _offer
from ckpt_orbax.args import CheckpointArgs as CheckpointArgs
from ckpt_orbax.checkpoint_manager import CheckpointManager as CheckpointManager
from ckpt_orbax.checkpointers import AsyncCheckpointer as AsyncCheckpointer
from ckpt_orbax.checkpointers import Checkpointer as Checkpointer
from ckpt_orbax.checkpointers import PyTreeCheckpointer as PyTreeCheckpointer
from ckpt_orbax.checkpointers import StandardCheckpointer as StandardCheckpointer
from ckpt_orbax.handlers import ArrayCheckpointHandler as ArrayCheckpointHandler
from ckpt_orbax.handlers import AsyncCheckpointHandler as AsyncCheckpointHandler
from ckpt_orbax.handlers import CheckpointHandler as CheckpointHandler
from ckpt_orbax.handlers import CompositeCheckpointHandler as CompositeCheckpointHandler
from ckpt_orbax.handlers import DefaultCheckpointHandlerRegistry as DefaultCheckpointHandlerRegistry
from ckpt_orbax.handlers import JsonCheckpointHandler as JsonCheckpointHandler
from ckpt_orbax.handlers import PyTreeCheckpointHandler as PyTreeCheckpointHandler
from ckpt_orbax.handlers import StandardCheckpointHandler as StandardCheckpointHandler
from ckpt_orbax.options import AsyncOptions as AsyncOptions
from ckpt_orbax.path import step as step
from ckpt_orbax.type_handlers import ArrayRestoreArgs as ArrayRestoreArgs
from ckpt_orbax.type_handlers import RestoreArgs as RestoreArgs
from ckpt_orbax.type_handlers import SaveArgs as SaveArgs
from ckpt_orbax.type_handlers import SingleReplicaArrayRestoreArgs as SingleReplicaArrayRestoreArgs

__version__ = "0.12.8"
"""The version of Orbax whose names these are, for programs that ask; ``ckpt_core.__version__`` is ckpt's."""

_offer(__name__)
