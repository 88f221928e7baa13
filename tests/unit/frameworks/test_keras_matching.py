"""Which saved variable is which of a live model: by name, or by Keras' own counters, never by guess."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from ckpt_keras._matching import align_model, align_plain
from ckpt_keras._names import Named
from tests.support import keras_models as km

keras, layers = km.keras, km.keras.layers
compiled_once = km.compiled_once

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(autouse=True)
def counters_from_zero():
    keras.backend.clear_session()


def fill(model):
    """Every variable gets a value that says which one it is."""
    for index, variable in enumerate(km.variables(model, metrics=True)):
        variable.assign(np.full(variable.shape, index + 1, str(variable.dtype)))


def by_layer(model, *names):
    """The value of each named layer's kernel."""
    return {name: float(np.array(find(model, name).kernel.value).flat[0]) for name in names}


def find(model, name):
    (layer,) = [each for each in model._flatten_layers() if each.name == name]
    return layer


def slots(model, role="_momentums"):
    """The value of each weight's slot, by the path of the weight."""
    optimizer = model.optimizer
    pairs = zip(optimizer._trainable_variables, getattr(optimizer, role), strict=True)
    owners = {id(v): i for i, v in enumerate(model.trainable_variables)}
    return {owners[id(weight)]: float(np.array(slot.value).flat[0]) for weight, slot in pairs}


def towers(first, second, *, optimizer="adam", wrap=lambda layer: layer):
    a, b = keras.Input((8,)), keras.Input((8,))
    one, two = wrap(layers.Dense(4, name=first)), wrap(layers.Dense(4, name=second))
    model = keras.Model([a, b], layers.Dot(1)([one(a), two(b)]))
    model.compile(optimizer, "mse")
    return model


def inner(name, kind, layer="d"):
    """A model with one layer, whose name is the same in all of them."""
    inputs = keras.Input((8,))
    dense = layers.Dense(4, name=layer)
    if kind == "sequential":
        return keras.Sequential([inputs, dense], name=name)
    return keras.Model(inputs, dense(inputs), name=name)


def nested(kind, *names, optimizer="adam"):
    inputs = keras.Input((8,))
    parts = [inner(name, kind) for name in names]
    model = keras.Model(inputs, layers.Add()([part(inputs) for part in parts]))
    model.compile(optimizer, "mse")
    return model


def saved(tmp_path, model):
    fill(model)
    path = ckpt_keras.save(tmp_path / "run", model, step=0)
    keras.backend.clear_session()
    return path


# --------------------------------------------------------------------------- names of one's own


SLOW = pytest.mark.slow


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adafactor", marks=SLOW)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("user", "item"), ("product", "user")),
        (("user", "item"), ("first", "second")),
        (("zebra", "ant"), ("yak", "bee")),
        (("tower_1", "tower_2"), ("tower_2", "tower_3")),
        (("tower_0", "tower_1"), ("tower_1", "tower_2")),
        (("dense_a", "dense_b"), ("dense_b", "dense_c")),
    ],
)
def test_a_renamed_layer_is_refused_by_both_names(tmp_path, before, after, optimizer):
    """The example: with positions, ``user`` silently had the weights of ``item``."""
    saved(tmp_path, towers(*before, optimizer=optimizer))
    other = towers(*after, optimizer=optimizer)
    values = km.values(other)
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt_keras.restore(tmp_path / "run", other)
    for name in set(before) ^ set(after):
        assert f"{name}/kernel" in str(caught.value)
    km.assert_same(values, km.values(other))


def test_what_both_sides_have_keeps_its_own_when_the_rest_is_allowed_to_differ(tmp_path):
    model = towers("user", "item")
    saved(tmp_path, model)
    other = towers("product", "user")
    fresh = by_layer(other, "product")
    report = ckpt_keras.restore(
        tmp_path / "run", other, what="weights", missing="keep", unexpected="ignore"
    ).report
    assert by_layer(other, "user") == by_layer(model, "user")
    assert by_layer(other, "product") == fresh
    missing = {path.rpartition("variables/")[2] for path in report.missing}
    assert missing == {"product/bias", "product/kernel"}


@pytest.mark.parametrize("optimizer", ["adam", "adafactor", pytest.param("nadam", marks=SLOW)])
def test_layers_in_another_order_keep_their_own(tmp_path, optimizer):
    model = towers("user", "item", optimizer=optimizer)
    saved(tmp_path, model)
    other = towers("item", "user", optimizer=optimizer)
    ckpt_keras.restore(tmp_path / "run", other)
    assert by_layer(other, "user", "item") == by_layer(model, "user", "item")
    role = {"adafactor": "_v"}.get(optimizer, "_momentums")
    mine, theirs = slots(model, role), slots(other, role)
    assert [theirs[i] for i in (2, 3, 0, 1)] == [mine[i] for i in range(4)]


def test_a_third_name_of_ones_own_in_the_middle_does_not_shift_the_rest(tmp_path):
    def chain(*names):
        return keras.Sequential(
            [keras.Input((4,)), *(layers.Dense(4, name=n) for n in names)], name="chain"
        )

    saved(tmp_path, chain("a", "b", "c"))
    with pytest.raises(ckpt.StructureMismatch, match="x/kernel"):
        ckpt_keras.restore(tmp_path / "run", chain("a", "x", "b"))


# -------------------------------------------------------------------------------- nested models


@pytest.mark.parametrize("kind", ["sequential", "functional"])
@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_one_layer_name_in_two_models(tmp_path, kind, optimizer):
    model = nested(kind, "users", "items", optimizer=optimizer)
    saved(tmp_path, model)
    other = nested(kind, "items", "users", optimizer=optimizer)
    ckpt_keras.restore(tmp_path / "run", other)
    mine, theirs = km.values(model)[:4], km.values(other)[:4]
    km.assert_same([*mine[2:], *mine[:2]], theirs)
    role = "_momentums" if optimizer == "adam" else "_v"
    before, after = slots(model, role), slots(other, role)
    assert [after[i] for i in (2, 3, 0, 1)] == [before[i] for i in range(4)]
    keras.backend.clear_session()
    with pytest.raises(ckpt.StructureMismatch):
        ckpt_keras.restore(tmp_path / "run", nested(kind, "items", "products"))


@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_nested_models_without_names_of_their_own_are_counted(tmp_path, kind):
    model = nested(kind, None, None)
    saved(tmp_path, model)
    for _ in range(3):
        inner(None, kind, None)  # moves all counters
    other = nested(kind, None, None)
    assert [v.path for v in other.variables] != [v.path for v in model.variables] or (
        kind == "functional"  # layers have their own names there, models' are in no path
    )
    ckpt_keras.restore(tmp_path / "run", other)
    km.assert_same(km.values(model), km.values(other))


@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_a_model_from_a_configuration_leaves_names_out(tmp_path, kind):
    """``from_config`` drops the names of Sequential models from paths: those of layers decide."""
    model = nested(kind, "users", "items")
    saved(tmp_path, model)
    loaded = ckpt_keras.load_model(tmp_path / "run")
    km.assert_same(km.values(model), km.values(loaded))
    ckpt_keras.save(tmp_path / "again", loaded, step=0)
    keras.backend.clear_session()
    by_code = nested(kind, "users", "items")  # and back
    ckpt_keras.restore(tmp_path / "again", by_code)
    km.assert_same(km.values(model), km.values(by_code))
    keras.backend.clear_session()
    swapped = nested(kind, "items", "users")
    ckpt_keras.restore(tmp_path / "again", swapped)
    mine = km.values(model)[:4]
    km.assert_same([*mine[2:], *mine[:2]], km.values(swapped)[:4])


def test_as_many_layers_in_other_models_are_refused(tmp_path):
    """Three layers in two models, two and one: as many as one and two, and not the same."""

    def make(first, second):
        inputs = keras.Input((4,))
        one = keras.Sequential([layers.Dense(4) for _ in range(first)])
        two = keras.Sequential([layers.Dense(4) for _ in range(second)])
        return keras.Model(inputs, two(one(inputs)))

    saved(tmp_path, make(2, 1))
    for _ in range(2):
        keras.Sequential([layers.Dense(1)])
    with pytest.raises(ckpt.StructureMismatch):
        ckpt_keras.restore(tmp_path / "run", make(1, 2))


def test_a_model_of_another_name_is_the_same_model(tmp_path):
    """The name of the model itself distinguishes no layers."""

    def make(name, *names):
        parts = [layers.Dense(4, name=n) for n in names]
        model = keras.Sequential([keras.Input((4,)), *parts, layers.Dropout(0.1)], name=name)
        model.compile("adam", "mse")
        return model

    model = make("first", "a", "b")
    saved(tmp_path, model)
    other = make("second", "a", "b")
    ckpt_keras.restore(tmp_path / "run", other)
    km.assert_same(km.values(model), km.values(other))
    keras.backend.clear_session()
    with pytest.raises(ckpt.StructureMismatch, match="c/kernel"):
        ckpt_keras.restore(tmp_path / "run", make("second", "a", "c"))


# ----------------------------------------------------------- shared layers, wrappers, own classes


class Block(layers.Layer):
    """Names what it holds after itself, as many do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, name=f"{self.name}_proj")
        self.norm = layers.LayerNormalization()

    def build(self, shape):
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, x):
        return self.norm(self.inner(x))


def stack(make, count, width=4):
    inputs = keras.Input((3, width))
    x = inputs
    for layer in [make(index) for index in range(count)]:
        x = layer(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


WRAPPED = {
    "bidirectional": lambda i: layers.Bidirectional(layers.LSTM(2, return_sequences=True)),
    "time": lambda i: layers.TimeDistributed(layers.Dense(4)),
    "spectral": lambda i: layers.SpectralNormalization(layers.Dense(4)),
    "attention": lambda i: Attend(),
    "block": lambda i: Block(),
    "dropout": lambda i: layers.Dropout(0.1),
    "batch_norm": lambda i: layers.BatchNormalization(),
}


class Attend(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 2, dropout=0.1)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


@pytest.mark.parametrize(
    "kind",
    [k if k in ("bidirectional", "block") else pytest.param(k, marks=SLOW) for k in WRAPPED],
)
def test_what_keras_counts_is_matched_by_its_counters(tmp_path, kind):
    model = stack(WRAPPED[kind], 2)
    saved(tmp_path, model)
    for _ in range(9):  # dense_10 comes after dense_9
        stack(WRAPPED[kind], 1)
    other = stack(WRAPPED[kind], 2)
    assert [v.path for v in other.variables] != [v.path for v in model.variables]
    report = ckpt_keras.restore(tmp_path / "run", other).report
    assert report.missing == report.unexpected == ()
    km.assert_same(km.values(model), km.values(other))
    keras.backend.clear_session()
    if kind != "dropout":
        with pytest.raises(ckpt.StructureMismatch):
            ckpt_keras.restore(tmp_path / "run", stack(WRAPPED[kind], 3))


def test_a_shared_layer_and_two_of_their_own(tmp_path):
    def make(shared):
        a, b = keras.Input((4,)), keras.Input((4,))
        one = layers.Dense(4, name="one")
        two = one if shared else layers.Dense(4, name="two")
        return keras.Model([a, b], layers.Dot(1)([one(a), two(b)]))

    saved(tmp_path, make(True))
    with pytest.raises(ckpt.StructureMismatch, match="two/kernel"):
        ckpt_keras.restore(tmp_path / "run", make(False))
    other = make(True)
    ckpt_keras.restore(tmp_path / "run", other)
    assert by_layer(other, "one") == {"one": 1.0}


def test_frozen_layers_keep_their_own(tmp_path):
    model = nested("functional", "users", "items")
    model.get_layer("users").trainable = False
    model.compile("adam", "mse")
    saved(tmp_path, model)
    other = nested("functional", "items", "users")
    ckpt_keras.restore(tmp_path / "run", other, what="weights")
    mine, theirs = km.values(model)[:4], km.values(other)[:4]
    assert {float(v.flat[0]) for v in mine} == {float(v.flat[0]) for v in theirs}
    for name in ("users", "items"):
        km.assert_same(
            [np.array(v.value) for v in model.get_layer(name).variables],
            [np.array(v.value) for v in other.get_layer(name).variables],
        )


# ------------------------------------------------------------------ metrics, generators, optimizers


def two_outputs(first, second):
    inputs = keras.Input((4,))
    outputs = {n: layers.Dense(1, name=n)(inputs) for n in (first, second)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", metrics={n: ["mae"] for n in outputs})
    x = np.ones((2, 4))
    model.evaluate(x, {n: np.ones((2, 1)) for n in outputs}, verbose=0)
    return model


def test_metrics_of_one_name_belong_to_their_outputs(tmp_path):
    model = two_outputs("left", "right")
    saved(tmp_path, model)
    other = two_outputs("right", "left")
    ckpt_keras.restore(tmp_path / "run", other)

    def totals(each):
        lists = each._compile_metrics._flat_metrics
        return {m.output_name: float(m.metrics[0].total.value) for m in lists}

    assert totals(other) == totals(model) and len(set(totals(model).values())) == 2


def test_metrics_of_other_names_are_left_alone(tmp_path):
    def make(*names):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, name="d")], name="m")
        metrics = [keras.metrics.MeanAbsoluteError(name=n) for n in names]
        model.compile("sgd", "mse", metrics=metrics)
        model.evaluate(np.ones((2, 4)), np.ones((2, 1)), verbose=0)
        return model

    saved(tmp_path, make("a", "b"))
    other = make("b", "c")
    before = [float(v.value.sum()) for v in other.metrics_variables]
    ckpt_keras.restore(tmp_path / "run", other)
    assert [float(v.value.sum()) for v in other.metrics_variables] == before


def test_seed_generators_are_counted(tmp_path):
    def make(rates):
        parts = [layers.Dropout(rate, seed=int(rate * 100)) for rate in rates]
        return keras.Sequential([keras.Input((4,)), *parts], name="m")

    model = make([0.1, 0.2, 0.3])
    saved(tmp_path, model)
    for _ in range(10):
        layers.Dropout(0.1)
    other = make([0.1, 0.2, 0.3])
    ckpt_keras.restore(tmp_path / "run", other)
    km.assert_same(km.values(model), km.values(other))
    keras.backend.clear_session()
    with pytest.raises(ckpt.StructureMismatch, match="seed_generator"):
        ckpt_keras.restore(tmp_path / "run", make([0.1, 0.2]))


@pytest.mark.parametrize(
    "kind", ["adam", "adafactor", *(pytest.param(k, marks=SLOW) for k in ("nadam", "muon", "lion"))]
)
def test_an_optimizer_by_itself(tmp_path, kind):
    """Its slots carry the names of weights that are not saved with it."""
    model = towers(None, None, optimizer=kind)
    fill(model)
    ckpt.save(tmp_path / "step", optimizer=model.optimizer)
    for _ in range(10):
        layers.Dense(1)
    other = towers(None, None, optimizer=kind)
    km.values(other)  # makes the slots
    ckpt.restore(tmp_path / "step", optimizer=other.optimizer)
    km.assert_same(
        [np.array(v.value) for v in model.optimizer.variables],
        [np.array(v.value) for v in other.optimizer.variables],
    )


@pytest.mark.parametrize("kind", ["adam", "lion"])
def test_an_optimizer_of_renamed_weights_is_refused(tmp_path, kind):
    model = towers("user", "item", optimizer=kind)
    fill(model)
    ckpt.save(tmp_path / "step", optimizer=model.optimizer)
    other = towers("product", "user", optimizer=kind)
    before = km.values(other)
    with pytest.raises(ckpt.StructureMismatch, match="product_kernel"):
        ckpt.restore(tmp_path / "step", optimizer=other.optimizer)
    km.assert_same(before, km.values(other))


def test_wrapped_and_second_optimizers(tmp_path):
    def make(first, second):
        wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
        model = towers(first, second, optimizer=wrapped)
        model.other = keras.optimizers.Lion()
        model.other.build(model.trainable_variables)
        return model

    model = make("user", "item")
    saved(tmp_path, model)
    keras.optimizers.Adam(), keras.optimizers.Lion()
    other = make("user", "item")
    ckpt_keras.restore(tmp_path / "run", other)
    km.assert_same(km.values(model), km.values(other))
    km.assert_same(
        [np.array(v.value) for v in model.other.variables],
        [np.array(v.value) for v in other.other.variables],
    )
    keras.backend.clear_session()
    with pytest.raises(ckpt.StructureMismatch):
        ckpt_keras.restore(tmp_path / "run", make("user", "product"))


# ----------------------------------------------------------------------- checkpoints until now


def old_form(model):
    """The state as it was written until equal paths said where they belong."""
    tree, counts = {}, {}
    collections = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables,
        "metrics_variables": model.metrics_variables,
    }
    for collection, variables in collections.items():
        for variable in variables:
            key = (collection, variable.path)
            counts[key] = counts.get(key, 0) + 1
            path = variable.path + (f"@{counts[key]}" if counts[key] > 1 else "")
            node = tree.setdefault(collection, {})
            *parents, last = path.split("/")
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = variable.value
    return tree


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_checkpoints_that_count_equal_names_still_load(tmp_path, optimizer):
    model = nested("functional", "users", "items", optimizer=optimizer)
    fill(model)
    ckpt.save(tmp_path / "run" / "0", model=old_form(model))
    keras.backend.clear_session()
    other = nested("functional", "users", "items", optimizer=optimizer)
    ckpt_keras.restore(tmp_path / "run", other)
    km.assert_same(km.values(model), km.values(other))


# ---------------------------------------------------------------------------------------- pure


def entries(*paths, shape=(2,), owners=()):
    return [Named(path, shape, "float32", owners) for path in paths]


COUNTED = {"dense", "seed_generator", "block", "adam"}


def test_rank_counts_numbers_as_numbers():
    old = entries(*(f"trainable_variables/dense_{n}/kernel" for n in (10, 2, 1)))
    new = entries(*(f"trainable_variables/dense_{n}/kernel" for n in (21, 22, 23)))
    names, _ = align_model(old, new, counted=COUNTED)
    assert [names[f"trainable_variables/dense_{n}/kernel"].split("/")[1] for n in (1, 2, 10)] == [
        "dense_21",
        "dense_22",
        "dense_23",
    ]


def test_every_order_of_the_same_names_is_the_same_names():
    paths = [f"trainable_variables/{name}/kernel" for name in ("a", "b", "dense", "dense_1")]
    for order in itertools.permutations(paths):
        names, left = align_model(entries(*order), entries(*paths), counted=COUNTED)
        assert names == {} and left == set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["a/gamma", "a/beta"], ["b/beta", "b/gamma"]),
        (["b/kernel", "a/kernel"], ["x/kernel", "y/kernel"]),
        (["dense/kernel"], ["dense_1/kernel", "dense_2/kernel"]),
        (["tower_1/kernel"], ["tower_2/kernel"]),
        (["dense_0/kernel"], ["dense_1/kernel"]),
    ],
)
def test_other_names_are_never_paired(old, new):
    old = entries(*(f"trainable_variables/{name}" for name in old))
    new = entries(*(f"trainable_variables/{name}" for name in new))
    assert align_model(old, new, counted=COUNTED)[0] == {}
    assert align_plain(old, new, counted=COUNTED) == {}


def test_a_shape_that_differs_is_reported_under_the_new_name():
    old = entries("trainable_variables/dense/kernel")
    new = entries("trainable_variables/dense_4/kernel", shape=(3,))
    assert align_model(old, new, counted=COUNTED)[0] == {old[0].path: new[0].path}
