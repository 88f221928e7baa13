"""``fit`` on a ``PyDataset(use_multiprocessing=True)``; started by test_keras_resume.py. DIRECTORY STOP: SIGKILL at batch STOP.

The processes that prepare batches import this file, so that it has a main guard.
"""

import os
import signal
import sys
from typing import Any

import numpy as np

from tests.support import keras_models as km
from tests.support.py_datasets import Global


class Killed(km.Callback):
    """Ends the process at a batch, when all that was begun is saved."""

    def __init__(self, kept: Any, left: int) -> None:
        super().__init__()
        self.kept, self.left = kept, left

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.kept.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    model, kept = km.small(1), km.OrbaxCheckpointCallback(sys.argv[1], save_freq=5)
    callbacks = [kept, Killed(kept, int(sys.argv[2]))]
    data = Global(2, use_multiprocessing=True)
    model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    for variable in model.variables + model.optimizer.variables:
        print("bits", np.asarray(variable.value).tobytes().hex())
