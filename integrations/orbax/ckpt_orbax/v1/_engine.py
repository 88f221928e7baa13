"""What a Context means to ckpt: its options, and the refusal of those that ckpt cannot honour."""

from __future__ import annotations

import logging
from typing import Any

import jax

import ckpt_core as ckpt
from ckpt_orbax._leaves import converted
from ckpt_orbax._options import changed, refuse_processes
from ckpt_orbax._plain import plain
from ckpt_orbax._refused import not_offered
from ckpt_orbax.pathways import CheckpointingImpl
from ckpt_orbax.v1._context import Context
from ckpt_orbax.v1.options import CheckpointLayout

logger = logging.getLogger("ckpt_orbax")

_REFUSED: dict[str, tuple[Any, str, str]] = {
    "array.saving.use_ocdbt": (
        True,
        "ckpt always writes OCDBT, which all of Orbax's readers take",
        "leave it at True",
    ),
    "array.saving.use_zarr3": (
        True,
        "ckpt always writes zarr3, which all of Orbax's readers take",
        "leave it at True",
    ),
    "array.loading.enable_padding_and_truncation": (
        False,
        "an array of another shape would be cut or filled silently",
        "load the saved shape, and slice or jnp.pad it",
    ),
    "array.loading.raise_array_data_missing_error": (
        True,
        "arrays with missing data would become zeros silently",
        "leave it at True",
    ),
    "pytree.saving.pytree_metadata_options.support_rich_types": (
        False,
        "this face stores the containers that Orbax stores by default",
        "ckpt_core.save and ckpt_core.load, which keep tuples and NamedTuples",
    ),
    "deletion.gcs_deletion_options.todelete_full_path": (
        None,
        "ckpt moves steps to a directory beside them",
        "context.engine = ckpt_core.Options(trash_directory='todelete')",
    ),
    "memory.serialization_status_callback": (
        None,
        "it would never be called",
        "context.engine = ckpt_core.Options(on_event=...), which also reports progress",
    ),
    "pathways.checkpointing_impl": (
        (None, CheckpointingImpl.NO_DISPATCHER),
        "ckpt does not support Pathways",
        "leave it at None",
    ),
}


def refuse_unsupported(context: Context) -> None:
    """Raises NotOffered for options that would change what is stored or loaded."""
    for name, (fine, why, instead) in _REFUSED.items():
        value: Any = context
        for part in name.split("."):
            value = getattr(value, part)
        if value not in (fine if isinstance(fine, tuple) else (fine,)):
            raise not_offered(f"Context.{name} = {value!r}", why, instead)
    refuse_processes(context.multiprocessing, "Context.multiprocessing.{} = {!r}")
    if context.checkpoint_layout is CheckpointLayout.SAFETENSORS:
        raise not_offered(
            "Context.checkpoint_layout = 'safetensors'",
            "this face reads Orbax's directories",
            "ckpt_core.load(path, target), which reads safetensors into any sharding",
        )


def engine_options(context: Context) -> ckpt.Options:
    """The options of ckpt that a Context stands for."""
    refuse_unsupported(context)
    memory, saving = context.memory, context.array.saving
    limits = [
        memory.write_concurrent_bytes,
        memory.read_concurrent_bytes,
        memory.transfer_concurrent_bytes,
    ]
    changes: dict[str, Any] = {}
    if known := [limit for limit in limits if limit is not None]:
        changes["max_host_bytes"] = max(1024, min(known))
    if saving.ocdbt_target_data_file_size is not None:
        size = saving.ocdbt_target_data_file_size
        changes["target_data_file_bytes"] = max(1024, size) if size else 2**40
    if saving.storage_options.chunk_byte_size is not None:
        changes["chunk_bytes"] = max(1024, saving.storage_options.chunk_byte_size)
    if context.array.loading.use_load_and_broadcast:
        changes["broadcast"] = True
    return changed(
        context.engine, context.asynchronous, context.file.path_permission_mode, **changes
    )


def stored(state: Any, context: Context) -> Any:
    """The tree as it is stored: in the dtypes of ``storage_options``, in plain containers."""
    saving = context.array.saving
    for_all, for_one = saving.storage_options.dtype, saving.scoped_storage_options_creator
    if for_all is None and for_one is None:
        return plain(state)

    def convert(key: Any, leaf: Any) -> Any:
        chosen = None if for_one is None else for_one(key, leaf)
        dtype = getattr(chosen, "dtype", None)
        return converted(leaf, for_all if dtype is None else dtype)

    return plain(jax.tree_util.tree_map_with_path(convert, state))
