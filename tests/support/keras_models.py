"""Small Keras models and data for the tests of ckpt_keras (not a test itself)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import pytest

pytest.importorskip("keras")
import keras
import numpy as np

import ckpt_core as ckpt
import ckpt_keras
from tests.support.compiling import compiled_once as compiled_once  # a fixture

Callback, layers = keras.callbacks.Callback, keras.layers
OrbaxCheckpointCallback, load_model = ckpt_keras.OrbaxCheckpointCallback, ckpt_keras.load_model
# Variable.numpy() of Keras 3.15 does not know of numpy 2's copy=
QUIET = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# Of Keras' own callback and Orbax: event loops left open, sharding from file.
OF_ORBAX = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:Sharding info not provided:UserWarning",
)


class Stop(keras.callbacks.Callback):
    """Ctrl-C before the batch after so many, over all epochs, or in the validation of an epoch."""

    def __init__(self, batches: int | None = None, validation: int | None = None) -> None:
        super().__init__()
        self.batches, self.validation, self.seen, self.epoch = batches, validation, 0, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.seen == self.batches:
            raise KeyboardInterrupt
        self.seen += 1

    def on_test_begin(self, logs: Any = None) -> None:
        if self.epoch == self.validation:
            raise KeyboardInterrupt


def steps(directory: Any) -> list[int]:
    """The steps of a run."""
    return ckpt.Checkpointer(directory, read_only=True).all_steps()


def fill(model: Any) -> Any:
    """Every variable gets a value that says which one it is."""
    for index, variable in enumerate(variables(model, metrics=True)):
        variable.assign(np.full(variable.shape, index + 1, str(variable.dtype)))
    return model


def data(samples: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """The same small regression every time."""
    rng = np.random.default_rng(0)
    return rng.random((samples, 4)).astype("f4"), rng.random((samples, 2)).astype("f4")


def small(
    seed: int = 0,
    optimizer: Any = "adam",
    metrics: Any = ("mae",),
    norm: bool = False,
    **compile: Any,
) -> Any:
    """Two layers and a dropout: what compiles fastest; with ``norm`` a batch norm, too, which has running means."""
    keras.utils.set_random_seed(seed)
    inside = [layers.Dense(3), layers.Dropout(0.3)] + norm * [layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((4,)), *inside, layers.Dense(2)])
    if optimizer is not None:
        model.compile(optimizer, "mse", metrics=list(metrics), **compile)
    return model


def fit(model: Any, callbacks: Sequence[Any] = (), **arguments: Any) -> Any:
    """``fit`` on ``data()`` in 6 batches of 8, in silence."""
    x, y = data()
    settings = {"batch_size": 8, "verbose": 0, "epochs": 1} | arguments
    return model.fit(x, y, callbacks=list(callbacks), **settings)


def trained(model: Any, callbacks: Sequence[Any] = (), **arguments: Any) -> Any:
    fit(model, callbacks, **arguments)
    return model


def goes_on(directory: Path, run: Callable[..., Any], stop: Stop) -> tuple[Any, Any]:
    """The models that ``run(directory, seed, *callbacks)`` trains whole, and stopped and begun again: bit for bit the same."""
    straight = run(directory / "a", 0)
    with pytest.raises(KeyboardInterrupt):
        run(directory / "b", 0, stop)
    resumed = run(directory / "b", 1)
    assert_same(values(straight), values(resumed))
    return straight, resumed


def scramble(model: Any, seed: int = 7) -> None:
    """Gives every variable random values: as good as training, without compiling anything."""
    rng = np.random.default_rng(seed)
    for variable in variables(model, metrics=True):
        noise = rng.integers(0, 100, variable.shape)
        variable.assign(noise if "int" in str(variable.dtype) else noise / 100)


def variables(model: Any, *, metrics: bool = False) -> list[Any]:
    """All variables in Keras' order, the optimizer's included."""
    found = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        found += model.optimizer.variables
    return found + (list(model.metrics_variables) if metrics else [])


def values(model: Any, *, metrics: bool = False) -> list[np.ndarray]:
    """Copies of all variables."""
    return [np.array(variable.value) for variable in variables(model, metrics=metrics)]


def assert_same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    """Bitwise equality of two lists of arrays, of which there must be some."""
    assert len(one) == len(other) > 0
    for position, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, position
        assert a.tobytes() == b.tobytes(), position


def differ(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Whether any array differs."""
    return any(a.tobytes() != b.tobytes() for a, b in zip(one, other, strict=True))
