"""What this package does not offer: an error that says what to write instead."""

from __future__ import annotations

from ckpt_core import CheckpointError


class NotOffered(CheckpointError, NotImplementedError):
    """A name or an option of Orbax that ckpt refuses: what it is, why, and what to write instead."""


def not_offered(name: str, why: str, instead: str) -> NotOffered:
    """The error for ``name``, to be raised by the caller."""
    return NotOffered(f"{name} is not offered by ckpt_orbax: {why}. Instead: {instead}")


_TYPE_HANDLERS = (
    "ckpt stores each type of leaf in one way, which Orbax reads",
    "RestoreArgs and SaveArgs for single leaves; for other objects a CheckpointHandler of your own, or an "
    "item with get_state() and set_state()",
)
_TRANSFORMS = (
    "functions and patterns would change the tree between the file and its checks",
    "ckpt_core.load(path, like, rename=..., missing=..., unexpected=...), or a change of the restored tree",
)
_RANDOM_KEYS = (
    "keys are leaves, and this handler of Orbax loses their implementation",
    "StandardSave({'key': key})",
)
_PROTO = (
    "ckpt does not depend on protocol buffers",
    "a CheckpointHandler of your own that writes message.SerializeToString()",
)
_WAITING = (
    "ckpt waits for steps by itself",
    "ckpt_core.Checkpointer(directory, read_only=True).wait_for_new_step(after)",
)
_PRIVATE = ("it is private to Orbax", "the public names, or ckpt_core itself")
_REFUSED = {
    "_src": _PRIVATE,
    "test_utils": _PRIVATE,
    "experimental": (
        "emergency managers and other experiments of Orbax are not on ckpt's engine",
        "`ckpt_orbax.v1`; ckpt_core.Checkpointer(local_directory=) for frequent steps that survive the loss "
        "of hosts",
    ),
    "pathways": ("ckpt does not support Pathways", "the processes of jax itself"),
    "transform_utils": _TRANSFORMS,
    "Transform": _TRANSFORMS,
    "RestoreTransform": _TRANSFORMS,
    "apply_transformations": _TRANSFORMS,
    "checkpoints_iterator": _WAITING,
    "wait_for_new_checkpoint": _WAITING,
    **dict.fromkeys(
        (
            "ArrayHandler",
            "NumpyHandler",
            "ParamInfo",
            "ScalarHandler",
            "SingleReplicaArrayHandler",
            "StringHandler",
            "TypeHandler",
            "create_type_handler_registry",
            "get_type_handler",
            "has_type_handler",
            "register_standard_handlers_with_options",
            "register_type_handler",
        ),
        _TYPE_HANDLERS,
    ),
    **dict.fromkeys(("ProtoCheckpointHandler", "ProtoRestore", "ProtoSave"), _PROTO),
    **dict.fromkeys(
        (
            "JaxRandomKeyCheckpointHandler",
            "JaxRandomKeyRestore",
            "JaxRandomKeySave",
            "NumpyRandomKeyCheckpointHandler",
            "NumpyRandomKeyRestore",
            "NumpyRandomKeySave",
        ),
        _RANDOM_KEYS,
    ),
}
"""Names of Orbax's first API: why they are refused, and what to write instead."""


def missing_name(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have, to be raised by its ``__getattr__``."""
    if name.startswith("__"):
        return AttributeError(name)
    if name in _REFUSED:
        why, instead = _REFUSED[name]
        return AttributeError(f"{module} does not offer {name}: {why}. Instead: {instead}")
    return AttributeError(
        f"{module} has no {name!r}: docs/moving_from_orbax.md lists what it offers of Orbax; ckpt_core "
        "itself may have it: ckpt_core.Checkpointer, ckpt_core.load"
    )
