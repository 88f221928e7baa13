"""Trains Keras on handwritten digits: killed in mid-epoch and resumed, it ends with the same bits.

::

    python examples/keras_fit.py                          # the demonstration, about a minute
    python examples/keras_fit.py --directory runs/digits  # a training; start it again to continue

The demonstration trains once without a stop, and once in a process that is killed (SIGKILL, without
any clean-up) and started again. It compares every weight, optimizer slot and random seed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported


def train(directory: Path, report: Callable[..., None] | None) -> Any:
    """Trains in this process, from the newest step in the directory if there is one; returns the model."""
    import keras
    import sklearn.datasets

    from ckpt_keras import OrbaxCheckpointCallback

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    x, y = (images / 16).astype("float32"), labels
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.05)

    class Report(keras.callbacks.Callback):
        """Tells the demonstration of every batch; there, it may kill the process."""

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if report is not None:
                checkpoint.wait_until_finished()  # so that the demonstration resumes at step 30
                report(int(self.model.optimizer.iterations), model=self.model)

    checkpoint = OrbaxCheckpointCallback(directory, save_freq=10, track=[plateau], verbose=1)
    callbacks = [checkpoint, plateau, Report()]
    model.fit(x, y, 64, epochs=3, validation_split=0.2, verbose=2, callbacks=callbacks)
    return model


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="train here; without it, the demonstration")
    directory = parser.parse_args().directory
    if directory is not None:
        train(directory, None)
        return

    from ckpt_core.testing import assert_exact_resume

    # in the middle of the second epoch
    found = assert_exact_resume(train, interrupt_at=35, by="SIGKILL")
    print(
        f"killed after {found.interrupted_at[0]} batches and started again: {found.leaves} values"
    )
    print("of weights, optimizer state and random seeds are the same, bit for bit")


if __name__ == "__main__":
    main()
