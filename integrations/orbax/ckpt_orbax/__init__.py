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
from ckpt_orbax import _lone_names as pathways
from ckpt_orbax import _lone_names as test_utils
from ckpt_orbax import (
    args,
    checkpoint_manager,
    checkpoint_managers,
    checkpoint_utils,
    checkpointers,
    experimental,
    future,
    handlers,
    metadata,
    multihost,
    options,
    path,
    tree,
    type_handlers,
    utils,
    v1,
)
from ckpt_orbax import handlers as checkpoint_args
from ckpt_orbax import tree as transform_utils
from ckpt_orbax._leaves import PLACEHOLDER
from ckpt_orbax._options import CheckpointManagerOptions
from ckpt_orbax._refused import NotOffered, refusing
from ckpt_orbax.args import CheckpointArgs
from ckpt_orbax.checkpoint_manager import CheckpointManager
from ckpt_orbax.checkpointers import (
    AsyncCheckpointer,
    Checkpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from ckpt_orbax.handlers import (
    ArrayCheckpointHandler,
    AsyncCheckpointHandler,
    CheckpointHandler,
    CompositeCheckpointHandler,
    DefaultCheckpointHandlerRegistry,
    JsonCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from ckpt_orbax.options import AsyncOptions
from ckpt_orbax.path import step
from ckpt_orbax.type_handlers import (
    ArrayRestoreArgs,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
)

__version__ = "0.12.8"
"""The version of Orbax whose names these are, for programs that ask; ``ckpt_core.__version__`` is ckpt's."""

__all__ = [
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "AsyncCheckpointer",
    "AsyncOptions",
    "CheckpointArgs",
    "CheckpointHandler",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "DefaultCheckpointHandlerRegistry",
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
    "args",
    "checkpoint_args",
    "checkpoint_manager",
    "checkpoint_managers",
    "checkpoint_utils",
    "checkpointers",
    "experimental",
    "future",
    "handlers",
    "metadata",
    "multihost",
    "options",
    "path",
    "pathways",
    "step",
    "test_utils",
    "transform_utils",
    "tree",
    "type_handlers",
    "utils",
    "v1",
]

_OTHER_NAMES = {
    "checkpoint_args": checkpoint_args,
    "experimental.emergency": experimental.emergency,
    "experimental.emergency.checkpoint_manager": experimental.emergency,
    "experimental.emergency.replicator_checkpoint_manager": experimental.emergency,
    "experimental.v1": v1,
    "path.atomicity": path.atomicity,
    "pathways": pathways,
    "test_utils": test_utils,
    "transform_utils": transform_utils,
    "v1.arrays": v1.arrays,
    "v1.errors": v1.errors,
    "v1.handlers": v1.handlers,
    "v1.multihost": multihost,
    "v1.options": options,
    "v1.path": path,
    "v1.path.step": path.step,
}
"""Modules that are importable under another name of Orbax, too."""

for _name, _module in _OTHER_NAMES.items():
    sys.modules[f"{__name__}.{_name}"] = _module
for _name, _module in [*sys.modules.items()]:
    if _name == __name__ or _name.startswith(f"{__name__}."):
        answer_for_classes(
            one
            for one in vars(_module).values()
            if isinstance(one, type) and one.__module__.startswith(f"{__name__}.")
        )
        vars(_module)["__getattr__"] = refusing(_module.__name__)
