"""The suite of ``ckpt_core.testing``, passed by Keras models, optimizers, metrics and generators."""

from typing import Any

import numpy as np

from tests.contract.conformance import CasesSuite, each_of
from tests.support import keras_models as km  # chooses the backend before Keras is imported

keras = km.keras
compiled_once = km.compiled_once
TOKENS = np.arange(32, dtype=np.int32).reshape(4, 8) % 11
TARGETS = np.linspace(-1, 1, 4 * 8, dtype=np.float32).reshape(4, 8)


class Scaled(keras.layers.Layer):
    """Weights, a counter and a random generator of its own; nothing of it has a name by default."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self.scale = self.add_weight(shape=(8,), initializer="ones", name="scale")
        self.calls = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls"
        )
        self.noise = keras.random.SeedGenerator(seed, name="noise")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1)
        noise = keras.random.normal(keras.ops.shape(x), seed=self.noise)
        return x * self.scale + 0.01 * noise


class Shared(keras.Model):
    """A subclassed model: an embedding that two branches share, batch norm, noise, a frozen layer."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="shared")
        self.embed = keras.layers.Embedding(11, 8, name="embed")
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.drop = keras.layers.Dropout(0.25, seed=seed, name="drop")
        self.scaled = Scaled(seed + 1, name="scaled")
        self.frozen = keras.layers.Dense(8, trainable=False, name="frozen")
        self.blocks = [keras.layers.Dense(8, name=f"block_{i}") for i in range(2)]

    def call(self, tokens: Any, training: bool = False) -> Any:
        one, other = self.embed(tokens), self.embed(tokens[:, ::-1])
        x = self.scaled(self.norm(one, training=training) - other)
        for block in self.blocks:
            x = keras.ops.relu(block(self.drop(x, training=training)))
        return keras.ops.mean(self.frozen(x), axis=1)


def make_model(seed: int) -> Any:
    keras.utils.clear_session()  # names that Keras numbers begin anew, and prints have names
    keras.utils.set_random_seed(seed)
    model = Shared(seed)
    model.compile(keras.optimizers.Adam(0.01, name="adam"), "mse")
    model(TOKENS)
    return model


def step_model(model: Any) -> Any:
    return float(model.train_on_batch(TOKENS, TARGETS))


def make_functional(seed: int) -> Any:
    """Two outputs, a stateful GRU, loss scaling, EMA, metrics: all that adds variables."""
    keras.utils.clear_session()  # names that Keras numbers begin anew, and prints have names
    keras.utils.set_random_seed(seed)
    tokens = keras.Input(batch_shape=(4, 8), dtype="int32", name="tokens")
    policy = keras.DTypePolicy("mixed_float16")
    x = keras.layers.Embedding(11, 8, name="embed", dtype=policy)(tokens)
    x = keras.layers.GRU(8, stateful=True, name="gru", dtype=policy)(x)
    x = keras.layers.GaussianNoise(0.1, seed=seed, name="noise")(x)
    first = keras.layers.Dense(8, name="first", dtype="float32")(x)
    second = keras.layers.Dense(1, name="second", dtype="float32")(x)
    model = keras.Model(tokens, {"first": first, "second": second}, name="functional")
    inner = keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True, name="sgd")
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, name="scaled")
    model.compile(optimizer, {"first": "mse", "second": "mae"}, metrics={"first": ["mae", "mse"]})
    step_functional(model)  # makes the metrics' variables
    return model


def step_functional(model: Any) -> Any:
    targets = {"first": TARGETS, "second": TARGETS[:, :1]}
    return [float(value) for value in model.train_on_batch(TOKENS, targets)]


def make_optimizer(seed: int) -> Any:
    optimizer = keras.optimizers.AdamW(0.01 + seed, name="adamw")
    optimizer.build([keras.Variable(np.ones((8, 3), "float32"), name="kernel")])
    return optimizer


def step_optimizer(optimizer: Any) -> Any:
    gradient = keras.ops.full((8, 3), float(optimizer.iterations.value) + 1)
    optimizer.apply([gradient])
    return optimizer.variables[-1].value


def make_metric(seed: int) -> Any:
    metric = keras.metrics.AUC(num_thresholds=9, name="auc")
    metric.update_state([0, 1, 1], [0.1 * seed, 0.4, 0.9])
    return metric


def step_metric(metric: Any) -> Any:
    metric.update_state([0, 1, 1, 0], [0.3, 0.2, 0.8, 0.6])
    return metric.result()


def make_generator(seed: int) -> Any:
    return keras.random.SeedGenerator(seed, name="generator")


def step_generator(generator: Any) -> Any:
    return keras.random.normal((3,), seed=generator)


CASES = {
    "model": (make_model, step_model),
    "functional": (make_functional, step_functional),
    "optimizer": (make_optimizer, step_optimizer),
    "metric": (make_metric, step_metric),
    "generator": (make_generator, step_generator),
}


class TestKeras(CasesSuite):
    case = each_of(CASES)
