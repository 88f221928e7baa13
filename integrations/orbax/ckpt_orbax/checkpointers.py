"""Single checkpoints: ``Checkpointer``, its form in the background, and the two short forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax import _items, handlers
from ckpt_orbax._errors import DestinationExistsError, InvalidLayoutError
from ckpt_orbax._options import changed, refuse_processes
from ckpt_orbax._paths import as_text
from ckpt_orbax._refused import not_offered
from ckpt_orbax.args import Composite, StandardRestore, StandardSave
from ckpt_orbax.metadata import StepMetadata, described_step, described_tree
from ckpt_orbax.options import AsyncOptions

_SINGLE = ("state", "default")
"""Names of an item that is alone: of ``ckpt_core.save`` here, of Orbax's managers."""
_TREES = (handlers.PyTreeCheckpointHandler, handlers.StandardCheckpointHandler)


class Checkpointer:
    """Saves one object, or a Composite of several, at a path; blocks until it is there.

    Args:
        handler: what kind of object it is; a handler of ckpt's forms, or one of your own.
        multiprocessing_options: only what ckpt can honour.
        file_options: a mode of the directories.
        atomicity_options, checkpoint_metadata_store, temporary_path_class: of no effect.
        engine: ckpt's own ``Options``, which Orbax does not have.

    Example:
        >>> import ckpt_orbax as ocp, numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        >>> checkpointer.save(path, args=ocp.args.StandardSave({"w": np.ones(2)}))
        >>> checkpointer.restore(path)["w"].tolist()
        [1.0, 1.0]
    """

    _blocks = True  # until the checkpoint is there

    def __init__(
        self,
        handler: Any,
        *,
        multiprocessing_options: Any = None,
        file_options: Any = None,
        atomicity_options: Any = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: Any = None,
        engine: ckpt.Options | None = None,
    ) -> None:
        refuse_processes(multiprocessing_options)
        self._handler = handler
        self._pending: ckpt.PendingSave | None = None
        self._options = changed(engine or ckpt.Options(), None, file_options)
        self._items = None
        if isinstance(handler, handlers.CompositeCheckpointHandler):
            self._items = _items.ItemHandlers(
                handler.item_names, handler.items_and_handlers, handler.handler_registry
            )

    @property
    def handler(self) -> Any:
        """What kind of object is saved."""
        return self._handler

    def save(
        self,
        directory: Any,
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a checkpoint; when it returns, a power cut cannot lose it.

        Args:
            directory: path; it must not exist.
            *args, **kwargs: the object, or arguments of its handler, such as ``args=`` or ``save_args=``.
            force: replace what is there, in one step.
            custom_metadata: a dict of JSON.

        Raises:
            ValueError: there is something at ``directory``, or nothing to save.
        """
        self._wait()
        wanted = _items.args_of_call(self._handler, True, *args, **kwargs)
        path, options = as_text(directory), self._options
        named, alone = None, ()
        if self._items is not None:
            named = _items.items_to_save(wanted, self._items)
        else:
            alone = (_items.item_to_save("item", wanted, self._handler),)
            if "://" not in path and isinstance(self._handler, _TREES):
                options = dataclasses.replace(options, flat=True)  # Orbax looks for it at the path
        more: dict[str, Any] = {"overwrite": force, "metadata": custom_metadata}
        try:
            pending = ckpt.save_async(path, *alone, items=named, options=options, **more)
        except ckpt.CheckpointExists as error:
            raise DestinationExistsError(
                f"Destination {directory} is taken: {error} (overwrite=True is force=True here)"
            ) from error
        if self._blocks:
            pending.result()
        else:
            self._pending = pending

    def _wait(self) -> None:
        if (pending := self._pending) is not None:
            try:
                pending.result()
            finally:
                if pending.done():  # Ctrl-C may have ended the wait
                    self._pending = None

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """The object at a path, verified; as it was saved, or as the arguments ask for it.

        Args:
            directory: a checkpoint of ckpt or Orbax, or one item of it.
            *args, **kwargs: a target, or arguments of the handler, such as ``args=`` or ``restore_args=``.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: target and checkpoint differ.
        """
        self._wait()
        path = as_text(directory)
        if self._items is not None:
            wanted = _items.args_of_call(self._handler, False, *args, **kwargs)
            return _items.restored_items(ckpt.inspect(path), wanted, self._items, self._options)
        asked = bool(args or kwargs) or not handlers.overrides(self._handler)
        wanted = _items.args_of_call(self._handler, False, *args, **kwargs) if asked else None
        try:
            info = ckpt.inspect(path)
        except ckpt.CheckpointNotFound as error:
            return _items.flat_value(path, self._handler, wanted, error)
        return _items.restored_item(info, _only_item(info), wanted, self._handler, self._options)

    def metadata(self, directory: Any) -> StepMetadata:
        """What a checkpoint says of itself, without its arrays; FileNotFoundError if there is none."""
        info = ckpt.inspect(as_text(directory))
        trees = {name: described_tree(info, item) for name, item in info.items.items()}
        if self._items is not None:
            return described_step(info, Composite(**trees))
        return described_step(info, trees[_only_item(info)])

    def close(self) -> None:
        """Waits for a running save, and closes the handler."""
        self._wait()
        if self._items is not None:
            self._items.close()
        self._handler.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class AsyncCheckpointer(Checkpointer):
    """As ``Checkpointer``, but a save blocks only until the arrays are copied; ``timeout_secs`` or ``async_options`` say how
    long processes wait for each other. A save and a restore wait for the save before, and raise its error.
    """

    _blocks = False

    def __init__(
        self,
        handler: Any,
        timeout_secs: int | None = None,
        *,
        async_options: AsyncOptions | None = None,
        barrier_sync_fn: Any = None,
        post_finalization_callback: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(handler, **options)
        chosen = async_options or AsyncOptions(
            barrier_sync_fn=barrier_sync_fn, post_finalization_callback=post_finalization_callback
        )
        if timeout_secs is not None:
            chosen = dataclasses.replace(chosen, timeout_secs=timeout_secs)
        if chosen.post_finalization_callback is not None:
            raise not_offered(
                "AsyncCheckpointer(post_finalization_callback=)",
                "a single save says when it has ended",
                "wait_until_finished(), and call the function; or CheckpointManagerOptions(async_options=)",
            )
        self.async_options = chosen
        self._options = changed(self._options, chosen)

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended."""
        if self._pending is not None and self._pending.done():
            self._wait()

    def wait_until_finished(self) -> None:
        """Blocks until no save is running; raises the error of a failed one."""
        self._wait()


class PyTreeCheckpointer(Checkpointer):
    """``Checkpointer(PyTreeCheckpointHandler())``, for ``primary_host=0`` and ``use_ocdbt=True`` only; the rest is of no
    effect: ckpt stores zarr3.
    """

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
    ) -> None:
        options = {"primary_host": primary_host, "use_ocdbt": use_ocdbt}
        super().__init__(handlers.PyTreeCheckpointHandler(**options))


class StandardCheckpointer(AsyncCheckpointer):
    """``AsyncCheckpointer(StandardCheckpointHandler())``, with simpler arguments.

    Example:
        >>> import ckpt_orbax as ocp, numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> with ocp.StandardCheckpointer() as checkpointer:
        ...     checkpointer.save(path, {"w": np.ones(2)})
        ...     checkpointer.restore(path, {"w": np.zeros(2, np.float16)})["w"].tolist()
        [1.0, 1.0]
    """

    def __init__(
        self,
        *,
        async_options: AsyncOptions | None = None,
        multiprocessing_options: Any = None,
        file_options: Any = None,
        atomicity_options: Any = None,
        checkpoint_metadata_store: Any = None,
        temporary_path_class: Any = None,
        engine: ckpt.Options | None = None,
        **handler_options: Any,
    ) -> None:
        super().__init__(
            handlers.StandardCheckpointHandler(**handler_options),
            async_options=async_options,
            multiprocessing_options=multiprocessing_options,
            file_options=file_options,
            engine=engine,
        )

    def save(
        self,
        directory: Any,
        state: Any,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> None:
        """Begins a save of ``state``; see ``Checkpointer.save``."""
        args = state if isinstance(state, StandardSave) else StandardSave(state, save_args)
        super().save(directory, args=args, force=force, custom_metadata=custom_metadata)

    def restore(
        self, directory: Any, target: Any = None, *, strict: bool = True, **kwargs: Any
    ) -> Any:
        """The tree at a path, as ``target`` looks; see ``Checkpointer.restore``."""
        args = kwargs.pop("args", None) or StandardRestore(target, strict=strict)
        return super().restore(directory, args=args, **kwargs)


def _only_item(info: CheckpointInfo) -> str:
    """The name of the item that is meant if none is named."""
    single = [*info.items] if len(info.items) == 1 else [n for n in _SINGLE if n in info.items]
    if single:
        return single[0]
    raise InvalidLayoutError(
        f"{info.path} has the items {', '.join(info.items)}: give the path of one of them, or use a "
        "CompositeCheckpointHandler"
    )
