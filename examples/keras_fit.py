"""Trains Keras on handwritten digits: killed in mid-epoch and resumed, it ends with the same bits.

::

    python examples/keras_fit.py                          # the demonstration, about a minute
    python examples/keras_fit.py --directory runs/digits  # a training; start it again to continue

The demonstration trains once without a stop, and once in a process that is killed (SIGKILL, without
any clean-up) and started again. It compares every weight, optimizer slot and random seed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported


def train(directory: str, epochs: int, save_freq: int, kill_at: int) -> None:
    """Trains in this process, from the newest step in the directory if there is one."""
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

    class Kill(keras.callbacks.Callback):
        """Kills this process at one step, like a machine that loses power."""

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            if kill_at and int(self.model.optimizer.iterations) == kill_at:
                checkpoint.wait_until_finished()  # so that the demonstration resumes at this step
                print(f"killed after {kill_at} batches", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = OrbaxCheckpointCallback(directory, save_freq=save_freq, track=[plateau], verbose=1)
    callbacks = [checkpoint, plateau, *([Kill()] if kill_at else [])]
    model.fit(
        x,
        y,
        epochs=epochs,
        batch_size=64,
        validation_split=0.2,
        verbose=2,
        callbacks=callbacks,
    )
    digest = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        digest.update(keras.ops.convert_to_numpy(variable.value).tobytes())
    print(f"fingerprint {digest.hexdigest()}")


def start(directory: Path, epochs: int, save_freq: int, kill_at: int = 0) -> str:
    """Runs a training in a new process and returns what it printed."""
    command = [sys.executable, __file__, "--directory", str(directory), "--epochs", str(epochs)]
    command += ["--save-freq", str(save_freq), "--kill-at", str(kill_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    expected = -signal.SIGKILL if kill_at else 0
    if done.returncode != expected:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    print(done.stdout, end="")
    return done.stdout.splitlines()[-1]


def demonstrate(epochs: int, save_freq: int) -> None:
    """Trains without a stop, and killed and resumed; both fingerprints must be equal."""
    with tempfile.TemporaryDirectory() as folder:
        print("--- without a stop")
        straight = start(Path(folder) / "straight", epochs, save_freq)
        print("--- killed in the middle of the second epoch")
        start(Path(folder) / "stopped", epochs, save_freq, kill_at=35)
        print("--- started again")
        resumed = start(Path(folder) / "stopped", epochs, save_freq)
    if straight != resumed:
        raise SystemExit(f"not the same: {straight} and {resumed}")
    print("--- the same weights, optimizer state and random seeds, bit for bit")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", help="train here; without it, the demonstration")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-freq", type=int, default=10, help="batches between saves")
    parser.add_argument("--kill-at", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.directory is None:
        demonstrate(given.epochs, given.save_freq)
    else:
        train(given.directory, given.epochs, given.save_freq, given.kill_at)


if __name__ == "__main__":
    main()
