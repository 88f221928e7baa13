"""Which saved variable is which of a live model: by name, or by Keras' own counters, never by guess."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import keras_models as km
from tests.support.keras_models import fill, keras, layers

compiled_once, pytestmark = km.compiled_once, km.QUIET
Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def counters_from_zero() -> None:
    keras.backend.clear_session()


def first(variable: Any) -> float:
    return float(np.array(variable.value).flat[0])


def kernels(model: Any, *names: str) -> dict[str, float]:
    found = {one.name: one for one in model._flatten_layers()}
    return {name: first(found[name].kernel) for name in names}


def slots(model: Any, role: str = "_momentums") -> list[float]:
    """The value of each weight's slot, in the order of the weights."""
    of = zip(model.optimizer._trainable_variables, getattr(model.optimizer, role), strict=True)
    slot_of = {id(weight): first(slot) for weight, slot in of}
    return [slot_of[id(weight)] for weight in model.trainable_variables]


def saved(path: Path, model: Any) -> Any:
    ckpt_keras.save(path / "run", fill(model), step=0)
    keras.backend.clear_session()
    return model


def towers(*names: str | None, optimizer: Any = "adam") -> Any:
    a, b = keras.Input((8,)), keras.Input((8,))
    one, two = (layers.Dense(4, name=name) for name in names)
    model = keras.Model([a, b], layers.Dot(1)([one(a), two(b)]))
    model.compile(optimizer, "mse")
    return model


def nested(kind: str, *names: str | None, optimizer: Any = "adam") -> Any:
    """Models of one layer, whose name is the same in all of them."""

    def inner(name: str | None) -> Any:
        inputs, dense = keras.Input((8,)), layers.Dense(4, name="d")
        if kind == "sequential":
            return keras.Sequential([inputs, dense], name=name)
        return keras.Model(inputs, dense(inputs), name=name)

    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Add()([part(inputs) for part in map(inner, names)]))
    model.compile(optimizer, "mse")
    return model


def chain(*names: str | None, name: str | None = "chain", optimizer: Any = None) -> Any:
    parts = [layers.Dense(4, name=one) for one in names]
    model = keras.Sequential([keras.Input((4,)), *parts, layers.Dropout(0.1)], name=name)
    if optimizer:
        model.compile(optimizer, "mse")
    return model


def two_models(*counts: int) -> Any:
    inputs = keras.Input((4,))
    one, two = (keras.Sequential([layers.Dense(4) for _ in range(count)]) for count in counts)
    return keras.Model(inputs, two(one(inputs)))


def sharing(shared: bool) -> Any:
    a, b = keras.Input((4,)), keras.Input((4,))
    one = layers.Dense(4, name="one")
    two = one if shared else layers.Dense(4, name="two")
    return keras.Model([a, b], layers.Dot(1)([one(a), two(b)]))


def dropouts(*rates: float) -> Any:
    parts = [layers.Dropout(rate, seed=int(rate * 100)) for rate in rates]
    return keras.Sequential([keras.Input((4,)), *parts], name="m")


def several_optimizers(*names: str) -> Any:
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model = towers(*names, optimizer=wrapped)
    model.other = keras.optimizers.Lion()
    model.other.build(model.trainable_variables)
    return model


class Block(layers.Layer):
    """Names what it holds after itself, as many do."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, name=f"{self.name}_proj")
        self.norm = layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return self.norm(self.inner(x))


class Attend(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 2, dropout=0.1)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return self.attention(x, x)


WRAPPED = {
    "bidirectional": lambda: layers.Bidirectional(layers.LSTM(2, return_sequences=True)),
    "time": lambda: layers.TimeDistributed(layers.Dense(4)),
    "spectral": lambda: layers.SpectralNormalization(layers.Dense(4)),
    "attention": Attend,
    "block": Block,
    "dropout": lambda: layers.Dropout(0.1),
    "batch norm": layers.BatchNormalization,
}


def stack(kind: str, count: int) -> Any:
    inputs = x = keras.Input((3, 4))
    for _ in range(count):
        x = WRAPPED[kind]()(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


SWAPPED = (2, 3, 0, 1)
# The saved model, the other one, what moves Keras' counters before it, the weights' new places.
Restored = tuple[Make, Make, Make | None, Sequence[int] | None]


def as_saved(make: Callable[..., Any], *given: Any, moves: Make | None = None) -> Restored:
    return partial(make, *given), partial(make, *given), moves, None


def swapped(make: Callable[..., Any], *names: str, optimizer: str) -> Restored:
    *first, one, two = names
    both = [
        partial(make, *first, *order, optimizer=optimizer) for order in ((one, two), (two, one))
    ]
    return *both, None, SWAPPED


KINDS = ("sequential", "functional")
RESTORED: dict[str, Restored] = {
    "another name of the model": (
        lambda: chain("a", "b", name="first", optimizer="adam"),
        lambda: chain("a", "b", name="second", optimizer="adam"),
        None,
        None,
    ),
    "shared layer": as_saved(sharing, True),
    "seed generators": as_saved(dropouts, 0.1, 0.2, 0.3, moves=lambda: layers.Dropout(0.1)),
    "several optimizers": as_saved(several_optimizers, "user", "item", moves=keras.optimizers.Lion),
    **{
        f"{kind}, unnamed": as_saved(
            nested, kind, None, None, moves=partial(nested, kind, None, None)
        )
        for kind in KINDS
    },
    **{
        f"{kind}, {optimizer}": swapped(nested, kind, "users", "items", optimizer=optimizer)
        for kind in KINDS
        for optimizer in ("adam", "adafactor")
    },
    **{
        f"towers, {optimizer}": swapped(towers, "user", "item", optimizer=optimizer)
        for optimizer in ("adam", "adafactor", "nadam")
    },
    **{name: as_saved(stack, name, 2, moves=partial(stack, name, 1)) for name in WRAPPED},
}
REFUSED: dict[str, tuple[Make, Make, str]] = {
    "a name in the middle": (partial(chain, *"abc"), partial(chain, *"axb"), "x/kernel"),
    "another layer": (partial(chain, *"ab"), partial(chain, *"ac"), "c/kernel"),
    "as many in other models": (partial(two_models, 2, 1), partial(two_models, 1, 2), "kernel"),
    "shared, and two of their own": (partial(sharing, True), partial(sharing, False), "two/kernel"),
    "fewer seeds": (partial(dropouts, 0.1, 0.2), partial(dropouts, 0.1), "seed_generator"),
    "several optimizers": (
        partial(several_optimizers, "user", "item"),
        partial(several_optimizers, "user", "product"),
        "product",
    ),
    **{
        f"other roles, {optimizer}": (
            partial(towers, "user", "item", optimizer=optimizer),
            partial(towers, "product", "user", optimizer=optimizer),
            "item/kernel",
        )
        for optimizer in ("adam", "adafactor")
    },
    **{
        f"another {kind} model": (
            partial(nested, kind, "users", "items"),
            partial(nested, kind, "items", "products"),
            "users|products|d/kernel|d_kernel",
        )
        for kind in KINDS
    },
    **{
        f"three for two: {name}": (partial(stack, name, 2), partial(stack, name, 3), "missing")
        for name in WRAPPED
        if name != "dropout"
    },
}


@pytest.mark.parametrize("case", RESTORED)
def test_every_variable_is_found(tmp_path, case):
    make, make_other, moves, places = RESTORED[case]
    model = saved(tmp_path, make())
    for _ in range(9 if moves else 0):  # dense_10 comes after dense_9
        moves()
    other = make_other()
    report = ckpt_keras.restore(tmp_path / "run", other).report
    assert report.missing == report.unexpected == ()
    if places is None:
        km.assert_same(km.values(model), km.values(other))
        if hasattr(model, "other"):
            pairs = zip(model.other.variables, other.other.variables, strict=True)
            assert all(first(one) == first(two) for one, two in pairs)
        return
    weights = [[first(v) for v in each.trainable_variables] for each in (model, other)]
    assert [weights[1][place] for place in places] == weights[0]
    role = "_v" if "adafactor" in case else "_momentums"
    mine, theirs = slots(model, role), slots(other, role)
    assert [theirs[place] for place in places] == mine


@pytest.mark.parametrize("case", REFUSED)
def test_other_names_are_never_paired(tmp_path, case):
    make, make_other, expected = REFUSED[case]
    saved(tmp_path, make())
    other = make_other()
    before = km.values(other)
    with pytest.raises(ckpt.StructureMismatch, match=expected):
        ckpt_keras.restore(tmp_path / "run", other)
    km.assert_same(before, km.values(other))


def test_what_both_sides_have_keeps_its_own_when_the_rest_may_differ(tmp_path):
    model = saved(tmp_path, towers("user", "item"))
    other = towers("product", "user")
    fresh = kernels(other, "product")
    report = ckpt_keras.restore(
        tmp_path / "run", other, what="weights", missing="keep", unexpected="ignore"
    ).report
    assert kernels(other, "user") == kernels(model, "user")
    assert kernels(other, "product") == fresh
    missing = {path.rpartition("variables/")[2] for path in report.missing}
    assert missing == {"product/bias", "product/kernel"}


@pytest.mark.parametrize("kind", ["sequential", "functional"])
def test_a_model_from_a_configuration_leaves_names_out(tmp_path, kind):
    """``from_config`` drops the names of Sequential models from paths: those of layers decide."""
    model = saved(tmp_path, nested(kind, "users", "items"))
    loaded = ckpt_keras.load_model(tmp_path / "run")
    km.assert_same(km.values(model), km.values(loaded))
    ckpt_keras.save(tmp_path / "again", loaded, step=0)
    for names in (("users", "items"), ("items", "users")):  # and back
        keras.backend.clear_session()
        by_code = nested(kind, *names)
        ckpt_keras.restore(tmp_path / "again", by_code)
        mine, theirs = km.values(model)[:4], km.values(by_code)[:4]
        km.assert_same(mine if names[0] == "users" else [*mine[2:], *mine[:2]], theirs)


def test_metrics_of_one_name_belong_to_their_outputs(tmp_path):
    def make(*names: str) -> Any:
        inputs = keras.Input((4,))
        model = keras.Model(inputs, {n: layers.Dense(1, name=n)(inputs) for n in names})
        model.compile("sgd", "mse", metrics={n: ["mae"] for n in names})
        ones = np.ones((2, 1))
        model.evaluate(np.ones((2, 4)), dict.fromkeys(names, ones), verbose=0)
        return model

    def totals(model: Any) -> dict[str, float]:
        found = model._compile_metrics._flat_metrics
        return {one.output_name: float(one.metrics[0].total.value) for one in found}

    model = saved(tmp_path, make("left", "right"))
    other = make("right", "left")
    ckpt_keras.restore(tmp_path / "run", other)
    assert totals(other) == totals(model) and len(set(totals(model).values())) == 2


@pytest.mark.parametrize("kind", ["adam", "adafactor", "nadam", "muon", "lion"])
def test_an_optimizer_by_itself(tmp_path, kind):
    """Its slots carry the names of weights that are not saved with it."""
    model, named = towers(None, None, optimizer=kind), towers("user", "item", optimizer=kind)
    for one, place in ((model, "step"), (named, "named")):
        ckpt.save(tmp_path / place, optimizer=fill(one).optimizer)
    for _ in range(10):
        layers.Dense(1)
    other, renamed = (
        towers(*names, optimizer=kind) for names in ((None, None), ("product", "user"))
    )
    before = [km.values(one) for one in (other, renamed)]  # makes the slots
    ckpt.restore(tmp_path / "step", optimizer=other.optimizer)
    pairs = zip(model.optimizer.variables, other.optimizer.variables, strict=True)
    assert all(first(one) == first(two) for one, two in pairs)
    with pytest.raises(ckpt.StructureMismatch, match="product_kernel"):
        ckpt.restore(tmp_path / "named", optimizer=renamed.optimizer)
    km.assert_same(before[1], km.values(renamed))
