"""Arguments of ``save(args=)`` and ``restore(args=)``: what an item is, and how it is wanted back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckpt_orbax.v0 import _composite, handlers
from ckpt_orbax.v0._registration import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)


@register_with_handler(handlers.CompositeCheckpointHandler, for_save=True, for_restore=True)
class Composite(_composite.Composite, CheckpointArgs):
    """Arguments of several items by name; also what a restore of several items returns."""


@register_with_handler(handlers.StandardCheckpointHandler, for_save=True)
@dataclass
class StandardSave(CheckpointArgs):
    """Saves a pytree of arrays and numbers.

    Attributes:
        item: the pytree.
        save_args: tree of ``SaveArgs`` of the same structure; None for leaves without.
        custom_metadata: refused, except None: ``save(custom_metadata=)`` is of the whole step.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@register_with_handler(handlers.StandardCheckpointHandler, for_restore=True)
@dataclass
class StandardRestore(CheckpointArgs):
    """Restores a pytree as the leaves of ``item`` say.

    Attributes:
        item: tree of arrays, numbers or ``jax.ShapeDtypeStruct``; None for what was saved.
        strict: False is refused where a shape differs: ckpt does not pad or cut arrays.
        support_layout: of no effect.
        fallback_sharding: for arrays whose saved devices are not here.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


@register_with_handler(handlers.PyTreeCheckpointHandler, for_save=True)
@dataclass
class PyTreeSave(CheckpointArgs):
    """Saves a pytree of arrays, numbers and text; see ``StandardSave``.

    Attributes:
        ocdbt_target_data_file_size: of no effect; ckpt chooses the size of its files.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@register_with_handler(handlers.PyTreeCheckpointHandler, for_restore=True)
@dataclass
class PyTreeRestore(CheckpointArgs):
    """Restores a pytree with the structure of ``item``, its leaves as ``restore_args`` say.

    Attributes:
        item: tree that gives the structure; its leaves do not matter, but for ``PLACEHOLDER``, which
            leaves one out. None for the saved structure.
        restore_args: tree of ``RestoreArgs``; leaves without come as they were saved.
        transforms: only ``{}`` is taken: what ``item`` does not name is left out.
        transforms_default_to_original: only True is taken.
        legacy_transform_fn: refused, except None.
        partial_restore: leave out what ``item`` does not name, and keep its values where the checkpoint
            has none. Lists have the saved length.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@register_with_handler(handlers.JsonCheckpointHandler, for_save=True)
@dataclass
class JsonSave(CheckpointArgs):
    """Saves a JSON value."""

    item: Any


@register_with_handler(handlers.JsonCheckpointHandler, for_restore=True)
@dataclass
class JsonRestore(CheckpointArgs):
    """Restores a JSON value; ``item`` is of no effect."""

    item: Any = None


@register_with_handler(handlers.ArrayCheckpointHandler, for_save=True)
@dataclass
class ArraySave(CheckpointArgs):
    """Saves a single array or number, with a ``SaveArgs`` or None."""

    item: Any
    save_args: Any = None


@register_with_handler(handlers.ArrayCheckpointHandler, for_restore=True)
@dataclass
class ArrayRestore(CheckpointArgs):
    """Restores a single array or number, with a ``RestoreArgs`` or None; ``item`` is of no effect."""

    item: Any = None
    restore_args: Any = None


__all__ = [
    "ArrayRestore",
    "ArraySave",
    "CheckpointArgs",
    "Composite",
    "JsonRestore",
    "JsonSave",
    "PyTreeRestore",
    "PyTreeSave",
    "StandardRestore",
    "StandardSave",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
]
