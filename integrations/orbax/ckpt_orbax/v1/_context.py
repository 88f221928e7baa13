"""``Context``: the options of the calls inside of a ``with`` block, and what they mean to ckpt."""

from __future__ import annotations

import operator
from contextvars import ContextVar, Token
from typing import Any, TypeVar

import jax

import ckpt_core as ckpt
from ckpt_orbax import options as named
from ckpt_orbax._leaves import converted, plain
from ckpt_orbax._lone_names import CheckpointingImpl
from ckpt_orbax._options import changed, refuse_processes
from ckpt_orbax._refused import Refusals, not_offered, refuse_options

_ACTIVE: ContextVar[Context | None] = ContextVar("ckpt_orbax_context", default=None)

_Settings = TypeVar("_Settings")


class Context:
    """Options for the calls in ``with context:``, to be set before the block.

    Inside of another one it begins from the defaults, unless ``Context(other)`` copies that. It holds in the thread that
    entered it.

    Attributes:
        pytree, array, asynchronous, multiprocessing, file, checkpointables, pathways: see ``options``.
        checkpoint_layout: layout of what is loaded.
        engine: ckpt's own ``Options``: compression, durability, buckets.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> context = ocp.Context()
        >>> context.pytree.loading.partial_load = True
        >>> with context:
        ...     ...  # ocp.load(...)
        Ellipsis
    """

    def __init__(
        self,
        context: Context | None = None,
        *,
        pytree_options: named.PyTreeOptions | None = None,
        array_options: named.ArrayOptions | None = None,
        async_options: named.AsyncOptions | None = None,
        multiprocessing_options: named.MultiprocessingOptions | None = None,
        file_options: named.FileOptions | None = None,
        checkpointables_options: named.CheckpointablesOptions | None = None,
        pathways_options: named.PathwaysOptions | None = None,
        checkpoint_layout: named.CheckpointLayout | str | None = None,
    ) -> None:
        def own(given: _Settings | None, kind: type[_Settings]) -> _Settings:
            part = kind.__name__.removesuffix("Options").lower()
            source = getattr(context, f"{part}_options", None) if given is None else given
            return kind() if source is None else named.copied(source)

        self.pytree = own(pytree_options, named.PyTreeOptions)
        self.array = own(array_options, named.ArrayOptions)
        self.asynchronous = own(async_options, named.AsyncOptions)
        self.multiprocessing = own(multiprocessing_options, named.MultiprocessingOptions)
        self.file = own(file_options, named.FileOptions)
        self.checkpointables = own(checkpointables_options, named.CheckpointablesOptions)
        self.pathways = own(pathways_options, named.PathwaysOptions)
        layout = checkpoint_layout or getattr(context, "checkpoint_layout", "orbax")
        self.checkpoint_layout: named.CheckpointLayout | str = layout
        self.engine: ckpt.Options = getattr(context, "engine", ckpt.Options())
        self._entered: list[Token[Context | None]] = []

    def __enter__(self) -> Context:
        self._entered.append(_ACTIVE.set(self))
        return self

    def __exit__(self, *_: Any) -> None:
        _ACTIVE.reset(self._entered.pop())


_PARTS = "pytree array multiprocessing file checkpointables pathways"
for _part in _PARTS.split():  # as in Orbax, the names of the arguments are attributes, too
    setattr(Context, f"{_part}_options", property(operator.attrgetter(_part)))
setattr(Context, "async_options", property(operator.attrgetter("asynchronous")))  # noqa: B010


def get_context(default: Context | None = None) -> Context:
    """The active context, else ``default``, else one with defaults."""
    return _ACTIVE.get() or default or Context()


_WRITTEN = "ckpt always writes OCDBT and zarr3, which all of Orbax's readers take"
_REFUSED: Refusals = {
    "array.saving.use_ocdbt": (True, _WRITTEN),
    "array.saving.use_zarr3": (True, _WRITTEN),
    "array.loading.enable_padding_and_truncation": (
        False,
        "an array of another shape would be cut or filled silently",
        "load the saved shape, and slice or jnp.pad it",
    ),
    "array.loading.raise_array_data_missing_error": (
        True,
        "arrays with missing data would become zeros silently",
    ),
}


def refuse_unsupported(context: Context) -> None:
    """Raises NotOffered for options that would change what is stored or loaded."""
    refuse_options("Context.{} = {!r}", context, _REFUSED)
    refuse_processes(context.multiprocessing, "Context.multiprocessing.{} = {!r}")
    if context.pathways.checkpointing_impl not in (None, CheckpointingImpl.NO_DISPATCHER):
        raise not_offered(
            f"Context.pathways.checkpointing_impl = {context.pathways.checkpointing_impl!r}",
            "ckpt does not support Pathways",
            "leave it at None",
        )
    layout = named.CheckpointLayout(context.checkpoint_layout)
    if layout is named.CheckpointLayout.SAFETENSORS:
        raise not_offered(
            "Context.checkpoint_layout = 'safetensors'",
            "this face reads Orbax's directories",
            "ckpt_core.load(path, target), which reads safetensors into any sharding",
        )


def engine_options(context: Context) -> ckpt.Options:
    """The options of ckpt that a Context stands for."""
    refuse_unsupported(context)
    saving, changes = context.array.saving, dict[str, Any]()
    if saving.ocdbt_target_data_file_size is not None:
        size = saving.ocdbt_target_data_file_size
        changes["target_data_file_bytes"] = max(1024, size) if size else 2**40
    if saving.storage_options.chunk_byte_size is not None:
        changes["chunk_bytes"] = max(1024, saving.storage_options.chunk_byte_size)
    if context.array.loading.use_load_and_broadcast:
        changes["broadcast"] = True
    return changed(context.engine, context.asynchronous, context.file, **changes)


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
