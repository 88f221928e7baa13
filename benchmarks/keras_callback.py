"""Measures how long Keras callbacks block training: ckpt's and Keras', in one process, in turn.

::

    python benchmarks/keras_callback.py                 # a state of about 200 MB
    python benchmarks/keras_callback.py --width 512     # smaller

Blocking per save is the time inside the callback's methods, summed over one
epoch. *First* is a save while no other is running, *pending* one that starts while the previous one
is still running; ``on_train_end`` is shown separately. Step time is that of ``fit`` with and without
the callback, by epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from ckpt_keras import OrbaxCheckpointCallback


def make_model(width: int, layers: int) -> Any:
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *dense, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def state_bytes(model: Any) -> int:
    variables = [*model.variables, *model.optimizer.variables]
    return sum(int(np.prod(v.shape)) * v.value.dtype.itemsize for v in variables)


def timed(callback: Any) -> tuple[Any, list[float], list[float]]:
    """The callback, with its methods at the end of an epoch and of training timed."""
    epochs: list[float] = []
    ends: list[float] = []

    def clocked(method: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
        def call(*arguments: Any, **named: Any) -> None:
            started = time.perf_counter()
            method(*arguments, **named)
            seconds.append(time.perf_counter() - started)

        return call

    callback.on_epoch_end = clocked(callback.on_epoch_end, epochs)
    callback.on_train_end = clocked(callback.on_train_end, ends)
    return callback, epochs, ends


def callbacks(folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "ckpt": lambda: OrbaxCheckpointCallback(folder / "ckpt", max_to_keep=1),
        "ckpt, waiting": lambda: OrbaxCheckpointCallback(
            folder / "sync", max_to_keep=1, save_on_background=False
        ),
        "OrbaxCheckpoint": lambda: keras.callbacks.OrbaxCheckpoint(folder / "orbax"),
        "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint(folder / "m.keras"),
        "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore(folder / "backup"),
    }


def blocking(model: Any, data: Any, rounds: int, saves: int) -> dict[str, dict[str, float]]:
    """Seconds per save, medians over rounds; every round runs all callbacks in turn."""
    first: dict[str, list[float]] = {}
    pending: dict[str, list[float]] = {}
    end: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            for label, make in callbacks(Path(name)).items():
                callback, epochs, ends = timed(make())
                model.fit(
                    *data, batch_size=len(data[0]), epochs=saves, verbose=0, callbacks=[callback]
                )
                first.setdefault(label, []).append(epochs[0])
                pending.setdefault(label, []).append(statistics.median(epochs[1:]))
                end.setdefault(label, []).append(ends[0])
    return {
        label: {
            "first_secs": statistics.median(first[label]),
            "pending_secs": statistics.median(pending[label]),
            "end_secs": statistics.median(end[label]),
        }
        for label in first
    }


class Clock(keras.callbacks.Callback):
    """Measures the seconds of the steps of one epoch; runs before the other callbacks."""

    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seconds = -time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds += time.perf_counter()


def step_times(rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Step times of a small model that saves once, after the last step of the epoch.

    In microseconds, with the median over rounds of the ratio to ``fit`` without a callback in the same
    round. Each round begins with another callback, so that none always runs first after a pause.
    """
    model = make_model(32, 4)
    x, y = np.ones((steps * 4, 32), "f4"), np.ones((steps * 4, 1), "f4")
    model.fit(x, y, batch_size=4, verbose=0)
    found: dict[str, list[float]] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            made = callbacks(Path(name))
            choices = [("none", None), *(each for each in made.items() if "waiting" not in each[0])]
            first = turn % len(choices)
            for label, make in choices[first:] + choices[:first]:
                clock = Clock()
                extra = [] if make is None else [make()]
                model.fit(x, y, batch_size=4, verbose=0, callbacks=[clock, *extra])
                found.setdefault(label, []).append(clock.seconds / steps * 1e6)
    return {
        label: {
            "micros": statistics.median(values),
            "ratio": statistics.median(
                mine / bare for mine, bare in zip(values, found["none"], strict=True)
            ),
            "lowest_ratio": min(map(float.__truediv__, values, found["none"])),
            "highest_ratio": max(map(float.__truediv__, values, found["none"])),
        }
        for label, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-rounds", type=int, default=15)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    model = make_model(given.width, given.layers)
    data = np.ones((8, given.width), "f4"), np.ones((8, 1), "f4")
    model.fit(*data, verbose=0)
    print(
        f"state: {state_bytes(model) / 1e6:.0f} MB, free: {shutil.disk_usage('/tmp').free / 1e9:.0f} GB"
    )
    result = {
        "blocking": blocking(model, data, given.rounds, given.saves),
        "step": step_times(given.step_rounds, given.steps),
    }
    for label, row in result["blocking"].items():
        print(f"{label:18}", *(f"{name} {secs * 1e3:8.1f} ms" for name, secs in row.items()))
    for label, row in result["step"].items():
        spread = f"{row['lowest_ratio']:.2f} - {row['highest_ratio']:.2f}"
        print(f"{label:18} {row['micros']:8.0f} us a step, {row['ratio']:.2f} of none ({spread})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
