"""Saves and restores one training in one directory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from ckpt_core import Checkpointer, CheckpointError, CheckpointExists, StructureMismatch
from ckpt_keras import _items, _progress
from ckpt_keras._arguments import Arguments
from ckpt_keras._data import FitData
from ckpt_keras._progress import FIT, HOST, OfProcess, Progress

logger = logging.getLogger("ckpt_keras")


class Session:
    """The checkpointer of one ``fit``, and what the steps in its directory are."""

    def __init__(self, arguments: Arguments, model: Any) -> None:
        self._arguments = arguments
        self._config: _items.ConfigItem | None = None
        self._stale: frozenset[int] = frozenset()
        self._unfinished: int | None = None
        self.closed = False
        self._failure: Exception | None = None
        self._closing = threading.Lock()
        self.processes = 1 if arguments.host_only else jax.process_count()
        place = place_of(arguments.directory)
        if "://" not in place:  # even if nothing will be saved
            with contextlib.suppress(FileExistsError):  # the Checkpointer looks at what is there
                os.makedirs(place)
        self.checkpointer = Checkpointer(
            arguments.directory,
            keep_policy=arguments.keep_policy(model),
            asynchronous=arguments.save_on_background,
            options=arguments.options,
        )

    def close(self, *, interrupted: bool = False) -> None:
        """Waits for a running save and closes; raises the error of a failed save, once. After an exception ended fit,
        ``interrupted`` only logs it. If Ctrl-C ends the wait, the session is still open.
        """
        with self._closing:  # the thread that trains may be waiting for the save, too
            if not self.closed:
                try:
                    self.checkpointer.close()
                except Exception as error:
                    self._failure = error
                    if interrupted:  # that step is lost; earlier ones remain
                        what = "the last save of an interrupted fit failed"
                        logger.warning("%s: %s: %s", self.checkpointer.directory, what, error)
                self.closed = True
            if self._failure is not None and not interrupted:
                failure, self._failure = self._failure, None
                raise failure

    def save(
        self,
        model: Any,
        progress: Progress,
        data: FitData,
        metrics: Mapping[str, float],
        host: Mapping[str, Any],
    ) -> None:
        """Starts a save; raises the error of the previous one. ``host``: fields of ``progress`` of this process alone."""
        started = time.perf_counter()
        step = progress.step(self._arguments.steps_per_epoch)
        weights_only = self._arguments.save_weights_only
        vars(progress).update({name: {} for name in host} if self.processes > 1 else host)
        progress.callbacks = _progress.states_of(self._arguments.track)
        if not weights_only and self._config is None:
            # Once: Keras needs longer for it than a save takes, and it does not change during fit.
            self._config = _items.config_item(model)
        others: dict[str, Any] = {FIT: progress, **self._arguments.extra}
        if self.processes > 1:
            others[HOST] = OfProcess(dict(host), self.processes)
        if data.given:
            others["data"] = data.item(progress.batches, between_epochs=progress.batch == 0)
        _items.save_with(
            partial(self.checkpointer.save, step),
            model,
            self._config,
            weights_only=weights_only,
            others=others,
            metrics=metrics,
            force=True,
            overwrite=step in self._stale or step == self._unfinished,
        )
        self._unfinished = step if progress.batch else None
        if self._arguments.verbose:
            blocked = time.perf_counter() - started
            how = "saving" if self._arguments.save_on_background else "saved"
            directory = self.checkpointer.directory
            print(f"\n{progress}: {how} step {step} to {directory} ({blocked:.3f} s)")

    def is_wanted(self, progress: Progress) -> bool:
        """Whether the end of an epoch is a step to save: also if it was saved as mid-epoch, and then was the end."""
        step = progress.step(self._arguments.steps_per_epoch)
        interval = self._arguments.save_interval_steps
        by_epoch = progress.unit == "epoch" and (interval is None or step % interval == 0)
        return by_epoch or step == self._unfinished

    def restore(self, model: Any, data: FitData, batches_per_epoch: int | None) -> Progress | None:
        """Restores the newest complete step into the model; None if the directory is empty."""
        directory, steps = self.checkpointer.directory, self.checkpointer.all_steps()
        if steps and not self._arguments.restore:
            raise CheckpointExists(
                f"{directory} has the steps {', '.join(map(str, steps[-5:]))}, and restore=False "
                "says not to go on from them: use another directory, or leave restore= away"
            )
        saved = _items.newest_model(self.checkpointer, steps)
        if saved is None:
            return None
        progress, host = Progress(unit=self._arguments.unit), OfProcess({}, 1)
        others: dict[str, Any] = {}
        if FIT in saved.info.items:
            others = {FIT: progress, **self._arguments.extra}
            others |= {HOST: host} if HOST in saved.info.items else {}
            others |= {"data": data.target()} if data.given else {}
        step = self._restore_latest(model, saved, others)
        vars(progress).update(host.state)
        if HOST in others and host.count != self.processes:
            logger.warning(
                f"{directory}: saved by {host.count} processes, and {self.processes} run now: the random state of each host, "
                "which shuffles data, goes on as that of one of them"
            )
            if progress.dataset:
                progress.dataset["of_other_processes"] = 1
        if FIT not in saved.info.items:  # keras.callbacks.OrbaxCheckpoint saves none
            progress = _progress_of_step(step, self._arguments, batches_per_epoch)
        elif data.given:
            data.restored()
        if progress.unit != self._arguments.unit:
            theirs, ours = ("epochs", "batches")[:: 1 if progress.unit == "epoch" else -1]
            raise CheckpointError(
                f"{directory}: its steps count {theirs}, and save_freq={self._arguments.save_freq!r} counts {ours}: use the "
                "save_freq that it was written with, or another directory"
            )
        self._stale = frozenset(one for one in steps if one > step)
        self._unfinished = step if progress.batch else None
        self._report(step, progress, saved)
        return progress

    def _restore_latest(self, model: Any, saved: _items.SavedModel, others: dict[str, Any]) -> int:
        only = saved.only_weights() if saved.weights_only else None
        options, restore = self._arguments.options, self.checkpointer.restore_latest
        try:
            restored = _items.restore_with(restore, model, saved, options, others=others, only=only)
        except StructureMismatch as error:
            error.add_note(
                "ckpt_keras: missing=, unexpected= and rename= are arguments of ckpt_keras.restore. To train the weights "
                f"alone on: ckpt_keras.restore({self.checkpointer.directory!r}, model, what='weights') before fit, and "
                "another directory for the callback"
            )
            raise
        assert restored is not None
        assert restored.step is not None
        return restored.step

    def _report(self, step: int, progress: Progress, saved: _items.SavedModel) -> None:
        if saved.weights_only:
            warnings.warn(
                f"{self.checkpointer.directory}: step {step} was saved with save_weights_only=True: training goes on "
                "with a new optimizer state",
                UserWarning,
                stacklevel=4,
            )
        message = f"restored step {step} of {self.checkpointer.directory}: training goes on after {progress}"
        logger.info(message)
        if self._arguments.verbose:
            print(message)


def place_of(directory: str) -> str:
    """The directory under the one name that all spellings of it have."""
    return directory if "://" in directory else os.path.realpath(os.path.expanduser(directory))


def _progress_of_step(step: int, arguments: Arguments, batches_per_epoch: int | None) -> Progress:
    """The progress that a step number implies, if Keras' callback or the user saved the step."""
    if arguments.unit == "epoch":
        return Progress(unit="epoch", epoch=step + 1)
    if not batches_per_epoch:
        raise CheckpointError(
            f"{arguments.directory}: step {step} was saved after so many batches by keras.callbacks.OrbaxCheckpoint or by hand, "
            "and how many an epoch has is not known: pass steps_per_epoch to fit"
        )
    epoch, batch = divmod(step, batches_per_epoch)
    return Progress(unit="batch", epoch=epoch, batch=batch, batches=step)
