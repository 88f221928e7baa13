"""Checkpoints of a model for a custom training loop, with the names of Keras' guide."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpt_core import Checkpointer, CheckpointExists, Options, RestoredStep
from ckpt_keras._backend import require_jax
from ckpt_keras._items import (
    ConfigItem,
    config_item,
    newest_model,
    restore_with,
    save_with,
    saved_model,
)


class KerasCheckpointManager:
    """Saves and restores a model by epoch in a directory of steps.

    This is the class of Keras' Orbax guide, as an import instead of code to paste. Three differences:
    a restore loads the requested step (the guide's loads the newest for 0), a refused save raises
    (the guide's returns False), and writing continues in the background.

    Args:
        model: a built model; compiled, to save its optimizer.
        checkpoint_dir: the directory of the steps; created if missing.
        max_to_keep: the number of newest steps to keep; None keeps all.
        steps_per_epoch: step numbers are ``epoch * steps_per_epoch``.
        host_only: for backends other than JAX.
        **kwargs: arguments of ``ckpt_core.Checkpointer``, such as ``keep_period=10``.

    Example:
        >>> import keras, tempfile
        >>> from ckpt_keras import KerasCheckpointManager
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> with KerasCheckpointManager(model, tempfile.mkdtemp()) as manager:
        ...     _ = manager.save_state(0)
        ...     manager.restore_state().step
        0
    """

    def __init__(
        self,
        model: Any,
        checkpoint_dir: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        steps_per_epoch: int = 1,
        *,
        host_only: bool = False,
        **kwargs: Any,
    ) -> None:
        require_jax(host_only)
        if isinstance(model, (str, os.PathLike)):
            raise TypeError(
                f"the model comes first, and then the directory: KerasCheckpointManager(model, {os.fspath(model)!r})"
            )
        self.model = model
        self.steps_per_epoch = steps_per_epoch
        self.checkpointer = Checkpointer(checkpoint_dir, max_to_keep=max_to_keep, **kwargs)
        self._options: Options | None = kwargs.get("options")
        self._config: ConfigItem | None = None

    def save_state(self, epoch: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Starts a save of the model after this epoch; returns whether it did.

        When it returns, the model may change. False for an epoch that this manager has saved.

        Raises:
            CheckpointExists: another run saved this step, or a newer one.
            Exception: the error of the previous save.
        """
        if self._config is None:
            self._config = config_item(self.model)
        save = partial(self.checkpointer.save, epoch * self.steps_per_epoch)
        try:
            return save_with(save, self.model, self._config, metrics=metrics)
        except CheckpointExists as error:
            error.add_note(
                "ckpt_keras: manager.checkpointer has the methods rollback_to and save, with force= and overwrite=; "
                "manager.restore_state() does what restore_latest() does"
            )
            raise

    def restore_state(self, step: int | None = None) -> RestoredStep | None:
        """Restores a step into the model, by default the newest complete one; None if there is none.

        Raises:
            StructureMismatch: the checkpoint is of another model; nothing was changed.
            CheckpointNotFound: there is no such step.
        """
        self.checkpointer.wait_until_finished()  # the running save may be the step to restore
        run = self.checkpointer
        if step is None:
            restore, saved = run.restore_latest, newest_model(run, run.all_steps())
        else:
            restore, saved = partial(run.restore, step), saved_model(run.inspect(step))
        if saved is None:
            return None
        return restore_with(restore, self.model, saved, self._options)

    def all_steps(self) -> list[int]:
        """Every committed step, ascending."""
        return self.checkpointer.all_steps()

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return self.checkpointer.latest_step()

    def wait_until_finished(self) -> None:
        """Returns when no save is running; raises the error of a failed one."""
        self.checkpointer.wait_until_finished()

    def close(self) -> None:
        """Waits for a running save and ends the use of this object."""
        self.checkpointer.close()

    def __enter__(self) -> KerasCheckpointManager:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.checkpointer.__exit__(kind, error, trace)


KerasOrbaxCheckpointManager = KerasCheckpointManager
"""The name in Keras' guide."""
