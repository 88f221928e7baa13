"""The callback: saves while ``fit`` trains, and brings it back where it stood."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from ckpt_core import Checkpointer, CheckpointError, Options
from ckpt_keras import _inside_fit, _monitor, _progress, _tracked
from ckpt_keras._arguments import make_arguments
from ckpt_keras._backend import require_jax
from ckpt_keras._data import FitData
from ckpt_keras._inside_fit import InsideFit
from ckpt_keras._progress import Progress
from ckpt_keras._session import Session

logger = logging.getLogger("ckpt_keras")


class OrbaxCheckpointCallback(keras.callbacks.Callback):
    """A training that goes on where it stopped, from the one line that also saves it.

    ``fit`` with this callback saves model, optimizer, random state and counters after every epoch.
    The same line in a new process restores them and trains the remaining epochs, bit for bit as if
    there had been no interruption. A save blocks for the copy to the host; writing goes on in the
    background. The end of ``fit`` waits for the last one.

    Args:
        directory: where the steps lie; made if missing.
        monitor: the metric that says which step is best.
        verbose: 1 prints a line per save and restore.
        save_best_only: save only when ``monitor`` improved.
        mode: ``min``, ``max``, or ``auto``: by the name of the metric.
        save_freq: ``epoch``, or a number of batches. Step numbers count the same: step 3 is the
            state after the fourth epoch (0, 1, 2, 3), or after three batches.
        initial_value_threshold: what ``monitor`` has to beat at first.
        max_to_keep: how many of the newest steps stay; the best one by ``monitor`` stays besides.
            None keeps all.
        save_on_background: False waits for every save.
        save_weights_only: no optimizer, no metrics, no configuration: for ``restore``, not for
            ``load_model``.
        restore: False refuses a directory that has steps instead of going on from them.
        track: other callbacks whose state is saved: EarlyStopping, ReduceLROnPlateau ...
        data: a Grain dataset, loader or iterator that ``fit`` trains from; its position is saved.
        extra: further items by name, such as ``{"d_optimizer": optimizer}``.
        host_only: numpy copies from one process; for backends other than JAX.
        options: of the ``ckpt_core.Checkpointer``.
        model, checkpoint_dir, steps_per_epoch: names of the utility in Keras' guide. The model is
            the one that fits; steps are ``epoch * steps_per_epoch``.

    Raises:
        StructureMismatch: (from ``fit``) the checkpoint is of another model; nothing was changed.
        Exception: (from ``fit``) what made a save in the background fail.

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
        model: Any = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        steps_per_epoch: int = 1,
    ) -> None:
        self._arguments = make_arguments(locals())
        require_jax(host_only)
        super().__init__()
        self._session: Session | None = None
        self._data = FitData(data)
        self._progress = Progress(unit=self._arguments.unit, best=initial_value_threshold)
        self._resumed: Progress | None = None
        self._finished_runs = 0
        self._interrupted = True
        self._inside = InsideFit()
        self._first = _First(self)
        self._entering: Progress | None = None
        self._seen = 0
        self._iterations_before = 0
        self._stopping = False
        self._metric_values: list[Any] = []
        self._random_state: dict[str, Any] = {}

    @property
    def directory(self) -> str:
        """Where the steps lie."""
        return self._arguments.directory

    @property
    def best(self) -> float | None:
        """The best value of the monitored metric so far, those before a restart included."""
        return self._progress.best

    @property
    def checkpointer(self) -> Checkpointer:
        """The ``ckpt_core.Checkpointer`` that saves.

        Raises:
            CheckpointError: ``fit`` is not running.
        """
        return self._running.checkpointer

    def wait_until_finished(self) -> None:
        """Returns when no save is running; raises what made one fail."""
        if self._session is not None:
            self._session.checkpointer.wait_until_finished()

    # ------------------------------------------------------------------------ events of fit

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest step, now that model, optimizer and metrics are built."""
        model = self.model
        self._inside = _inside_fit.look_around(self)
        _inside_fit.go_around(self._inside, self._first, self)
        if self._session is None:
            self._session = Session(self._arguments, model)
        self._data.begin(self._inside)
        restored = None
        if self._interrupted:
            # also after a fit that ended by an exception: what is in memory is half an epoch
            restored = self._session.restore(model, self._data, self._batches_per_epoch)
        self._interrupted = True
        self._begin_run(model, restored)

    def before_epoch(self, epoch: int) -> None:
        """First of all callbacks at the beginning of an epoch."""
        self.enter()
        self._random_state = _progress.random_state()
        self._progress.epoch = epoch
        self._seen = self._progress.batch
        self._iterations_before = self._iterations() - self._seen
        self._data.trained(self._progress.batches)

    def enter(self) -> None:
        """Lets take effect what other callbacks and ``fit`` would have reset before."""
        self._fitting._initial_epoch = None  # or the next fit would begin there, too
        resumed, self._entering = self._entering, None
        if resumed is None:
            return
        _progress.set_random_state(resumed.random_state)
        _tracked.set_states(self._arguments.track, resumed.callbacks)
        if resumed.batch:
            # the epoch's running means; those after an epoch are of the validation, and are over
            for variable, value in zip(
                self._fitting.metrics_variables, self._metric_values, strict=True
            ):
                variable.assign(value)
        self._metric_values = []

    def between_batches(self, batch: int) -> None:
        """Saves between two steps, where none is running and the state is the trainer's to give.

        At the beginning of a batch, before other callbacks begin with it: ``on_train_batch_end``
        would make Keras wait for every step, and may run in a thread.
        """
        done = batch - self._seen
        if done > 0:
            self._count(batch)
            if self._is_due():
                self._save_if_wanted(self._metrics_now, f"batch {batch}")
        if self._alone and self._running.checkpointer.should_stop and not self._stopping:
            self._save_and_stop()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Does by itself what must come first, where there is no list to stand first in."""
        if self._inside.callbacks is None:
            self.before_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """The same between batches."""
        if self._inside.callbacks is None:
            self.between_batches(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves after an epoch, after all other callbacks had theirs."""
        if self._stopping:
            return
        ended = self._batches_done()
        self._count(ended)
        self._seen = 0
        progress = self._progress
        progress.epoch, progress.batch = epoch + 1, 0
        progress.stopped = bool(self._fitting.stop_training)
        # the point where all stop is one number that all ask about: the next one, so it counts epochs
        checkpointer = self._running.checkpointer
        told_to_stop = not self._alone and checkpointer.reached_preemption(progress.epoch)
        if (
            progress.unit == "epoch"
            or self._is_due()
            or told_to_stop
            or self._running.took_for_unfinished(progress)
        ):
            self._save_if_wanted(lambda: logs, f"the end of epoch {epoch + 1}")
        if told_to_stop:
            self._fitting.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the last save; what made it fail is raised out of ``fit``."""
        self.enter()  # where no epoch was left to train
        session, self._session = self._running, None
        self._fitting._initial_epoch = None
        self._data.end()
        self._interrupted = self._stopping
        self._stopping = False
        self._finished_runs += 0 if self._interrupted else 1
        session.close()

    # ----------------------------------------------------------------------------- one run

    @property
    def _running(self) -> Session:
        if self._session is None:
            raise CheckpointError("the callback has a checkpointer only while fit is running")
        return self._session

    @property
    def _fitting(self) -> Any:
        """The model without taking its state from the trainer."""
        return self._model

    @property
    def _alone(self) -> bool:
        return self._arguments.host_only or _process_count() == 1

    @property
    def _batches_per_epoch(self) -> int | None:
        return (self.params or {}).get("steps")

    def _begin_run(self, model: Any, restored: Progress | None) -> None:
        """Finds this call of ``fit`` among those that the directory knows of."""
        run = self._finished_runs
        if restored is not None:
            self._resumed, self._progress = restored, replace(restored)
        resumed = self._resumed
        if resumed is not None and resumed.run > run:
            self._skip_run(model, f"fit number {run + 1} was finished before")
        elif resumed is not None and resumed.run == run:
            self._resumed = None
            self._continue(model, resumed)
        elif run > 0:
            self._progress = self._progress.next_run()

    def _skip_run(self, model: Any, why: str) -> None:
        logger.info("%s: nothing to train, %s", self.directory, why)
        if self._arguments.verbose:
            print(f"nothing to train: {why}")
        last = self._inside.last_epoch
        model._initial_epoch = sys.maxsize if last is None else max(last, 1)

    def _continue(self, model: Any, resumed: Progress) -> None:
        self._entering = resumed
        if resumed.stopped and self._arguments.track:
            self._skip_run(
                model, f"a callback had stopped the training after epoch {resumed.epoch}"
            )
            return
        if resumed.batch and _inside_fit.can_skip(self._inside):
            _inside_fit.skip_batches(self._inside, resumed.batch, draw=not self._data.given)
            self._metric_values = [variable.value for variable in model.metrics_variables]
        elif resumed.batch:
            logger.warning(
                "%s: this version of Keras cannot enter an epoch in its middle: epoch %d is run from its beginning",
                self.directory,
                resumed.epoch + 1,
            )
            self._progress.batch = resumed.batch = 0
        model._initial_epoch = resumed.epoch or None

    def _count(self, batch: int) -> None:
        """Counts the batches up to one of the running epoch."""
        new = batch - self._seen
        self._seen = self._progress.batch = batch
        self._progress.batches += new
        self._progress.since_save += new

    def _batches_done(self) -> int:
        """How many batches the epoch that has just ended had."""
        most = self._seen + int(self._fitting.steps_per_execution)
        known = self._batches_per_epoch
        if known is not None:
            return max(self._seen, min(most, known))
        # data of unknown length: fit began a batch that there was not, and the optimizer knows
        trained = self._iterations() - self._iterations_before
        return trained if self._seen <= trained <= most else most

    def _iterations(self) -> int:
        """Steps of the optimizer; 0 where the number of batches is known anyway."""
        if self._batches_per_epoch is not None:
            return 0
        counters: list[Any] = [
            v for v in self._fitting.optimizer.variables if v.path.endswith("iteration")
        ]
        return int(counters[0].value) if counters else 0

    def _is_due(self) -> bool:
        freq = self._arguments.save_freq
        return isinstance(freq, int) and self._progress.since_save >= freq

    # -------------------------------------------------------------------------------- save

    def _save_if_wanted(self, logs_of: Callable[[], Any], where: str) -> None:
        """Saves, unless the callback was asked for the best only and this is not it."""
        arguments, progress = self._arguments, self._progress
        progress.since_save = 0
        metrics = _monitor.numbers(logs_of())
        value = _monitor.monitored(
            metrics, arguments.monitor, needed=arguments.save_best_only, where=where
        )
        mode = _monitor.direction(arguments.monitor, arguments.mode, self._fitting)
        if arguments.save_best_only and mode is None:
            raise ValueError(
                f"whether {arguments.monitor!r} should grow or fall is not known: pass mode='min' or mode='max'"
            )
        better = (
            value is not None
            and mode is not None
            and _monitor.is_better(value, progress.best, mode)
        )
        if better:
            progress.best = value
        if better or not arguments.save_best_only:
            self._save(metrics)

    def _save(self, metrics: Mapping[str, float]) -> None:
        in_epoch = self._progress.batch > 0
        state = self._random_state if in_epoch else _progress.random_state()
        self._running.save(self.model, self._progress, self._data, metrics, state)

    def _metrics_now(self) -> Mapping[str, Any]:
        if self._arguments.monitor.startswith("val_"):
            return {}  # is of the end of an epoch, and computing the others takes time
        model: Any = self.model
        return model.get_metrics_result()

    def _save_and_stop(self) -> None:
        """The process was told to end: saves where it stands, and lets ``fit`` return."""
        logger.warning("%s: told to stop, saving and ending fit", self.directory)
        self._stopping = True
        if self._progress.batch:
            self._save({})
        self._fitting.stop_training = True


class _First(keras.callbacks.Callback):
    """Stands before all other callbacks, for what must happen before theirs."""

    def __init__(self, owner: OrbaxCheckpointCallback) -> None:
        super().__init__()
        self._owner = owner

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._owner.before_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._owner.between_batches(batch)

    def on_train_end(self, logs: Any = None) -> None:
        self._owner.enter()


def _process_count() -> int:
    import jax

    return jax.process_count()
