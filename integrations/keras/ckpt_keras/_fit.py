"""What the callback does in one call of ``fit``, from its beginning to its end."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import keras

from ckpt_keras import _inside_fit, _progress
from ckpt_keras._adapter import is_lost, on_jax, value_of
from ckpt_keras._arguments import Arguments
from ckpt_keras._data import FitData
from ckpt_keras._progress import Progress, skipped_batches
from ckpt_keras._session import Session, place_of

logger = logging.getLogger("ckpt_keras")


@dataclass
class EarlierFits:
    """What a callback knows of its earlier calls of ``fit``."""

    progress: Progress
    resumed: Progress | None = None  # of a step, until the call comes that it is of
    finished: int = 0  # calls
    interrupted: bool = True  # whether the next call goes on from the newest step


class Fit:
    """One call of ``fit``; ``begin`` restores the newest step, now that model, optimizer and metrics are built."""

    def __init__(self, callback: Any, arguments: Arguments, data: Any, past: EarlierFits) -> None:
        self._callback, self._arguments, self._past = callback, arguments, past
        self._model = callback._model  # `callback.model` takes the state back from the trainer
        self.inside = _inside_fit.find_fit(callback)
        self._check_neighbours()
        self._learning_rate = _learning_rate(self._model)
        self.averages = Averages(self._model, self.inside.callbacks)
        self.averages.unshare()
        self._data = FitData(data, self.inside)
        self.session = Session(arguments, self._model)
        self._entering: Progress | None = None
        self._iterations_before = 0
        self._stopping = False
        self._running_means: list[tuple[Any, Any]] = []  # of an epoch that goes on
        self._host: dict[str, Any] = {}
        self._rate: float | None = None  # of an epoch that goes on

    def begin(self) -> None:
        """Restores the newest step, and finds out which of the saved calls of ``fit`` this one is."""
        past, restored = self._past, None
        if past.interrupted:  # also by an exception: memory then holds a partly trained epoch
            with _refilled(self._model):
                restored = self.session.restore(self._model, self._data, self._batches_per_epoch)
        past.interrupted = True
        if restored is not None:
            past.resumed, past.progress = restored, replace(restored)
        resumed = past.resumed
        if resumed is not None and resumed.run > past.finished:
            self._skip(f"fit number {past.finished + 1} was finished before")
        elif resumed is not None and resumed.run == past.finished:
            past.resumed = None
            self._continue(resumed)
        elif past.finished > 0:
            past.progress = past.progress.next_run()
        elif restored is None:  # an interrupted call may have counted batches
            past.progress.batches -= past.progress.batch
            past.progress.batch = past.progress.since_save = 0
        if self._progress.learning_rate is None:
            self._progress.learning_rate = self._learning_rate
        elif restored is not None:
            self._warn_of_learning_rate(_learning_rate(self._model))

    def before_epoch(self, epoch: int) -> None:
        """Runs at the beginning of an epoch, before all other callbacks."""
        self.enter()
        self._data.before_epoch()
        self._host = self._host_now()
        self._progress.epoch = epoch
        self._iterations_before = self._iterations() - self._progress.batch
        self._data.trained(self._progress.batches)

    def enter(self) -> None:
        """Applies restored state that other callbacks and ``fit`` would have reset earlier."""
        self._model._initial_epoch = None  # otherwise the next fit would begin there, too
        resumed, self._entering = self._entering, None
        if resumed is None:
            return
        self._data.kept.set(resumed.dataset)
        _progress.set_random_state(resumed.random_state)
        _progress.set_states(self._arguments.track, resumed.callbacks)
        self.averages.restored(swapped=resumed.averages_swapped, trains=True)
        for variable, value in self._running_means:
            variable.assign(value)
        self._running_means = []
        if resumed.batch:  # the rate of the epoch that goes on
            self._rate = _learning_rate(self._model)

    def epoch_began(self) -> None:
        """Runs after all other callbacks: what changes the rate in each epoch has done so before this one was interrupted."""
        if self._rate is not None:
            self._model.optimizer.learning_rate, self._rate = self._rate, None

    def between_batches(self, batch: int) -> None:
        """Saves at the beginning of a batch: for ``on_train_batch_end`` Keras waits for every step, and may use a thread."""
        if batch > self._progress.batch:
            self._count(batch)
            if self._is_due():
                # these metrics exist only at the end of an epoch, and computing others takes time
                at_the_end = self._arguments.monitor.startswith("val_")
                logs = {} if at_the_end else self._callback.model.get_metrics_result()
                self._save_if_wanted(logs, f"batch {batch}")
        session = self.session
        if session.processes == 1 and session.checkpointer.should_stop and not self._stopping:
            what = "the process is to stop: saving, and ending fit"
            logger.warning("%s: %s", self._arguments.directory, what)
            self._stopping = True
            if self._progress.batch:
                self._save({})
            self._model.stop_training = True

    def after_epoch(self, epoch: int, logs: Any) -> None:
        """Saves after an epoch, after the ``on_epoch_end`` of all other callbacks."""
        if self._stopping:
            return
        self._data.kept.ended()
        self._count(self._batches_done())
        progress, session = self._progress, self.session
        progress.epoch, progress.batch = epoch + 1, 0
        progress.stopped = bool(self._model.stop_training)
        # All processes must ask about the same number: the next epoch.
        several = session.processes > 1
        preempted = several and session.checkpointer.reached_preemption(progress.epoch)
        if self._is_due() or preempted or session.is_wanted(progress):
            self._save_if_wanted(logs, f"the end of epoch {epoch + 1}")
        if preempted:
            self._model.stop_training = True

    def end(self) -> None:
        """Waits for the last save; raises its failure."""
        self.enter()  # has no effect unless no epoch was left to train
        past = self._past
        # After a skipped fit comes the one to continue; the end of a fit may have moved averages.
        past.interrupted = self._stopping or past.resumed is not None
        past.finished += 0 if self._stopping else 1
        self.session.close()

    @property
    def _progress(self) -> Progress:
        return self._past.progress

    @property
    def _batches_per_epoch(self) -> int | None:
        return (self._callback.params or {}).get("steps")

    def _skip(self, why: str, level: int = logging.INFO) -> None:
        self._end_with_averages()
        logger.log(level, "%s: nothing to train, %s", self._arguments.directory, why)
        if self._arguments.verbose:
            print(f"nothing to train: {why}")
        last = self.inside.last_epoch
        self._model._initial_epoch = sys.maxsize if last is None else max(last, 1)

    def _continue(self, resumed: Progress) -> None:
        self._entering = resumed
        if resumed.stopped and self._arguments.track:
            self._skip(
                f"a callback in track= had stopped the training after epoch {resumed.epoch}: another directory begins anew",
                logging.WARNING,
            )
            return
        self._warn_if_nothing_is_left(resumed)
        self._progress.batch = resumed.batch = self._batch_to_enter(resumed)
        if resumed.batch:
            draw = not self._data.given
            _inside_fit.skip_batches(self.inside, self._model, resumed.batch, draw=draw)
            self._running_means = [(one, one.value) for one in self._model.metrics_variables]
        self._model._initial_epoch = resumed.epoch or None

    def _batch_to_enter(self, resumed: Progress) -> int:
        """The number of batches to leave out of an epoch that was interrupted."""
        directory = self._arguments.directory
        if resumed.batch and not hasattr(self.inside.epochs, "_enumerate_iterator"):
            again = f"epoch {resumed.epoch + 1} is run from its beginning"
            logger.warning("%s: Keras cannot enter an epoch in its middle: %s", directory, again)
            return 0
        if not resumed.batch or self._data.given:  # with data=, the position is restored exactly
            return resumed.batch
        together = int(self._model.steps_per_execution)
        done, warning = skipped_batches(resumed, self.inside.batches, together)
        if warning is not None:
            self._warn(f"{directory}: {warning}")
        return done

    def _end_with_averages(self) -> None:
        """If no epoch follows, the end of fit copies averages to the weights, as after the last epoch."""
        if self._progress.averages_swapped:
            self.averages.restored(swapped=True, trains=False)
            self._progress.averages_swapped = False
            if self._entering is not None:
                self._entering.averages_swapped = False

    def _warn(self, what: str) -> None:
        warnings.warn(what, UserWarning, stacklevel=4)

    def _warn_if_nothing_is_left(self, resumed: Progress) -> None:
        last = self.inside.last_epoch
        if last is not None and resumed.epoch >= last:
            self._end_with_averages()
            self._warn(
                f"nothing is trained: {self._arguments.directory} holds a run of {resumed.epoch} epochs, which is restored, "
                f"and fit(epochs={last}) asks for {last} in all. Pass epochs={resumed.epoch + 1} or more to train on, or "
                "another directory to begin anew"
            )

    def _check_neighbours(self) -> None:
        """ValueError if another callback saves into the same directory; warns of tracked ones that ``fit`` does not call."""
        listed, mine = self.inside.callbacks.callbacks, self._arguments.directory
        others = [getattr(one, "_arguments", None) for one in listed if one is not self._callback]
        taken = {place_of(one.directory) for one in others if isinstance(one, Arguments)}
        if place_of(mine) in taken:
            raise ValueError(
                f"two callbacks of one fit save into {mine}: give each a directory of its own"
            )
        for tracked in self._arguments.track:  # no error: one in the list may call it
            if not any(tracked is one for one in listed):
                what = f"track holds a {type(tracked).__name__} that is not in callbacks= of fit"
                self._warn(f"{what}, which does not call it: pass the same object in both")

    def _warn_of_learning_rate(self, restored: float | None) -> None:
        """Warns if the program sets another learning rate than before, which a restored optimizer does not have."""
        compiled = self._learning_rate
        if compiled not in (None, self._progress.learning_rate, restored):
            self._warn(
                f"{self._arguments.directory}: the optimizer goes on with the learning rate {restored:g} of the checkpoint, and not "
                f"with the {compiled:g} that this program set. To change it, list behind this callback: "
                "keras.callbacks.LambdaCallback(on_train_begin=lambda logs: model.optimizer.learning_rate.assign("
                f"{compiled:g}))"
            )

    def _count(self, batch: int) -> None:
        """Counts the batches of the running epoch up to this one."""
        progress = self._progress
        new = batch - progress.batch
        progress.batch = batch
        progress.batches += new
        progress.since_save += new

    def _batches_done(self) -> int:
        """The number of batches of the epoch that has just ended."""
        seen, known = self._progress.batch, self._batches_per_epoch
        most = seen + int(self._model.steps_per_execution)
        if known is not None:
            return max(seen, min(most, known))
        # With data of unknown length, fit began a batch that did not exist: ask the optimizer.
        trained = self._iterations() - self._iterations_before
        return trained if seen <= trained <= most else most

    def _iterations(self) -> int:
        """Steps of the optimizer; 0 if the number of batches is known anyway."""
        if self._batches_per_epoch is not None:
            return 0
        variables: list[Any] = self._model.optimizer.variables
        counters = [one for one in variables if one.path.endswith("iteration")]
        return int(counters[0].value) if counters else 0

    def _is_due(self) -> bool:
        freq = self._arguments.save_freq
        return isinstance(freq, int) and self._progress.since_save >= freq

    def _save_if_wanted(self, logs: Mapping[str, Any] | None, where: str) -> None:
        """Saves, unless only better steps are saved and this one is not better."""
        arguments, progress = self._arguments, self._progress
        progress.since_save = 0
        metrics = _numbers(logs)
        value, mode = metrics.get(arguments.monitor), arguments.direction(self._model)
        if arguments.save_best_only and value is None:
            self._warn(
                f"save_best_only=True needs {arguments.monitor!r}, which is not among the metrics "
                f"({', '.join(metrics) or 'none'}): nothing is saved at {where}"
            )
        if arguments.save_best_only and mode is None:
            raise ValueError(
                f"whether {arguments.monitor!r} should grow or fall is not known: pass mode='min' or mode='max'"
            )
        better = _is_better(value, progress.best, mode)
        if better:
            progress.best = value
        if better or not arguments.save_best_only:
            self._save(metrics)

    def _save(self, metrics: Mapping[str, float]) -> None:
        progress, batches = self._progress, self.inside.batches
        host = self._host if progress.batch else self._host_now()
        progress.batch_size, progress.batches_per_epoch = batches.size, batches.count
        progress.averages_swapped = self.averages.swapped
        model = self._callback.model
        with self.averages.as_saved():
            self.session.save(model, progress, self._data, metrics, host)

    def _host_now(self) -> dict[str, Any]:
        state = _progress.random_state(torch=self._data.shuffles_by_torch)
        return {"random_state": state, "dataset": self._data.kept.state()}


def _is_better(value: float | None, best: float | None, mode: str | None) -> bool:
    """Whether a value beats the best one so far; NaN never does, nor one that may be worse."""
    if value is None or mode is None or value != value:
        return False
    if best is None or best != best:
        return True
    return value < best if mode == "min" else value > best


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """The numbers in the logs, as Python floats."""
    found: dict[str, float] = {}
    for name, value in (logs or {}).items():
        with contextlib.suppress(TypeError, ValueError):  # arrays, dicts of a custom train_step
            found[str(name)] = float(value)
    return found


def _learning_rate(model: Any) -> float | None:
    """The learning rate of the optimizer; None if it has a schedule, no value, or there is no optimizer."""
    rate: Any = getattr(getattr(model, "optimizer", None), "learning_rate", None)
    if not isinstance(rate, keras.Variable) or (on_jax() and is_lost(rate)):
        return None
    return float(value_of(rate))


@contextlib.contextmanager
def _refilled(model: Any) -> Generator[None]:
    """Gives variables that an interrupted step left empty some arrays; CheckpointError if the block replaces not all."""
    of_optimizer = getattr(model.optimizer, "variables", ())
    every = (*model.variables, *of_optimizer, *model.metrics_variables) if on_jax() else ()
    lost = [variable for variable in every if is_lost(variable)]
    for variable in lost:
        variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
    placed = [variable._value for variable in lost]
    try:
        yield
    finally:
        left = [one for one, zeros in zip(lost, placed, strict=True) if one._value is zeros]
        for variable in left:
            variable._value = None
    for variable in left:
        value_of(variable)


class Averages:
    """The averages (``use_ema``) of a model that ``fit`` trains. With ``SwapEMAWeights(swap_on_epoch=True)`` the model
    holds them at the end of an epoch, as readers of a checkpoint expect, and the optimizer the trained weights; after
    the last epoch Keras drops those. A checkpoint holds both, and notes that they are swapped.
    """

    def __init__(self, model: Any, callbacks: Any) -> None:
        compiled = getattr(model, "optimizer", None)
        own: Any = getattr(compiled, "inner_optimizer", compiled)
        averages = getattr(own, "_model_variables_moving_average", None)
        self._pairs: list[tuple[Any, Any]] = []
        if averages and own.use_ema:
            self._pairs += zip(own._trainable_variables, averages, strict=True)
        kind = keras.callbacks.SwapEMAWeights
        self._swappers: list[Any] = [one for one in callbacks.callbacks if isinstance(one, kind)]
        swapper = next((one for one in self._swappers if one.swap_on_epoch), None)
        self._swapper = swapper if self._pairs else None
        self._trained: list[Any] = []

    @property
    def swapped(self) -> bool:
        """Whether weights and averages are swapped now."""
        return bool(getattr(self._swapper, "_ema_weights_in_model", False))

    def unshare(self) -> None:
        """Copies averages that share an array with their weight, after a fit: jax refuses to donate one array twice."""
        for weight, average in self._pairs:
            if average._value is weight._value is not None:
                average.assign(jnp.copy(average.value))

    def before_epoch_end(self) -> None:
        """Keeps the trained weights before the end of the last epoch overwrites them with averages."""
        self._trained = [weight.value for weight, _ in self._pairs] if self._swapper else []

    @contextlib.contextmanager
    def as_saved(self) -> Generator[None]:
        """Inside the block the averages' variables hold the trained weights, if they were swapped."""
        if not self.swapped or not self._trained:
            yield
            return
        now = [average.value for _, average in self._pairs]
        try:
            for (_, average), value in zip(self._pairs, self._trained, strict=True):
                average.assign(value)
            yield
        finally:
            for (_, average), value in zip(self._pairs, now, strict=True):
                average.assign(value)
            self._trained = []

    def restored(self, *, swapped: bool, trains: bool) -> None:
        """Has the trained weights of a restored state in the model, also where Ctrl-C left a callback in the middle of its
        swap. If no epoch follows, the end of fit copies the averages' variables into the model, as after the last one.
        """
        for swapper in self._swappers:
            swapper._ema_weights_in_model = False
        for weight, average in self._pairs if swapped else ():
            trained, averaged = average.value, weight.value
            average.assign(averaged)
            if trains:
                weight.assign(trained)
        if not trains:
            self.unshare()
