"""Single checkpoints: ``Checkpointer``, its form in the background, and the two short forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import ckpt_core as ckpt
from ckpt_orbax._refused import not_offered
from ckpt_orbax.v0 import handlers
from ckpt_orbax.v0._abstract import AbstractCheckpointer
from ckpt_orbax.v0._checkpointer import Checkpointer
from ckpt_orbax.v0.args import StandardRestore, StandardSave
from ckpt_orbax.v0.options import AsyncOptions, timeout_of


class AsyncCheckpointer(Checkpointer):
    """As ``Checkpointer``, but a save blocks only until the arrays are copied.

    Args:
        handler: what kind of object it is.
        timeout_secs, async_options: how long processes wait for each other.
        **options: see ``Checkpointer``.
    """

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
        self._pending: ckpt.PendingSave | None = None
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
        self._options = dataclasses.replace(self._options, **timeout_of(chosen))

    def save(
        self,
        directory: Any,
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Begins a save, after the one before has ended; see ``Checkpointer.save``.

        Raises:
            Exception: the error of the save before.
        """
        self.wait_until_finished()
        self._pending = self.begin(directory, args, kwargs, force, custom_metadata)

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """See ``Checkpointer.restore``; waits for a running save."""
        self.wait_until_finished()
        return super().restore(directory, *args, **kwargs)

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended."""
        if self._pending is not None and self._pending.done():
            self.wait_until_finished()

    def wait_until_finished(self) -> None:
        """Blocks until no save is running; raises the error of a failed one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def cancel(self) -> None:
        """Refused: a save that has begun is finished."""
        raise not_offered(
            "AsyncCheckpointer.cancel()",
            "a save that has begun is finished, so that processes cannot disagree on it",
            "wait_until_finished(), and shutil.rmtree(path) if the checkpoint is not wanted",
        )

    def close(self) -> None:
        """As ``wait_until_finished``, and closes the handler."""
        self.wait_until_finished()
        super().close()


class PyTreeCheckpointer(Checkpointer):
    """``Checkpointer(PyTreeCheckpointHandler())``.

    Args:
        primary_host: only 0.
        use_ocdbt: only True.
        use_zarr3, use_compression: of no effect; ckpt stores zarr3.
    """

    def __init__(
        self,
        primary_host: int | None = 0,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
    ) -> None:
        super().__init__(
            handlers.PyTreeCheckpointHandler(primary_host=primary_host, use_ocdbt=use_ocdbt)
        )


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
        """Begins a save of ``state``; see ``AsyncCheckpointer.save``."""
        args = state if isinstance(state, StandardSave) else StandardSave(state, save_args)
        super().save(directory, args=args, force=force, custom_metadata=custom_metadata)

    def restore(
        self, directory: Any, target: Any = None, *, strict: bool = True, **kwargs: Any
    ) -> Any:
        """The tree at a path, as ``target`` looks; see ``Checkpointer.restore``."""
        args = kwargs.pop("args", None) or StandardRestore(target, strict=strict)
        return super().restore(directory, args=args, **kwargs)


__all__ = [
    "AbstractCheckpointer",
    "AsyncCheckpointer",
    "Checkpointer",
    "PyTreeCheckpointer",
    "StandardCheckpointer",
]
