"""``fit`` on a ``PyDataset(use_multiprocessing=True)``; started by test_keras_resume.py. DIRECTORY STOP: SIGKILL at batch STOP.

The processes that prepare batches import this file, so that it has a main guard.
"""

import os
import signal
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np


class Batches(keras.utils.PyDataset):
    """Twelve batches, shuffled by itself between epochs."""

    def __init__(self) -> None:
        super().__init__(workers=2, use_multiprocessing=True)
        drawn = np.random.default_rng(0)
        self.x = drawn.random((48, 4)).astype("f4")
        self.y = drawn.random((48, 2)).astype("f4")
        self.order = np.arange(48)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self.order[index * 4 : index * 4 + 4]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        """Called by Keras."""
        np.random.shuffle(self.order)


def main(directory: str, stop: int) -> None:
    """Trains three epochs in all; prints every variable."""
    from ckpt_keras import OrbaxCheckpointCallback

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model: Any = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")

    class Killed(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.seen += 1
            if self.seen == stop:
                kept.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)

    kept = OrbaxCheckpointCallback(directory, save_freq=5)
    model.fit(Batches(), epochs=3, verbose=0, shuffle=False, callbacks=[kept, Killed()])
    for variable in model.variables + model.optimizer.variables:
        print("bits", np.asarray(variable.value).tobytes().hex())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
