"""What this package does not offer: an error that says what to write instead."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

from ckpt_core import CheckpointError


class NotOffered(CheckpointError, NotImplementedError):
    """A name or an option of Orbax that ckpt refuses: what it is, why, and what to write instead."""


def not_offered(name: str, why: str, instead: str) -> NotOffered:
    """The error for ``name``, to be raised by the caller."""
    return NotOffered(f"{name} is not offered by ckpt_orbax: {why}. Instead: {instead}")


class Refused:
    """Base of classes that can be imported and not be made: a program that only names them runs."""

    why_not: ClassVar[tuple[str, str]]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise not_offered(type(self).__name__, *self.why_not)


EMERGENCY = (
    "frequent steps in the memory or on the disks of hosts are the engine's own",
    "ckpt_core.Checkpointer(directory, local_directory=...), or CheckpointManager for the directory alone",
)
_REFUSALS = (
    (
        "it is private to Orbax",
        "the public names, or ckpt_core itself",
        "_src deserialize_root_metadata serialize_root_metadata record_saved_duration RESERVED_ITEM_NAMES "
        "ItemMetadata handler_registration ALLOWED_STEP_NAME_PATTERN TMP_DIR_STEP_PATTERN "
        "build_step_metadatas MetadataT",
    ),
    (
        "ckpt does not support Pathways",
        "the processes of jax itself",
        "register_type_handlers",
    ),
    (
        "functions and patterns would change the tree between the file and its checks",
        "ckpt_core.load(path, like, rename=..., missing=..., unexpected=...), or a change of the restored "
        "tree",
        "Transform RestoreTransform apply_transformations",
    ),
    (
        "a tree is compared with its target leaf by leaf when it is loaded",
        "ocp.args.PyTreeRestore(item, partial_restore=True), or transform_utils.intersect_trees",
        "tree_trim",
    ),
    (
        "ckpt stores each type of leaf in one way, which Orbax reads",
        "RestoreArgs and SaveArgs for single leaves; for other objects a CheckpointHandler of your own, "
        "or an item with get_state() and set_state()",
        "check_input_arguments get_cast_tspec_deserialize get_cast_tspec_serialize get_json_tspec_read "
        "get_json_tspec_write is_supported_empty_value",
    ),
    (
        "ckpt's engine writes and reads arrays",
        "ckpt_core.save and ckpt_core.load, or ckpt_core.inspect(path) for what is stored",
        "get_ts_context merge_ocdbt_per_process_files async_deserialize async_serialize tensorstore_utils "
        "ts_utils",
    ),
    (
        "it is the format of single files of Flax",
        "flax.serialization.msgpack_serialize and msgpack_restore; `ckpt import` converts such files",
        "AggregateHandler MsgpackHandler MAX_CHUNK_SIZE msgpack_restore msgpack_serialize",
    ),
    (
        "it is about files of Orbax before 2023, which are converted by Orbax itself",
        "ckpt_core.inspect(path).items[name].tree for the tree of a checkpoint",
        "all_leaves_are_placeholders from_flattened_with_keypath pytree_structure",
    ),
    (
        "ckpt's engine writes and reads the files of metadata",
        "manager.metadata(step), checkpointer.metadata(path) or ckpt_core.inspect(path)",
        "MetadataStore metadata_store",
    ),
    (
        "a saved sharding is kept as it was written",
        "metadata.sharding.to_jax_sharding(), which is a NamedSharding or SingleDeviceSharding",
        "NamedShardingMetadata SingleDeviceShardingMetadata",
    ),
    (
        "ckpt commits in its own way, the same on every storage",
        "no temporary_path_class; path.atomicity has names for programs that give one",
        "AsyncMakeDirFunc DeferredPath DeferredWritableTemporaryPath TemporaryPathBase create_all "
        "create_all_async on_commit_callback validate_atomic_rename_final_path "
        "validate_atomic_rename_temporary_path all_temporary_paths",
    ),
    (
        "steps are deleted by ckpt's engine",
        "manager.delete(step), or shutil.rmtree(path)",
        "deleter CheckpointDeleter PathDeleter StandardCheckpointDeleter ThreadedCheckpointDeleter "
        "create_checkpoint_deleter",
    ),
    (
        "its entries are Orbax's statistics",
        "CheckpointManagerOptions(engine=ckpt_core.Options(on_event=...)), or ckpt_core.events",
        "step_statistics CloudLogger CloudLoggerOptions",
    ),
    (
        "a step is not held while it is read",
        "keep more steps: CheckpointManagerOptions(max_to_keep=...)",
        "get_snapshot_dir_from_step_dir",
    ),
    (
        "processes have the numbers that jax gives them",
        "jax.process_index(); multihost.sync_global_processes(name) to wait for all",
        "get_barrier_sync_fn BarrierSyncFn",
    ),
    (
        "a checkpoint is written whole, and trees are those of jax",
        "ckpt_core.writer(path) to add items one by one, jax.tree, and Any in annotations",
        "partial tree",
    ),
    (
        "ckpt deletes steps of a run, under locks that protect their readers",
        "training.Checkpointer(directory).delete(step), or shutil.rmtree(path) for a single checkpoint",
        "delete delete_async deletion",
    ),
    (
        *EMERGENCY,
        "get_present_and_missing_chunks ProcessMetadataCheckpointHandler ChunkId",
    ),
    (
        "ckpt does not depend on protocol buffers",
        "a CheckpointHandler of your own that writes message.SerializeToString()",
        "ProtoCheckpointHandler ProtoRestore ProtoSave ProtoRestoreArgs ProtoSaveArgs",
    ),
    (
        "keys are leaves, and this handler of Orbax loses their implementation",
        "StandardSave({'key': key})",
        "JaxRandomKeyCheckpointHandler JaxRandomKeyRestore JaxRandomKeySave JaxRandomKeyRestoreArgs "
        "JaxRandomKeySaveArgs NumpyRandomKeyCheckpointHandler NumpyRandomKeyRestore NumpyRandomKeySave "
        "NumpyRandomKeyRestoreArgs NumpyRandomKeySaveArgs",
    ),
)
REFUSED = {name: (why, instead) for why, instead, names in _REFUSALS for name in names.split()}
"""Names of Orbax: why they are refused, and what to write instead."""


def missing_name(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have, to be raised by its ``__getattr__``."""
    if name.startswith("__"):
        return AttributeError(name)
    if name in REFUSED:
        why, instead = REFUSED[name]
        return AttributeError(f"{module} does not offer {name}: {why}. Instead: {instead}")
    return AttributeError(
        f"{module} has no {name!r}: docs/moving_from_orbax.md has what it offers of Orbax; ckpt_core "
        "itself may have it: ckpt_core.Checkpointer, ckpt_core.load"
    )


def is_face(module: str) -> bool:
    """Whether a module is one of Orbax's first API, by which its names are imported."""
    top, *below = module.split(".")
    return (
        top == "ckpt_orbax"
        and below[:1] not in (["v0"], ["v1"])
        and not any(name.startswith("_") for name in below)
    )


def refusing(module: str) -> Callable[[str], Any]:
    """``__getattr__`` of a module: an error that says why it does not have a name.

    ``from module import name`` replaces an AttributeError by "cannot import name", so such an import
    gets an ImportError; an AttributeError elsewhere leaves ``hasattr`` as it is.
    """

    def getattr_of_module(name: str) -> Any:
        error = missing_name(module, name)
        if not name.startswith("__") and _is_import(inspect.currentframe()):
            raise ImportError(str(error), name=module)
        raise error

    return getattr_of_module


def _is_import(frame: FrameType | None) -> bool:
    """Whether what has called this frame is at ``from module import name``."""
    caller = None if frame is None else frame.f_back
    if caller is None:
        return False
    return dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
