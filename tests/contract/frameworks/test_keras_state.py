"""Keras objects as items: every variable saved, every one found again."""

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.support import keras_models as km
from tests.support.keras_models import keras, layers

compiled_once, pytestmark = km.compiled_once, km.QUIET


def round_trip(tmp_path, model, other, **arguments):
    ckpt.save(tmp_path / "step", model=model)
    return ckpt.restore(tmp_path / "step", model=other, **arguments).report


def test_a_sound_model_is_saved_as_keras_own_state_tree(tmp_path):
    model = km.mlp()
    km.scramble(model)
    tree = model.get_state_tree()
    ckpt.save(tmp_path / "step", model=model)
    loaded = ckpt.load(tmp_path / "step")["model"]
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    km.assert_same(
        [*map(np.asarray, jax.tree.leaves(loaded))], [*map(np.asarray, jax.tree.leaves(tree))]
    )


def test_adam_is_adam_7_but_never_sgd(tmp_path):
    model = km.mlp(0, keras.optimizers.Adam(name="adam"))
    km.scramble(model)
    other = km.mlp(1, keras.optimizers.Adam(name="adam_7"))
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    lion = km.mlp(1, keras.optimizers.Lion())
    sgd = km.mlp(2, keras.optimizers.SGD(momentum=0.9))
    before = km.values(sgd)
    ckpt.save(tmp_path / "lion", model=lion)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "lion", model=sgd)
    assert "lion" in str(caught.value) and "sgd" in str(caught.value)
    km.assert_same(before, km.values(sgd))


OPTIMIZERS = {
    "adafactor": lambda: keras.optimizers.Adafactor(),
    "nadam": lambda: keras.optimizers.Nadam(),
    "muon": lambda: keras.optimizers.Muon(),
    "lion": lambda: keras.optimizers.Lion(),
    "ftrl": lambda: keras.optimizers.Ftrl(),
    "ema": lambda: keras.optimizers.Adam(use_ema=True),
    "accumulation": lambda: keras.optimizers.SGD(momentum=0.9, gradient_accumulation_steps=4),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    ),
    "rmsprop": lambda: keras.optimizers.RMSprop(momentum=0.5, centered=True),
    "adamw": lambda: keras.optimizers.AdamW(amsgrad=True),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule_free"] = lambda: keras.optimizers.ScheduleFreeAdamW()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bitwise(tmp_path, name):
    """Saved after an epoch, restored into a model of other names, and trained on: the same bits."""
    model = km.trained(km.small(0, OPTIMIZERS[name]()), shuffle=False)
    ckpt.save(tmp_path / "step", model=model)
    other = km.small(1, OPTIMIZERS[name]())
    ckpt.restore(tmp_path / "step", model=other)
    km.assert_same(km.values(model), km.values(other))
    if name == "ema":
        # the end of fit puts one buffer into weight and average, and Keras' next one donates both
        for average in model.optimizer._model_variables_moving_average:
            average.assign(np.array(average.value))
    km.fit(model, shuffle=False)
    km.fit(other, shuffle=False)
    km.assert_same(km.values(model), km.values(other))


def test_equal_names_of_layers_and_variables_are_distinguished(tmp_path):
    @keras.saving.register_keras_serializable("ckpt_tests")
    class Twins(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.one = layers.Dense(4, name="d")
            self.two = layers.Dense(4, name="d")
            self.inner = layers.Dense(4, name="k")

        def build(self, shape):
            self.k = self.add_weight(name="k", shape=(4,))
            for layer in (self.one, self.two, self.inner):
                layer.build(shape)

        def call(self, x):
            return self.inner(self.two(self.one(x))) * self.k

    def make(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((4,)), Twins(name="twins"), layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    model, other = make(0), make(1)
    with pytest.raises((ValueError, TypeError)):
        model.get_state_tree()
    km.scramble(model)
    report = round_trip(tmp_path, model, other)
    assert len(set(report.loaded)) == len(km.values(model, metrics=True))
    km.assert_same(km.values(model), km.values(other))


def test_metrics_that_do_not_fit_are_left_alone(tmp_path):
    model, other = km.mlp(0, metrics=["mae", "mse"]), km.mlp(1, metrics=["mae"])
    km.fit(model)
    km.fit(other)
    running = [np.array(v.value) for v in other.metrics_variables]
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    km.assert_same(running, [np.array(v.value) for v in other.metrics_variables])


def frozen(seed, *, trainable):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="base"), layers.Dense(2, name="head")], name="net"
    )
    model.get_layer("base").trainable = trainable
    model.compile(keras.optimizers.Adam(name="adam"), "mse")
    return model


@pytest.mark.parametrize("saved_trainable", [True, False])
def test_freezing_moves_no_weight_out_of_sight(tmp_path, saved_trainable):
    model = frozen(0, trainable=saved_trainable)
    other = frozen(1, trainable=not saved_trainable)
    ckpt.save(tmp_path / "step", model=model)
    before = km.values(other)
    with pytest.raises(ckpt.StructureMismatch) as caught:  # the optimizer has other slots now
        ckpt.restore(tmp_path / "step", model=other)
    assert all("optimizer_variables" in m.path for m in caught.value.mismatches)
    km.assert_same(before, km.values(other))
    ckpt.restore(tmp_path / "step", model=other, only=["*trainable_variables/**"])
    km.assert_same(
        [np.array(v.value) for v in model.variables], [v.numpy() for v in other.variables]
    )


def test_uncompiled_model_has_weights_only(tmp_path):
    model, other = km.mlp(0, None), km.mlp(1, None)
    with pytest.raises(AttributeError):
        model.get_state_tree()
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    compiled = km.mlp(2)
    before = km.values(compiled)
    with pytest.raises(ckpt.StructureMismatch, match="adam"):
        ckpt.restore(tmp_path / "step", model=compiled)
    km.assert_same(before, km.values(compiled))


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_precision_policies_come_back_bitwise(tmp_path, policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, other = km.mlp(0), km.mlp(1)
        km.scramble(model)
    finally:
        keras.config.set_dtype_policy(before)
    report = round_trip(tmp_path, model, other)
    assert any("loss_scale" in path for path in report.loaded) == (policy == "mixed_float16")
    km.assert_same(km.values(model), km.values(other))


def test_int8_layers_come_back_bitwise_and_never_as_floats(tmp_path):
    model, other = km.mlp(0, None), km.mlp(1, None)
    float_model = km.mlp(2, None)
    for each in (model, other):
        for layer in each.layers:
            if isinstance(layer, layers.Dense):
                layer.quantize("int8")
    assert any(v.dtype == "int8" for v in model.variables)
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    with pytest.raises(ckpt.StructureMismatch, match="int8"):
        ckpt.restore(tmp_path / "step", model=float_model)


def test_parts_of_a_model_are_items_too(tmp_path):
    """Beside those of the suite of conformance: a weight, a layer."""
    weight, other = (keras.Variable(np.full((2, 2), i, "f4"), name="w") for i in (1, 0))
    layer, fresh = layers.Dense(2), layers.Dense(2)
    for each in (layer, fresh):
        each.build((None, 3))
    ckpt.save(tmp_path / "step", weight=weight, layer=layer)
    ckpt.restore(tmp_path / "step", weight=other, layer=fresh)
    assert other.numpy().tolist() == weight.numpy().tolist()
    km.assert_same(*([np.array(v.value) for v in each.variables] for each in (layer, fresh)))
