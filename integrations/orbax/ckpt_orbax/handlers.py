"""Handlers of items: those of ckpt's own forms, which are names only, and the base of your own."""

from __future__ import annotations

import abc
from typing import Any

from ckpt_core.arguments import meant
from ckpt_orbax import checkpoint_args
from ckpt_orbax._errors import AlreadyExistsError, NoEntryError
from ckpt_orbax._handler_files import type_name
from ckpt_orbax._refused import not_offered


class CheckpointHandler(abc.ABC):
    """Base of a handler of your own: writes an object into a directory, and reads it back.

    What it writes becomes a part of the checkpoint: atomic, checksummed, and verified before
    ``restore`` sees it.
    """

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes an object into ``directory``, which exists."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """The object that was written into ``directory``."""

    def metadata(self, directory: Any) -> Any:
        """A description of what is in ``directory``, or None."""
        return None

    def finalize(self, directory: Any) -> None:  # noqa: B027  (a handler need not have it)
        """Called when all is written."""

    def close(self) -> None:  # noqa: B027
        """Called when the handler is not used any more."""

    @classmethod
    def typestr(cls) -> str:
        """The name under which a checkpoint records who wrote an item."""
        return type_name(cls)


class AsyncCheckpointHandler(CheckpointHandler):
    """Base of a handler that also says what is left to do in the background.

    The save waits for these futures before it returns, because the files are part of one commit.
    """

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes an object into ``directory``; returns futures to wait for, or None."""


_OPTIONS: dict[str, Any] = {
    "use_ocdbt": True,
    "primary_host": 0,
    "aggregate_filename": "checkpoint",
    "checkpoint_name": "checkpoint",
    "filename": "metadata",
}
"""Options of Orbax's handlers that would change the files -> the only value that is taken."""
_WITHOUT_EFFECT = """
    save_concurrent_gb restore_concurrent_gb save_device_host_concurrent_gb memory_limit_options use_zarr3
    use_compression enable_pinned_host_transfer is_prioritized_key_fn array_metadata_validator
    multiprocessing_options pytree_metadata_options
"""


class Form(CheckpointHandler):
    """A handler that stands for a form of item of ckpt's own; it does not write itself. Of the options of Orbax's handlers,
    limits of memory and the like are ckpt's to choose, and what would change the files is refused.
    """

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            kind, known = type(self).__name__, [*_OPTIONS, *_WITHOUT_EFFECT.split()]
            if name not in known:
                raise TypeError(f"{kind} has no argument {name!r}{meant(name, known)}")
            if name in _OPTIONS and value not in (_OPTIONS[name], None):
                raise not_offered(
                    f"{kind}({name}={value!r})",
                    "it would change what is stored",
                    f"leave it at {_OPTIONS[name]!r}; ckpt stores OCDBT and zarr3, which Orbax reads",
                )

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Refused, as ``restore``: it is ckpt that writes and reads."""
        kind = type(self).__name__
        raise not_offered(
            f"a call of save or restore of {kind}",
            "the handler is only a name for a form of ckpt's own",
            f"ocp.Checkpointer(ocp.{kind}()).save(path, ...), or a Composite with an item for it",
        )

    restore = save


class PyTreeCheckpointHandler(Form):
    """Stands for pytrees of arrays, numbers and text."""


class StandardCheckpointHandler(Form):
    """Stands for pytrees of arrays and numbers."""


class JsonCheckpointHandler(Form):
    """Stands for an item of JSON."""


class ArrayCheckpointHandler(Form):
    """Stands for a single array or number."""


class CompositeCheckpointHandler(Form):
    """Stands for a checkpoint of several items.

    Args:
        *item_names: items whose handlers follow from their arguments.
        composite_options: of no effect.
        handler_registry: handlers by item and arguments.
        **items_and_handlers: handlers by item.
    """

    def __init__(
        self,
        *item_names: str,
        composite_options: Any = None,
        handler_registry: DefaultCheckpointHandlerRegistry | None = None,
        **items_and_handlers: Any,
    ) -> None:
        super().__init__()
        self.item_names = item_names
        self.handler_registry = handler_registry
        self.items_and_handlers = items_and_handlers


def overrides(handler: Any) -> bool:
    """Whether a handler writes and reads by itself, so that ckpt has to call it."""
    return not isinstance(handler, Form) or (
        type(handler).save is not Form.save or type(handler).restore is not Form.restore
    )


Entries = dict[tuple[str | None, type[checkpoint_args.CheckpointArgs]], Any]


class DefaultCheckpointHandlerRegistry:
    """Handlers by item and class of arguments, to be given to a CheckpointManager.

    Args:
        other_registry: its entries are copied.
    """

    def __init__(self, other_registry: Any = None) -> None:
        self._entries: Entries = dict(other_registry.get_all_entries()) if other_registry else {}

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Adds a handler or its class, by default the one that is registered for the arguments, or their class; ``item``
        is None for all items.

        Raises:
            AlreadyExistsError: there is an entry for this item and these arguments.
            ValueError: no handler is known for the arguments.
        """
        key = _, kind = _key(item, args)
        if key in self._entries:
            raise AlreadyExistsError(f"there is an entry for item {item!r} and {kind.__name__}")
        chosen = checkpoint_args.get_registered_handler_cls(kind) if handler is None else handler
        self._entries[key] = chosen() if isinstance(chosen, type) else chosen

    def get(self, item: str | None, args: Any) -> Any:
        """The handler of an item and arguments; NoEntryError if there is none."""
        key = _, kind = _key(item, args)
        if key not in self._entries:
            raise NoEntryError(f"there is no entry for item {item!r} and {kind.__name__}")
        return self._entries[key]

    def has(self, item: str | None, args: Any) -> bool:
        """Whether there is a handler for an item and arguments."""
        return _key(item, args) in self._entries

    def get_all_entries(self) -> Entries:
        """All handlers by item and class of arguments."""
        return self._entries


def _key(item: str | None, args: Any) -> tuple[str | None, type[checkpoint_args.CheckpointArgs]]:
    return item, args if isinstance(args, type) else type(args)
