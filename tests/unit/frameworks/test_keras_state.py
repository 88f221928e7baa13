"""Keras objects as items: every variable saved, every one found again. Numbers: the issue's cases."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_keras import ADAPTER
from ckpt_keras._slots import slots_of_model
from tests.support import keras_models as km

keras = km.keras
compiled_once = km.compiled_once

# Variable.numpy() of Keras 3.15 does not know of numpy 2's copy=
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

layers = keras.layers


def round_trip(tmp_path, model, other, **arguments):
    """Saves one model, restores the other, and gives the report."""
    ckpt.save(tmp_path / "step", model=model)
    return ckpt.restore(tmp_path / "step", model=other, **arguments).report


def functional(*outputs, **names):
    inputs = keras.Input((4,))
    return inputs, [make(inputs) for make in outputs]


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
    other = km.mlp(1)
    assert {s.variable.path for s in slots_of_model(other)} >= {v.path for v in other.variables}


def test_second_model_of_one_process_with_other_automatic_names(tmp_path):
    model, other = km.mlp(0), km.mlp(1)
    km.scramble(model)
    assert [v.path for v in model.variables] != [v.path for v in other.variables]
    report = round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    loaded = [path for path in report.loaded if "metrics_variables" not in path]
    assert len(loaded) == len(km.values(model))
    assert not report.missing and not report.unexpected


def test_shifted_names_that_overlap_do_not_land_in_the_wrong_layer(tmp_path):
    """dense_1 of one is dense of the other: half of the names are there, for other layers."""

    def chain(shift):
        keras.backend.clear_session()
        for _ in range(shift):
            layers.Dense(1)
        keras.utils.set_random_seed(shift)
        return keras.Sequential([keras.Input((4,)), *(layers.Dense(4) for _ in range(3))])

    model, other = chain(0), chain(1)
    shared = {v.path.partition("/")[2] for v in model.variables}
    shared &= {v.path.partition("/")[2] for v in other.variables}
    assert shared
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))


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
QUICK = ("adafactor", "accumulation")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS],
)
def test_every_optimizer_goes_on_bitwise(tmp_path, name):
    """Saved after an epoch, restored into a model of other names, and trained on: the same bits."""
    model = km.small(0, OPTIMIZERS[name]())
    km.fit(model, shuffle=False)
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


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_slot_of_every_optimizer_is_saved(tmp_path, name):
    model, other = km.small(0, OPTIMIZERS[name]()), km.small(1, OPTIMIZERS[name]())
    km.scramble(model)
    report = round_trip(tmp_path, model, other)
    assert len([p for p in report.loaded if "metrics_variables" not in p]) == len(km.values(model))
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
    paths = [slot.text for slot in slots_of_model(model)]
    assert len(set(paths)) == len(paths)
    assert any(path.endswith("d/kernel") for path in paths) and any(
        "d@2" in p or "kernel@2" in p for p in paths
    )
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))


def test_the_same_metric_of_two_outputs_comes_back_for_each(tmp_path):
    def make(seed):
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((4,))
        outputs = {"a": layers.Dense(2, name="a")(inputs), "b": layers.Dense(2, name="b")(inputs)}
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse", metrics={"a": ["mae"], "b": ["mae"]})
        return model

    model, other = make(0), make(1)
    x, y = km.data()
    for each in (model, other):
        each.fit(x, {"a": y, "b": y}, verbose=0)
    assert km.differ(km.values(model, metrics=True), km.values(other, metrics=True))
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model, metrics=True), km.values(other, metrics=True))


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


def test_a_model_with_lora_since_the_save_is_refused_and_takes_what_it_had(tmp_path):
    model = frozen(0, trainable=True)
    other = frozen(1, trainable=True)
    ckpt.save(tmp_path / "step", model=model)
    other.get_layer("head").enable_lora(2)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "step", model=other)
    assert "lora" in str(caught.value)
    ckpt.restore(tmp_path / "step", model=other, missing="keep", only=["*trainable_variables/**"])
    for name in ("base", "head"):
        a, b = model.get_layer(name), other.get_layer(name)
        km.assert_same([np.array(a.bias.value)], [np.array(b.bias.value)])
    km.assert_same(
        [model.get_layer("head").kernel.numpy()], [other.get_layer("head")._kernel.numpy()]
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


def test_an_unbuilt_model_is_refused_by_name():
    model = keras.Sequential([layers.Dense(2)], name="nothing_yet")
    with pytest.raises(ckpt.CheckpointError, match=r"nothing_yet.*not built"):
        ADAPTER.get_state(model)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "bfloat16"]
)
def test_precision_policies_come_back_bitwise(tmp_path, policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, other = km.mlp(0), km.mlp(1)
        km.scramble(model)
    finally:
        keras.config.set_dtype_policy(before)
    if policy == "mixed_float16":
        assert any("loss_scale" in slot.text for slot in slots_of_model(model))
    round_trip(tmp_path, model, other)
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


def test_a_second_optimizer_is_found(tmp_path):
    @keras.saving.register_keras_serializable("ckpt_tests")
    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.g, self.d = layers.Dense(4), layers.Dense(1)
            self.d_optimizer = keras.optimizers.SGD(momentum=0.9)

        def build(self, shape):
            self.g.build(shape)
            self.d.build((None, 4))
            self.d_optimizer.build(self.d.trainable_variables)
            self.built = True

        def call(self, x):
            return self.d(self.g(x))

    def make(seed):
        keras.utils.set_random_seed(seed)
        model = Gan()
        model.build((None, 4))
        model.compile("adam", "mse")
        return model

    model, other = make(0), make(1)
    gradients = [np.ones(v.shape, "f4") for v in model.d.trainable_variables]
    model.d_optimizer.apply(gradients, model.d.trainable_variables)
    round_trip(tmp_path, model, other)
    km.assert_same(
        [np.array(v.value) for v in model.d_optimizer.variables],
        [np.array(v.value) for v in other.d_optimizer.variables],
    )
    assert int(other.d_optimizer.iterations) == 1


def test_shared_layers_and_nested_models_come_back(tmp_path):
    def make(seed):
        keras.utils.set_random_seed(seed)
        shared = layers.Dense(4)
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dropout(0.2)])
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(2)(inner(shared(shared(inputs)))))
        model.compile("adam", "mse")
        return model

    model, other = make(0), make(1)
    km.scramble(model)
    report = round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    kernels = [p for p in report.loaded if p.endswith("kernel") and "trainable" in p]
    assert len(kernels) == 3  # the shared one once


def test_another_architecture_is_named_and_changes_nothing(tmp_path):
    def make(width, name):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(width, name=name)], name="net")
        model.compile(keras.optimizers.Adam(name="adam"), "mse")
        return model

    model, other, renamed = make(4, "wide"), make(3, "wide"), make(3, "narrow")
    ckpt.save(tmp_path / "step", model=model)
    before = km.values(other)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "step", model=other)
    text = str(caught.value)
    assert "wide/kernel" in text and "[4,4]" in text and "[4,3]" in text
    km.assert_same(before, km.values(other))
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.restore(tmp_path / "step", model=renamed)
    assert "wide/kernel" in str(caught.value) and "narrow/kernel" in str(caught.value)


def test_adapted_normalization_and_recurrent_states_come_back(tmp_path):
    x = np.random.default_rng(1).random((8, 3, 4)).astype("f4")

    def make(seed, adapt):
        keras.utils.set_random_seed(seed)
        norm = layers.Normalization()
        norm.adapt(x * adapt)
        model = keras.Sequential(
            [keras.Input(batch_shape=(8, 3, 4)), norm, layers.GRU(4, stateful=True)]
        )
        model.compile("sgd", "mse")
        return model

    model, other = make(0, 1.0), make(1, 5.0)
    model.predict(x, verbose=0)  # moves the recurrent state
    round_trip(tmp_path, model, other)
    km.assert_same(km.values(model), km.values(other))
    km.assert_same([model.predict(x, verbose=0)], [other.predict(x, verbose=0)])


def test_parts_of_a_model_are_items_too(tmp_path):
    optimizer, other = keras.optimizers.Adam(), keras.optimizers.Adam()
    weight = keras.Variable(np.ones((2, 2), "f4"), name="w")
    for each in (optimizer, other):
        each.build([weight])
    optimizer.apply([np.ones((2, 2), "f4")], [weight])
    seed, metric, layer = keras.random.SeedGenerator(3), keras.metrics.Mean(), layers.Dense(2)
    layer.build((None, 3))
    metric.update_state([1.0, 2.0])
    ckpt.save(
        tmp_path / "step", optimizer=optimizer, weight=weight, seed=seed, mean=metric, layer=layer
    )
    targets = {
        "optimizer": other,
        "weight": keras.Variable(np.zeros((2, 2), "f4"), name="v"),
        "seed": keras.random.SeedGenerator(4),
        "mean": keras.metrics.Mean(),
        "layer": layers.Dense(2),
    }
    targets["layer"].build((None, 3))
    ckpt.restore(tmp_path / "step", **targets)
    km.assert_same(
        [np.array(v.value) for v in optimizer.variables], [v.numpy() for v in other.variables]
    )
    assert targets["weight"].numpy().tolist() == weight.numpy().tolist()
    assert targets["seed"].state.numpy().tolist() == seed.state.numpy().tolist()
    assert float(targets["mean"].result()) == 1.5
    km.assert_same(
        [np.array(v.value) for v in layer.variables],
        [v.numpy() for v in targets["layer"].variables],
    )


def test_optimizer_slots_are_made_before_they_are_saved_or_restored(tmp_path):
    """load_weights leaves the slots of a compiled, untrained model at zero without a word."""
    model, other = km.mlp(0), km.mlp(1)
    km.scramble(model)
    assert not other.optimizer.built
    round_trip(tmp_path, model, other)
    assert other.optimizer.built
    assert float(np.abs(np.array(other.optimizer.variables[2].value)).sum()) > 0
    km.assert_same(km.values(model), km.values(other))
