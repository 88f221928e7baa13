"""The public callback with its arguments; what it does in a ``fit`` is in ``_fit``."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import keras

from ckpt_core import Checkpointer, CheckpointError, Options
from ckpt_core.arguments import answering, check_flags
from ckpt_keras._adapter import require_jax
from ckpt_keras._arguments import Arguments, checked_extra, checked_track, directory_of
from ckpt_keras._fit import EarlierFits, Fit
from ckpt_keras._inside_fit import put_around
from ckpt_keras._progress import Progress
from ckpt_keras._session import Session


class OrbaxCheckpointCallback(keras.callbacks.Callback):
    """Saves while ``fit`` trains, and resumes it.

    ``fit`` with this callback saves model, optimizer, random state and counters after every epoch.
    The same line in a new process restores them and trains the remaining epochs, bit for bit as if
    there had been no interruption. A save blocks until the copy to the host is made; writing continues
    in the background. The end of ``fit`` waits for the last save.

    Args:
        directory: the directory of the steps; created if missing.
        monitor: the metric that decides which step is best.
        verbose: 1 prints a line per save and restore.
        save_best_only: save only when ``monitor`` improved.
        mode: ``min``, ``max``, or ``auto``: by the name of the metric.
        save_freq: ``epoch``, or a number of batches. Step numbers count the same: step 3 is the
            state after the fourth epoch (0, 1, 2, 3), or after three batches.
        initial_value_threshold: the value that the first ``monitor`` must beat.
        max_to_keep: the number of newest steps to keep; the best one by ``monitor`` is kept in
            addition. None keeps all.
        save_on_background: False waits for every save.
        save_weights_only: no optimizer, no metrics, no configuration: for ``restore``, not for
            ``load_model``.
        restore: False refuses a directory that has steps instead of continuing from them.
        track: other callbacks whose state is saved: EarlyStopping, ReduceLROnPlateau ...
        data: a Grain dataset, loader or iterator that ``fit`` trains from; its position is saved.
        save_interval_steps: save only steps that it divides; a name of Keras' guide.
        keep_period: also keep steps that it divides; a name of Keras' guide.
        extra: further items by name, such as ``{"d_optimizer": optimizer}``.
        host_only: numpy copies from one process; for backends other than JAX.
        options: options of the ``ckpt_core.Checkpointer``.
        model, checkpoint_dir, steps_per_epoch: argument names of Keras' guide. The model must be
            the one that is trained; steps are ``epoch * steps_per_epoch``.

    Raises:
        StructureMismatch: (from ``fit``) the checkpoint is of another model; nothing was changed.
        Exception: (from ``fit``) the error of a save in the background.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> from ckpt_keras import OrbaxCheckpointCallback
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.ones((8, 2)), np.ones((8, 1))
        >>> directory = tempfile.mkdtemp()
        >>> _ = model.fit(x, y, epochs=2, verbose=0, callbacks=[OrbaxCheckpointCallback(directory)])
        >>> history = model.fit(
        ...     x, y, epochs=3, verbose=0, callbacks=[OrbaxCheckpointCallback(directory)]
        ... )
        >>> history.epoch
        [2]
    """

    @answering
    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        max_to_keep: int | None = 5,
        save_on_background: bool = True,
        save_weights_only: bool = False,
        *,
        restore: bool = True,
        track: Sequence[Any] | None = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        host_only: bool = False,
        options: Options | None = None,
        save_interval_steps: int | None = None,
        keep_period: int | None = None,
        model: Any = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        steps_per_epoch: int = 1,
    ) -> None:
        check_flags(
            save_best_only=save_best_only, save_on_background=save_on_background, restore=restore
        )
        check_flags(save_weights_only=save_weights_only, host_only=host_only)
        super().__init__()
        place, monitor = directory_of(directory, monitor, checkpoint_dir)
        self._arguments = Arguments(
            directory=place,
            monitor=monitor,
            verbose=int(verbose),
            save_best_only=bool(save_best_only),
            mode=mode,
            save_freq=save_freq,
            max_to_keep=max_to_keep,
            save_on_background=bool(save_on_background),
            save_weights_only=bool(save_weights_only),
            steps_per_epoch=int(steps_per_epoch),
            restore=bool(restore),
            host_only=bool(host_only),
            save_interval_steps=save_interval_steps,
            keep_period=keep_period,
            track=checked_track(track),
            extra=checked_extra(extra),
            options=options,
        )
        require_jax(host_only)
        self._data = data
        self._past = EarlierFits(Progress(unit=self._arguments.unit, best=initial_value_threshold))

        self._fit: Fit | None = None
        self._session: Session | None = None  # of the last fit, which an exception may have ended

    @property
    def directory(self) -> str:
        """The directory of the steps."""
        return self._arguments.directory

    @property
    def best(self) -> float | None:
        """The best value of the monitored metric so far, including those before a restart."""
        return self._past.progress.best

    @property
    def checkpointer(self) -> Checkpointer:
        """The ``ckpt_core.Checkpointer`` that saves.

        Raises:
            CheckpointError: ``fit`` is not running.
        """
        return self._running.session.checkpointer

    def wait_until_finished(self) -> None:
        """Returns when no save is running; raises the error of a failed one."""
        if self._fit is not None:
            self.checkpointer.wait_until_finished()
        elif self._session is not None:
            self._session.close()  # an exception may have ended the last fit

    @property
    def _running(self) -> Fit:
        if self._fit is None:
            raise CheckpointError("the callback has a checkpointer only while fit is running")
        return self._fit

    @cached_property
    def _first(self) -> Any:
        """Runs before all other callbacks of each ``fit``."""
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs=None: self._running.before_epoch(epoch),
            on_train_batch_begin=lambda batch, logs=None: self._running.between_batches(batch),
            on_epoch_end=lambda epoch, logs=None: self._running.averages.before_epoch_end(),
            on_train_end=lambda logs=None: self._running.enter(),
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest step."""
        if self._session is not None:
            self._session.close(interrupted=True)  # an exception may have ended the last fit
        fit = self._fit = Fit(self, self._arguments, self._data, self._past)
        self._session = fit.session
        put_around(fit.inside, self._first, self, _ending(self, fit.session))
        fit.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Goes on with the learning rate of an epoch that was interrupted."""
        self._running.epoch_began()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves after an epoch."""
        self._running.after_epoch(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the last save; its failure is raised from ``fit``."""
        fit, self._fit = self._running, None
        fit.end()


def _ending(callback: Any, session: Session) -> Callable[[], None]:
    """A function that ends a session after an exception ended ``fit``; garbage collection calls it, in any thread."""
    held = weakref.ref(callback)

    def end() -> None:
        owner = held()
        if owner is not None and owner._session is session:
            owner._fit = None  # which holds the data
        if not session.closed:
            # at interpreter exit no thread starts, and the core waits for saves
            with contextlib.suppress(RuntimeError):
                close = partial(session.close, interrupted=True)
                threading.Thread(target=close, name="ckpt-keras-end").start()

    return end
