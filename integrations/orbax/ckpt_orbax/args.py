"""Arguments of ``save(args=)`` and ``restore(args=)``: what an item is, and how it is wanted back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_orbax import handlers
from ckpt_orbax.handlers import (
    CheckpointArgs as CheckpointArgs,
    register_with_handler as register_with_handler,
)


@register_with_handler(handlers.CompositeCheckpointHandler, for_save=True, for_restore=True)
class Composite(Mapping[str, Any], CheckpointArgs):
    """Arguments of several items by name; also what a restore of several items returns.

    Items are read as ``composite["state"]`` and as ``composite.state``, and cannot be changed.

    Raises:
        ValueError: a name begins with two underscores.

    Example:
        >>> import ckpt_orbax as ocp
        >>> composite = ocp.args.Composite(state=1, config=2)
        >>> composite.state, composite["config"], "other" in composite
        (1, 2, False)
    """

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise ValueError(f"{name!r}: an item's name must not begin with two underscores")
        self.__dict__["_items"] = items

    def __getitem__(self, key: str) -> Any:
        try:
            return self._items[key]
        except KeyError:
            held = ", ".join(self._items) or "nothing"
            raise KeyError(f"there is no {key!r}: there is {held}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getattr__(self, name: str) -> Any:
        items: dict[str, Any] = self.__dict__.get("_items", {})
        if name in items:
            return items[name]
        raise AttributeError(f"there is no {name!r}: there is {', '.join(items) or 'nothing'}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"a {type(self).__name__} cannot be changed: make another one")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"


@register_with_handler(handlers.StandardCheckpointHandler, for_save=True)
@dataclass
class StandardSave(CheckpointArgs):
    """Saves a pytree of arrays and numbers, with a ``SaveArgs`` or None for each leaf. ``custom_metadata`` is refused, except
    None: ``save(custom_metadata=)`` is of the whole step.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@register_with_handler(handlers.StandardCheckpointHandler, for_restore=True)
@dataclass
class StandardRestore(CheckpointArgs):
    """Restores a pytree as the leaves of ``item`` say: arrays, numbers or ``jax.ShapeDtypeStruct``; None for what was saved.

    Attributes:
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
    """Saves a pytree of arrays, numbers and text; see ``StandardSave``. ``ocdbt_target_data_file_size`` is of no effect."""

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
        transforms_default_to_original, legacy_transform_fn: only True, only None is taken.
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
