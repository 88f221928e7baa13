"""Saves and restores one training in one directory."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

from ckpt_core import (
    Checkpointer,
    CheckpointError,
    CheckpointExists,
    CheckpointInfo,
    Restored,
    StructureMismatch,
)
from ckpt_keras import _tracked
from ckpt_keras._arguments import Arguments
from ckpt_keras._assets import saved_beside
from ckpt_keras._config import ConfigItem, config_item
from ckpt_keras._data import FitData
from ckpt_keras._host import HOST, OfProcess, process_count
from ckpt_keras._items import Contents, contents_of, model_items, model_targets
from ckpt_keras._progress import Progress

logger = logging.getLogger("ckpt_keras")

_PLURAL = {"epoch": "epochs", "batch": "batches"}

_RUNNING: dict[str, Session] = {}
"""Directory -> session of each fit that has not ended. After Ctrl-C, a fit is not noticed as ended
while a traceback refers to it (in a notebook, for example), and its last save may still be running:
the next fit in that directory must find it."""


class Session:
    """Saves and restores for the callback; does not depend on the events of ``fit``.

    Args:
        arguments: the arguments of the callback.
        model: the model that is trained.
    """

    def __init__(self, arguments: Arguments, model: Any) -> None:
        self._arguments = arguments
        self._config: ConfigItem | None = None
        self._stale: frozenset[int] = frozenset()
        self._unfinished: int | None = None
        self.closed = False
        self.failure: Exception | None = None
        self._closing = threading.RLock()
        self._processes = 1 if arguments.host_only else process_count()
        self._place = place_of(arguments.directory)
        before = _RUNNING.get(self._place)
        if before is not None:
            before.abandon()
        if "://" not in self._place and not os.path.lexists(self._place):
            os.makedirs(self._place, exist_ok=True)  # even if nothing will be saved
        self.checkpointer = Checkpointer(
            arguments.directory,
            keep_policy=arguments.keep_policy(model),
            asynchronous=arguments.save_on_background,
            options=arguments.options,
        )
        _RUNNING[self._place] = self

    def close(self) -> None:
        """Waits for a running save and closes the session; raises the save's error.

        If Ctrl-C ends the wait, the session is still open, and may be closed again.
        """
        with self._closing:
            try:
                self.checkpointer.close()
            except Exception:
                self._closed()
                raise
            self._closed()

    def _closed(self) -> None:
        self.closed = True
        if _RUNNING.get(self._place) is self:
            del _RUNNING[self._place]

    def abandon(self) -> None:
        """Closes the session of a fit that an exception ended; logs a failure of its last save."""
        # Another thread may have noticed the end of the fit, and be waiting for the save.
        with self._closing:
            if self.closed:
                return
            try:
                self.close()
            except Exception as error:  # that step is lost; earlier ones remain
                self.failure = error
                directory = self.checkpointer.directory
                logger.warning(
                    "%s: the last save of an interrupted fit failed: %s", directory, error
                )

    def wait_until_closed(self) -> None:
        """Waits until the session of an interrupted fit is closed; raises its last save's error once."""
        self.abandon()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    # --------------------------------------------------------------------------------- save

    def save(
        self,
        model: Any,
        progress: Progress,
        data: FitData,
        metrics: Mapping[str, float],
        host: Mapping[str, Any],
    ) -> None:
        """Starts a save of everything; waits for it if the callback was asked to.

        Args:
            model, progress, data: what is saved.
            metrics: the values by which steps are compared.
            host: the fields of ``progress`` that belong to this process alone.

        Raises:
            Exception: the error of the previous save.
        """
        started = time.perf_counter()
        step = self._step(progress)
        weights_only = self._arguments.save_weights_only
        vars(progress).update({name: {} for name in host} if self._processes > 1 else host)
        progress.callbacks = _tracked.states_of(self._arguments.track)
        if not weights_only and self._config is None:
            # Once: Keras needs longer for it than a save takes, and it does not change during fit.
            self._config = config_item(model)
        with saved_beside():
            items = model_items(model, weights_only=weights_only, config=self._config)
        items |= {"fit": progress, **self._arguments.extra}
        if self._processes > 1:
            items[HOST] = OfProcess(dict(host), self._processes)
        if data.given:
            items["data"] = data.item(progress.batches, between_epochs=progress.batch == 0)
        again = step in self._stale or step == self._unfinished
        with saved_beside():
            self.checkpointer.save(step, items=items, metrics=metrics, force=True, overwrite=again)
        self._unfinished = step if progress.batch else None
        if self._arguments.verbose:
            blocked = time.perf_counter() - started
            how = "saving" if self._arguments.save_on_background else "saved"
            directory = self.checkpointer.directory
            print(f"\n{_where(progress)}: {how} step {step} to {directory} ({blocked:.3f} s)")

    def took_for_unfinished(self, progress: Progress) -> bool:
        """Whether this state was saved as mid-epoch, although the epoch then turned out to be over."""
        return progress.batch == 0 and self._unfinished == self._step(progress)

    def is_wanted(self, progress: Progress) -> bool:
        """Whether the step at the end of an epoch is to be saved."""
        interval = self._arguments.save_interval_steps
        return interval is None or self._step(progress) % interval == 0

    def _step(self, progress: Progress) -> int:
        if progress.unit == "batch":
            return progress.batches
        # An interrupted epoch gets the number that the complete epoch will have.
        epoch = progress.epoch if progress.batch else progress.epoch - 1
        return (progress.first_step + epoch) * self._arguments.steps_per_epoch

    # ------------------------------------------------------------------------------ restore

    def restore(self, model: Any, data: FitData, batches_per_epoch: int | None) -> Progress | None:
        """Restores the newest complete step into the model; None if the directory is empty.

        Raises:
            CheckpointExists: there are steps, and the callback was told not to restore.
            StructureMismatch: the checkpoint is of another model; nothing was changed.
            CheckpointCorrupt: there are steps, and none can be loaded.
        """
        self.checkpointer.wait_until_finished()  # a save of a fit that an exception ended
        steps = self.checkpointer.all_steps()
        if not steps:
            return None
        if not self._arguments.restore:
            raise CheckpointExists(
                f"{self.checkpointer.directory} has the steps {', '.join(map(str, steps[-5:]))}, and restore=False "
                "says not to go on from them: use another directory, or leave restore= away"
            )
        restored, contents, progress = self._newest(steps, model, data)
        assert restored.step is not None
        if not contents.has_progress:
            progress = _progress_of_step(restored.step, self._arguments, batches_per_epoch)
        elif data.given:
            data.restored()
        self._check_unit(progress)
        self._stale = frozenset(step for step in steps if step > restored.step)
        self._unfinished = restored.step if progress.batch else None
        self._tell(restored.step, progress, contents)
        return progress

    def _newest(
        self, steps: list[int], model: Any, data: FitData
    ) -> tuple[Restored, Contents, Progress]:
        progress, host = Progress(unit=self._arguments.unit), OfProcess({}, 1)
        info = self._inspect(steps)
        contents = contents_of(info)
        with saved_beside():
            targets = model_targets(model, contents, info, self._arguments.options)
            if contents.has_progress:
                targets |= {"fit": progress, **self._arguments.extra}
                targets |= {HOST: host} if HOST in contents.others else {}
                if data.given:
                    targets["data"] = data.target()
            only = contents.only_weights() if contents.weights_only else None
            try:
                restored = self.checkpointer.restore_latest(items=targets, only=only)
            except StructureMismatch as error:
                error.add_note(
                    "ckpt_keras: missing=, unexpected= and rename= are arguments of ckpt_keras.restore. To train the weights "
                    f"alone on: ckpt_keras.restore({self.checkpointer.directory!r}, model, what='weights') before fit, and "
                    "another directory for the callback"
                )
                raise
        assert restored is not None
        vars(progress).update(host.state)
        if HOST in targets and host.count != self._processes:
            self._tell_of_processes(host.count)
        return restored, contents, progress

    def _tell_of_processes(self, saved: int) -> None:
        logger.warning(
            "%s: saved by %d processes, and %d run now: the random state of each host, which shuffles data, goes on as that of "
            "one of them",
            self.checkpointer.directory,
            saved,
            self._processes,
        )

    def _inspect(self, steps: list[int]) -> CheckpointInfo:
        failure: Exception | None = None
        for step in reversed(steps):
            try:
                info = self.checkpointer.inspect(step)
                contents_of(info)
            except (CheckpointError, OSError) as error:  # try an older step, like restore_latest
                failure = failure or error
            else:
                return info
        assert failure is not None
        raise failure

    def _check_unit(self, progress: Progress) -> None:
        wanted = self._arguments.unit
        if progress.unit != wanted:
            raise CheckpointError(
                f"{self.checkpointer.directory}: its steps count {_PLURAL[progress.unit]}, and "
                f"save_freq={self._arguments.save_freq!r} counts {_PLURAL[wanted]}: use the save_freq that it "
                "was written with, or another directory"
            )

    def _tell(self, step: int, progress: Progress, contents: Contents) -> None:
        if contents.weights_only:
            warnings.warn(
                f"{self.checkpointer.directory}: step {step} was saved with save_weights_only=True: training goes on "
                "with a new optimizer state",
                UserWarning,
                stacklevel=4,
            )
        message = (
            f"restored step {step} of {self.checkpointer.directory}: training goes on after "
            f"{_where(progress)}"
        )
        logger.info(message)
        if self._arguments.verbose:
            print(message)


def place_of(directory: str) -> str:
    """The directory under the one name that all spellings of it have."""
    return directory if "://" in directory else os.path.realpath(os.path.expanduser(directory))


def _where(progress: Progress) -> str:
    if progress.batch:
        return f"epoch {progress.epoch + 1}, batch {progress.batch}"
    return f"epoch {progress.epoch}"


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
