"""Measures how long callbacks block training, ckpt's and Keras' own in turn: python benchmarks/keras_callback.py

Blocking per save is the time inside the callback's methods, summed over one
epoch. *First* is a save while no other is running, *pending* one that starts while the previous one
is still running; ``on_train_end`` is shown separately. Step time is that of ``fit`` with and without
the callback, by epoch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import middle, options, timed  # isort: skip

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


def clocked(callback: Any) -> tuple[Any, list[float], list[float]]:
    """The callback, with its methods at the end of an epoch and of training timed."""

    def watch(name: str) -> list[float]:
        method, seconds = getattr(callback, name), list[float]()

        def call(*arguments: Any, **named: Any) -> None:
            seconds.append(timed(lambda: method(*arguments, **named))[0])

        setattr(callback, name, call)
        return seconds

    return callback, watch("on_epoch_end"), watch("on_train_end")


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
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            for label, make in callbacks(Path(name)).items():
                callback, epochs, ends = clocked(make())
                settings = {"batch_size": len(data[0]), "epochs": saves, "verbose": 0}
                model.fit(*data, **settings, callbacks=[callback])
                found.setdefault(label, []).append((epochs[0], middle(epochs[1:]), ends[0]))
    names = ("first_secs", "pending_secs", "end_secs")
    return {
        label: dict(zip(names, map(middle, zip(*runs, strict=True)), strict=True))
        for label, runs in found.items()
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
    ratios = {
        label: [mine / bare for mine, bare in zip(values, found["none"], strict=True)]
        for label, values in found.items()
    }
    return {
        label: {
            "micros": middle(values),
            "ratio": middle(ratios[label]),
            "lowest_ratio": min(ratios[label]),
            "highest_ratio": max(ratios[label]),
        }
        for label, values in found.items()
    }


def main() -> None:
    given = options(
        __doc__, directory=False, width=2048, layers=4, rounds=5, step_rounds=15, saves=4, steps=500
    )
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
