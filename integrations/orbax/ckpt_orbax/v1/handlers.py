"""Handlers of checkpointables, and their registries."""

from ckpt_orbax.v1._registry import (
    AbstractCheckpointable,
    AlreadyExistsError,
    Checkpointable,
    CheckpointableHandler,
    CheckpointableHandlerRegistry,
    JsonHandler,
    NoEntryError,
    ProtoHandler,
    PyTreeHandler,
    StatefulCheckpointable,
    StatefulCheckpointableHandler,
    global_registry,
    local_registry,
    register_handler,
)

__all__ = [
    "AbstractCheckpointable",
    "AlreadyExistsError",
    "Checkpointable",
    "CheckpointableHandler",
    "CheckpointableHandlerRegistry",
    "JsonHandler",
    "NoEntryError",
    "ProtoHandler",
    "PyTreeHandler",
    "StatefulCheckpointable",
    "StatefulCheckpointableHandler",
    "global_registry",
    "local_registry",
    "register_handler",
]
