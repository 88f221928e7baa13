"""Orbax's second API on ckpt's engine: ``from ckpt_orbax import v1 as ocp``."""

import typing as _typing

from ckpt_orbax import multihost as multihost
from ckpt_orbax import options as options
from ckpt_orbax import path as path
from ckpt_orbax._checkpointables import CheckpointableHandler as CheckpointableHandler
from ckpt_orbax._checkpointables import StatefulCheckpointable as StatefulCheckpointable
from ckpt_orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ckpt_orbax._modules import arrays as arrays
from ckpt_orbax._modules import errors as errors
from ckpt_orbax._modules import handlers as handlers
from ckpt_orbax.future import AsyncResponse as AsyncResponse
from ckpt_orbax.metadata import CheckpointMetadata as CheckpointMetadata
from ckpt_orbax.metadata import is_orbax_checkpoint as is_orbax_checkpoint
from ckpt_orbax.v1 import training as training
from ckpt_orbax.v1._context import Context as Context
from ckpt_orbax.v1._single import checkpointables_metadata as checkpointables_metadata
from ckpt_orbax.v1._single import load as load
from ckpt_orbax.v1._single import load_async as load_async
from ckpt_orbax.v1._single import load_checkpointables as load_checkpointables
from ckpt_orbax.v1._single import load_checkpointables_async as load_checkpointables_async
from ckpt_orbax.v1._single import load_pytree as load_pytree
from ckpt_orbax.v1._single import load_pytree_async as load_pytree_async
from ckpt_orbax.v1._single import metadata as metadata
from ckpt_orbax.v1._single import pytree_metadata as pytree_metadata
from ckpt_orbax.v1._single import save as save
from ckpt_orbax.v1._single import save_async as save_async
from ckpt_orbax.v1._single import save_checkpointables as save_checkpointables
from ckpt_orbax.v1._single import save_checkpointables_async as save_checkpointables_async
from ckpt_orbax.v1._single import save_pytree as save_pytree
from ckpt_orbax.v1._single import save_pytree_async as save_pytree_async

PyTreeMetadata = Checkpointable = AbstractCheckpointable = _typing.Any
"""A saved tree with a description at each leaf; an object that is saved; a target for one."""
