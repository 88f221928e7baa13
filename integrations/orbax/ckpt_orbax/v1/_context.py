"""``Context``: the options of the calls inside of a ``with`` block."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

import ckpt_core as ckpt
from ckpt_orbax.v1 import options as named

_ACTIVE: ContextVar[Context | None] = ContextVar("ckpt_orbax_context", default=None)

_PARTS: dict[str, tuple[str, Any]] = {
    "pytree": ("pytree_options", named.PyTreeOptions),
    "array": ("array_options", named.ArrayOptions),
    "asynchronous": ("async_options", named.AsyncOptions),
    "multiprocessing": ("multiprocessing_options", named.MultiprocessingOptions),
    "file": ("file_options", named.FileOptions),
    "checkpointables": ("checkpointables_options", named.CheckpointablesOptions),
    "pathways": ("pathways_options", named.PathwaysOptions),
    "deletion": ("deletion_options", named.DeletionOptions),
    "memory": ("memory_options", named.MemoryOptions),
    "safetensors": ("safetensors_options", named.SafetensorsOptions),
    "atomicity": ("atomicity_options", named.AtomicityOptions),
}
"""Each attribute: the argument that sets it, which also is another name of it, and its class."""


class Context:
    """Options for the calls in ``with context:``, to be set before the block.

    A context inside of another one begins from the defaults, unless ``Context(other)`` copies it. It
    holds in the thread that entered it.

    Attributes:
        pytree, array, asynchronous, multiprocessing, file, checkpointables: see ``options``.
        pathways, deletion, memory, safetensors, atomicity: see ``options``.
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

    pytree: named.PyTreeOptions
    array: named.ArrayOptions
    asynchronous: named.AsyncOptions
    multiprocessing: named.MultiprocessingOptions
    file: named.FileOptions
    checkpointables: named.CheckpointablesOptions
    pathways: named.PathwaysOptions
    deletion: named.DeletionOptions
    memory: named.MemoryOptions
    safetensors: named.SafetensorsOptions
    atomicity: named.AtomicityOptions
    checkpoint_layout: named.CheckpointLayout
    engine: ckpt.Options

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
        deletion_options: named.DeletionOptions | None = None,
        memory_options: named.MemoryOptions | None = None,
        safetensors_options: named.SafetensorsOptions | None = None,
        atomicity_options: named.AtomicityOptions | None = None,
    ) -> None:
        given = locals()
        write = self.__dict__  # attributes are read-only for users
        for name, (argument, kind) in _PARTS.items():
            source = (
                given[argument] if given[argument] is not None else getattr(context, name, None)
            )
            write[name] = kind() if source is None else named.copied(source)
        layout = checkpoint_layout or getattr(context, "checkpoint_layout", "orbax")
        write["checkpoint_layout"] = named.CheckpointLayout(layout)
        write["engine"] = getattr(context, "engine", ckpt.Options())
        write["_entered"] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__["_entered"]:
            raise RuntimeError(f"Context.{name} cannot change while the Context is active")
        if name == "checkpoint_layout":
            value = named.CheckpointLayout(value)
        elif name != "engine":
            raise AttributeError(f"Context.{name} cannot be set: set the fields of Context.{name}")
        self.__dict__[name] = value

    def __enter__(self) -> Context:
        self._hold(1)
        entered: list[Token[Context | None]] = self.__dict__["_entered"]
        entered.append(_ACTIVE.set(self))
        return self

    def __exit__(self, *_: Any) -> None:
        _ACTIVE.reset(self.__dict__["_entered"].pop())
        self._hold(-1)

    def _hold(self, by: int) -> None:
        for name in _PARTS:
            for settings in named.each_setting(getattr(self, name)):
                settings.__dict__["_held"] = settings.__dict__.get("_held", 0) + by


for _name, (_argument, _) in _PARTS.items():
    if _name != "atomicity":  # as in Orbax
        setattr(Context, _argument, property(lambda self, name=_name: getattr(self, name)))


def get_context(default: Context | None = None) -> Context:
    """The active context, else ``default``, else one with defaults."""
    return _ACTIVE.get() or default or Context()
