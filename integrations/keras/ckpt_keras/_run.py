"""The behaviour of the callback at the events of ``fit``."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import keras

from ckpt_core import CheckpointError
from ckpt_keras import _inside_fit, _monitor, _progress, _tracked
from ckpt_keras._arguments import Arguments
from ckpt_keras._data import FitData
from ckpt_keras._ema import Averages
from ckpt_keras._inside_fit import InsideFit
from ckpt_keras._progress import Progress, entered_at, process_count
from ckpt_keras._session import Session, place_of

logger = logging.getLogger("ckpt_keras")


class FitRun(keras.callbacks.Callback):
    """Saves while ``fit`` trains, and resumes it; ``best`` is the value that the monitored metric must beat first."""

    def __init__(self, arguments: Arguments, data: Any, best: float | None) -> None:
        super().__init__()
        self._arguments = arguments
        self._session: Session | None = None
        self._data = FitData(data)
        self._progress = Progress(unit=arguments.unit, best=best)
        self._resumed: Progress | None = None
        self._finished_runs = 0
        self._interrupted = True
        self._ended: Session | None = None
        self._inside = InsideFit()
        self._averages = Averages()
        self._first = _First(self)
        self._entering: Progress | None = None
        self._seen = 0
        self._iterations_before = 0
        self._stopping = False
        self._metric_values: list[Any] = []
        self._host: dict[str, Any] = {}

    # ------------------------------------------------------------------------ events of fit

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the newest step, now that model, optimizer and metrics are built."""
        model = self.model
        self._inside = _inside_fit.look_around(self)
        self._check_neighbours()
        _inside_fit.go_around(self._inside, self._first, self)
        self._averages = Averages(model, self._inside.callbacks)
        self._averages.unshare()
        if self._session is not None:
            before, self._session = self._session, None
            before.abandon()  # an exception ended that fit, and a traceback keeps it alive
        self._ended = None
        session = self._session = Session(self._arguments, model)
        _inside_fit.when_over(self._inside, _ending(self, session))
        self._data.begin(self._inside)
        restored, learning_rate = None, _learning_rate(model)
        if self._interrupted:
            # Also after a fit that an exception ended: memory then holds a partly trained epoch.
            restored = session.restore(model, self._data, self._batches_per_epoch)
        self._interrupted = True
        self._begin_run(model, restored)
        if self._progress.learning_rate is None:
            self._progress.learning_rate = learning_rate
        elif restored is not None:
            self._warn_of_learning_rate(learning_rate, _learning_rate(model))

    def interrupted(self, session: Session) -> None:
        """An exception ended ``fit``: keeps only its session, whose last save may still be running."""
        if self._session is not session:
            return
        # In this order, so that a waiting thread finds the save in one of the two attributes.
        self._ended = session
        self._session, self._entering = None, None
        self._stopping = False
        self._metric_values, self._averages = [], Averages()
        self._data.end()

    def closed(self, session: Session) -> None:
        """The session of an interrupted ``fit`` was closed; a failure of its last save is kept."""
        if self._ended is session and session.failure is None:
            self._ended = None

    def before_epoch(self, epoch: int) -> None:
        """Runs at the beginning of an epoch, before all other callbacks."""
        self.enter()
        self._data.before_epoch()
        self._host = self._host_now()
        self._progress.epoch = epoch
        self._seen = self._progress.batch
        self._iterations_before = self._iterations() - self._seen
        self._data.trained(self._progress.batches)

    def enter(self) -> None:
        """Applies restored state that other callbacks and ``fit`` would have reset earlier."""
        self._fitting._initial_epoch = None  # otherwise the next fit would begin there, too
        resumed, self._entering = self._entering, None
        if resumed is None:
            return
        self._data.kept.set(resumed.dataset)
        _progress.set_random_state(resumed.random_state)
        _tracked.set_states(self._arguments.track, resumed.callbacks)
        if resumed.averages_swapped:
            self._averages.restored(trains=True)
        if resumed.batch:
            # The epoch's running means; those after an epoch are of the finished validation.
            for variable, value in zip(
                self._fitting.metrics_variables, self._metric_values, strict=True
            ):
                variable.assign(value)
        self._metric_values = []

    def between_batches(self, batch: int) -> None:
        """Saves between two steps, when no step is running and the trainer holds the state. Runs at the beginning of a
        batch, before other callbacks: ``on_train_batch_end`` would make Keras wait for every step, and may run in a
        thread.
        """
        done = batch - self._seen
        if done > 0:
            self._count(batch)
            if self._is_due():
                self._save_if_wanted(self._metrics_now, f"batch {batch}")
        if self._alone and self._running.checkpointer.should_stop and not self._stopping:
            self._save_and_stop()

    def before_epoch_end(self) -> None:
        """Runs at the end of an epoch, before all other callbacks."""
        self._averages.before_epoch_end()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Calls ``before_epoch`` itself if Keras' list of callbacks was not found."""
        if self._inside.callbacks is None:
            self.before_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Calls ``between_batches`` itself if Keras' list of callbacks was not found."""
        if self._inside.callbacks is None:
            self.between_batches(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves after an epoch, after the ``on_epoch_end`` of all other callbacks."""
        if self._stopping:
            return
        self._data.kept.ended()
        ended = self._batches_done()
        self._count(ended)
        self._seen = 0
        progress = self._progress
        progress.epoch, progress.batch = epoch + 1, 0
        progress.stopped = bool(self._fitting.stop_training)
        # All processes must ask about the same number: the next epoch.
        checkpointer = self._running.checkpointer
        preempted = not self._alone and checkpointer.reached_preemption(progress.epoch)
        if (
            (progress.unit == "epoch" and self._running.is_wanted(progress))
            or self._is_due()
            or preempted
            or self._running.took_for_unfinished(progress)
        ):
            self._save_if_wanted(lambda: logs, f"the end of epoch {epoch + 1}")
        if preempted:
            self._fitting.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the last save; its failure is raised from ``fit``."""
        self.enter()  # has no effect unless no epoch was left to train
        session, self._session = self._running, None
        self._fitting._initial_epoch = None
        self._data.end()
        # After a skipped fit comes the one to continue; the end of a fit may have moved averages.
        self._interrupted = self._stopping or self._resumed is not None
        self._finished_runs += 0 if self._stopping else 1
        self._stopping = False
        session.close()

    # ----------------------------------------------------------------------------- one run

    @property
    def _running(self) -> Session:
        if self._session is None:
            raise CheckpointError("the callback has a checkpointer only while fit is running")
        return self._session

    @property
    def _fitting(self) -> Any:
        """The model, without syncing its state from the trainer."""
        return self._model

    @property
    def _alone(self) -> bool:
        return self._arguments.host_only or process_count() == 1

    @property
    def _batches_per_epoch(self) -> int | None:
        return (self.params or {}).get("steps")

    def _begin_run(self, model: Any, restored: Progress | None) -> None:
        """Finds out which of the saved calls of ``fit`` this one is."""
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

    def _skip_run(self, model: Any, why: str, level: int = logging.INFO) -> None:
        self._leave_averages()
        logger.log(level, "%s: nothing to train, %s", self._arguments.directory, why)
        if self._arguments.verbose:
            print(f"nothing to train: {why}")
        last = self._inside.last_epoch
        model._initial_epoch = sys.maxsize if last is None else max(last, 1)

    def _continue(self, model: Any, resumed: Progress) -> None:
        self._entering = resumed
        if resumed.stopped and self._arguments.track:
            self._skip_run(
                model,
                f"a callback in track= had stopped the training after epoch {resumed.epoch}: another directory begins anew",
                logging.WARNING,
            )
            return
        self._warn_if_nothing_is_left(resumed)
        if resumed.batch and _inside_fit.can_skip(self._inside):
            done = resumed.batch
            if not self._data.given:  # with data=, the position is restored exactly
                together = int(model.steps_per_execution)
                done, warning = entered_at(resumed, self._inside.batches, together)
                if warning is not None:
                    warnings.warn(
                        f"{self._arguments.directory}: {warning}", UserWarning, stacklevel=3
                    )
            self._progress.batch = resumed.batch = done
        if resumed.batch and _inside_fit.can_skip(self._inside):
            _inside_fit.skip_batches(self._inside, model, resumed.batch, draw=not self._data.given)
            self._metric_values = [variable.value for variable in model.metrics_variables]
        elif resumed.batch:
            logger.warning(
                "%s: this version of Keras cannot enter an epoch in its middle: epoch %d is run from its beginning",
                self._arguments.directory,
                resumed.epoch + 1,
            )
            self._progress.batch = resumed.batch = 0
        model._initial_epoch = resumed.epoch or None

    def _warn_if_nothing_is_left(self, resumed: Progress) -> None:
        last = self._inside.last_epoch
        if last is not None and resumed.epoch >= last:
            self._leave_averages()
            warnings.warn(
                f"nothing is trained: {self._arguments.directory} holds a run of {resumed.epoch} epochs, which is "
                f"restored, and fit(epochs={last}) asks for {last} in all. Pass epochs={resumed.epoch + 1} or more to "
                "train on, or another directory to begin anew",
                UserWarning,
                stacklevel=3,
            )

    def _check_neighbours(self) -> None:
        """Raises ValueError if another callback of ``fit`` saves into the same directory."""
        if self._inside.callbacks is None:
            return
        listed = self._inside.callbacks.callbacks
        mine = place_of(self._arguments.directory)
        for other in listed:
            if (
                other is not self
                and isinstance(other, FitRun)
                and place_of(other._arguments.directory) == mine
            ):
                raise ValueError(
                    f"two callbacks of one fit save into {self._arguments.directory}: give each a directory of its own"
                )
        _tracked.warn_of_unlisted(self._arguments.track, listed, stacklevel=3)

    def _warn_of_learning_rate(self, compiled: float | None, restored: float | None) -> None:
        """Warns if the program sets another learning rate than before, which a restored optimizer does not have."""
        if compiled in (None, self._progress.learning_rate, restored):
            return
        warnings.warn(
            f"{self._arguments.directory}: the optimizer goes on with the learning rate {restored:g} of the checkpoint, and not "
            f"with the {compiled:g} that this program set. To change it, list behind this callback: "
            "keras.callbacks.LambdaCallback(on_train_begin=lambda logs: model.optimizer.learning_rate.assign("
            f"{compiled:g}))",
            UserWarning,
            stacklevel=3,
        )

    def _leave_averages(self) -> None:
        """If no epoch follows, the end of fit copies averages to the weights, as after the last epoch."""
        if self._progress.averages_swapped:
            self._averages.restored(trains=False)
            self._progress.averages_swapped = False
            if self._entering is not None:
                self._entering.averages_swapped = False

    def _count(self, batch: int) -> None:
        """Counts the batches of the running epoch up to this one."""
        new = batch - self._seen
        self._seen = self._progress.batch = batch
        self._progress.batches += new
        self._progress.since_save += new

    def _batches_done(self) -> int:
        """The number of batches of the epoch that has just ended."""
        most = self._seen + int(self._fitting.steps_per_execution)
        known = self._batches_per_epoch
        if known is not None:
            return max(self._seen, min(most, known))
        # With data of unknown length, fit began a batch that did not exist: ask the optimizer.
        trained = self._iterations() - self._iterations_before
        return trained if self._seen <= trained <= most else most

    def _iterations(self) -> int:
        """Steps of the optimizer; 0 if the number of batches is known anyway."""
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
        """Saves, unless only better steps are saved and this one is not better."""
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
        host = self._host if in_epoch else self._host_now()
        batches = self._inside.batches
        self._progress.batch_size = batches.size
        self._progress.batches_per_epoch = batches.count
        self._progress.averages_swapped = self._averages.swapped
        model = self.model
        with self._averages.as_saved():
            self._running.save(model, self._progress, self._data, metrics, host)

    def _host_now(self) -> dict[str, Any]:
        state = _progress.random_state(torch=self._data.shuffles_by_torch)
        return {"random_state": state, "dataset": self._data.kept.state()}

    def _metrics_now(self) -> Mapping[str, Any]:
        if self._arguments.monitor.startswith("val_"):
            return {}  # it exists only at the end of an epoch, and computing the others takes time
        model: Any = self.model
        return model.get_metrics_result()

    def _save_and_stop(self) -> None:
        """The process is to end: saves the current state, and lets ``fit`` return."""
        logger.warning(
            "%s: the process is to stop: saving, and ending fit", self._arguments.directory
        )
        self._stopping = True
        if self._progress.batch:
            self._save({})
        self._fitting.stop_training = True


def _learning_rate(model: Any) -> float | None:
    """The learning rate of the optimizer; None if it has a schedule or there is no optimizer."""
    rate = getattr(getattr(model, "optimizer", None), "learning_rate", None)
    return float(rate.value) if isinstance(rate, keras.Variable) else None


class _First(keras.callbacks.Callback):
    """Runs before all other callbacks, and calls the owner's methods that must come first."""

    def __init__(self, owner: FitRun) -> None:
        super().__init__()
        self._owner = owner

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._owner.before_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._owner.between_batches(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._owner.before_epoch_end()

    def on_train_end(self, logs: Any = None) -> None:
        self._owner.enter()


def _ending(run: FitRun, session: Session) -> Callable[[], None]:
    """A function that ends a session after an exception ended ``fit``, when Keras calls no callbacks; it refers to the
    run weakly. Garbage collection may call it in any thread, even the saving one.
    """
    held = weakref.ref(run)

    def close() -> None:
        session.abandon()
        owner = held()
        if owner is not None:
            owner.closed(session)

    def end() -> None:
        thread = threading.Thread(target=close, name="ckpt-keras-end")
        owner = held()
        if owner is not None:
            owner.interrupted(session)
        if not session.closed:
            # at interpreter exit no thread starts, and the core waits for saves
            with contextlib.suppress(RuntimeError):
                thread.start()

    return end
