"""``ckpt_orbax.handlers``, for ``from ckpt_orbax.handlers import ...``; with the arguments under their names there."""

from ckpt_orbax.v0.args import ArrayRestore as ArrayRestoreArgs
from ckpt_orbax.v0.args import ArraySave as ArraySaveArgs
from ckpt_orbax.v0.args import Composite as CompositeArgs
from ckpt_orbax.v0.args import JsonRestore as JsonRestoreArgs
from ckpt_orbax.v0.args import JsonSave as JsonSaveArgs
from ckpt_orbax.v0.args import PyTreeRestore as PyTreeRestoreArgs
from ckpt_orbax.v0.args import PyTreeSave as PyTreeSaveArgs
from ckpt_orbax.v0.args import StandardRestore as StandardRestoreArgs
from ckpt_orbax.v0.args import StandardSave as StandardSaveArgs
from ckpt_orbax.v0.handlers import (
    AlreadyExistsError,
    ArrayCheckpointHandler,
    AsyncCheckpointHandler,
    BasePyTreeCheckpointHandler,
    CheckpointHandler,
    CheckpointHandlerRegistry,
    CompositeCheckpointHandler,
    CompositeOptions,
    DefaultCheckpointHandlerRegistry,
    JsonCheckpointHandler,
    NoEntryError,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
    create_default_handler_registry,
)

CompositeResults = CompositeArgs

__all__ = [
    "AlreadyExistsError",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "ArraySaveArgs",
    "AsyncCheckpointHandler",
    "BasePyTreeCheckpointHandler",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CompositeArgs",
    "CompositeCheckpointHandler",
    "CompositeOptions",
    "CompositeResults",
    "DefaultCheckpointHandlerRegistry",
    "JsonCheckpointHandler",
    "JsonRestoreArgs",
    "JsonSaveArgs",
    "NoEntryError",
    "PyTreeCheckpointHandler",
    "PyTreeRestoreArgs",
    "PyTreeSaveArgs",
    "StandardCheckpointHandler",
    "StandardRestoreArgs",
    "StandardSaveArgs",
    "create_default_handler_registry",
]
