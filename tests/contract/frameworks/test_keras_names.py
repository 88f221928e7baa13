"""Which saved variable is which of a live model: by name, or by Keras' own counters, never by guess; renamed by the user, or lost by the configuration."""

import os
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


def moves_counters(kind: str) -> None:
    """As far as another ``stack`` of one layer does."""
    WRAPPED[kind]().build((None, 3, 4))
    layers.Dense(1).build((None, 3, 4))
    keras.optimizers.Adam()


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
    **{name: as_saved(stack, name, 2, moves=partial(moves_counters, name)) for name in WRAPPED},
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


@keras.saving.register_keras_serializable("lost")
class Proj(layers.Layer):
    """Without get_config: what Keras writes for it has no name."""

    def __init__(self, units: int = 4, **more: Any) -> None:
        super().__init__(**more)
        self.units = units

    def build(self, shape: Any) -> None:
        self.k = self.add_weight(shape=(shape[-1], self.units), name="k")
        self.seen = self.add_weight(shape=(), name="seen", trainable=False)

    def call(self, x: Any) -> Any:
        return x @ self.k


@keras.saving.register_keras_serializable("lost")
class Words(layers.Layer):
    """With files, and without get_config."""

    def __init__(self, size: int = 0, **more: Any) -> None:
        super().__init__(**more)
        self.words: list[str] = []

    def call(self, x: Any) -> Any:
        return x

    def save_assets(self, directory: str) -> None:
        Path(directory, "words.txt").write_text("\n".join(self.words))

    def load_assets(self, directory: str) -> None:
        self.words = Path(directory, "words.txt").read_text().split("\n")


def functional(*names: str) -> Any:
    inputs = x = keras.Input((4,))
    for name in names:
        x = Proj(name=name)(x)
    return keras.Model(inputs, x)


def sequential(*names: str) -> Any:
    return keras.Sequential([keras.Input((4,)), *(Proj(name=name) for name in names)])


def inside(*names: str) -> Any:
    inputs = keras.Input((4,))
    inner = sequential(*names)
    return keras.Model(inputs, layers.Dense(2, name="head")(inner(inputs)))


def inside_functional(*names: str) -> Any:
    inputs = keras.Input((4,))
    inner = functional(*names)
    inner.name = "inner"
    return keras.Model(inputs, layers.Dense(2, name="head")(inner(inputs)))


def mixed(*names: str) -> Any:
    inputs = x = keras.Input((4,))
    for number, name in enumerate(names):
        x = layers.Dense(4, name=f"dense_of_{number}")(Proj(name=name)(x))
    return keras.Model(inputs, layers.Dropout(0.5)(x))


def values(model: Any) -> list[Any]:
    return [np.array(variable.value).tolist() for variable in km.variables(model, metrics=False)]


NAMES = {
    "in order": ("first", "last"),
    "the other way": ("z", "a"),
    "as Keras counts": ("proj", "proj_1"),
    "as Keras counts, backwards": ("proj_1", "proj"),
    "like others": ("dense_1", "dense"),
}
MAKERS = [functional, sequential, inside, inside_functional, mixed]
OPTIMIZERS = ["adam", "adafactor", None]
LOST = [
    pytest.param(make, name, OPTIMIZERS[(nth + place) % 3], id=f"{make.__name__}-{name}")
    for nth, make in enumerate(MAKERS)
    for place, name in enumerate(NAMES)
]


@pytest.mark.parametrize(("make", "names", "optimizer"), LOST)
def test_layers_whose_name_the_configuration_lost_are_found(make, names, optimizer, tmp_path):
    model = make(*NAMES[names])
    if optimizer is not None:
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
    fill(model)
    ckpt_keras.save(tmp_path / "run", model, step=0)
    expected = values(model)
    for clear in (True, False):
        if clear:
            keras.backend.clear_session()
        assert values(ckpt_keras.load_model(tmp_path / "run")) == expected


@pytest.mark.parametrize("names", [("b", "a"), ("words_1", "words")])
def test_files_of_layers_whose_name_was_lost_are_found(names, tmp_path):
    inputs = keras.Input((4,))
    one, two = (Words(name=name) for name in names)
    one.words, two.words = ["one"], ["two", "more"]
    model = keras.Model(inputs, layers.Dense(2)(two(one(inputs))))
    ckpt_keras.save(tmp_path / "run", model, step=0)
    loaded = ckpt_keras.load_model(tmp_path / "run")
    found = [layer.words for layer in loaded.layers if isinstance(layer, Words)]
    assert found == [["one"], ["two", "more"]]


def test_any_other_difference_of_a_model_without_names_is_refused(tmp_path):
    fill(model := mixed("first", "last"))
    ckpt_keras.save(tmp_path / "run", model, step=0)
    for other in (mixed("last", "other"), functional("proj", "proj_1")):
        with pytest.raises(ckpt.StructureMismatch):  # names of the user's own model count
            ckpt_keras.restore(tmp_path / "run", other)


@pytest.mark.parametrize(
    "other",
    [
        lambda: mixed("first", "last", "more"),
        lambda: mixed("first"),
        lambda: functional("first", "last"),
    ],
    ids=["a layer more", "a layer less", "another layer"],
)
def test_a_configuration_of_another_model_is_refused(other, tmp_path):
    for name, model in (("one", mixed("first", "last")), ("two", other())):
        fill(model)
        ckpt_keras.save(tmp_path / name, model, step=0)
    items = {"pytree": ckpt.load(tmp_path / "one/0", item="pytree")}
    items["model_config"] = ckpt.load(tmp_path / "two/0", item="model_config")
    with ckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, items=items)
    with pytest.raises(ckpt.StructureMismatch):
        ckpt_keras.load_model(tmp_path / "run")


def net(name: str, kind: str = "functional", optimizer: Any = "adam") -> Any:
    def stack(x: Any) -> Any:
        return layers.Dense(4, name=f"{name}_other")(layers.Dense(4, name=name)(x))

    inputs = keras.Input((4,))
    if kind == "sequential":
        own = [layers.Dense(4, name=name), layers.Dense(4, name=f"{name}_other")]
        model = keras.Sequential([inputs, *own])
    elif kind == "nested":
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(4)], name=name)
        model = keras.Model(inputs, layers.Dense(4, name=f"{name}_other")(inner(inputs)))
    else:
        model = keras.Model(inputs, layers.BatchNormalization(name="norm")(stack(inputs)))
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    return model


RENAME = {"head": "tail", "head_other": "tail_other"}


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("functional", "adam"),
        ("functional", "adafactor"),
        ("sequential", "nadam"),
        ("sequential", "adafactor"),
        ("nested", "sgd"),
        ("nested", "adam"),
    ],
)
def test_a_renamed_layer_is_renamed_everywhere(kind, optimizer, tmp_path):
    fill(model := net("head", kind, optimizer))
    ckpt_keras.save(tmp_path / "run", model, step=0)
    other = net("tail", kind, optimizer)
    with pytest.raises(ckpt.StructureMismatch):
        ckpt_keras.restore(tmp_path / "run", other)
    report = ckpt_keras.restore(tmp_path / "run", other, rename=RENAME).report
    assert not report.missing and not report.unexpected
    assert values(other) == values(model)
    again = net("tail", kind, optimizer)
    ckpt.restore(tmp_path / "run" / "0", pytree=again, rename=RENAME)
    assert values(again) == values(model)


def test_a_renamed_layer_keeps_its_files(tmp_path):
    def make(name: str) -> Any:
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(2, name="head")(Words(name=name)(inputs)))

    model, other = make("old"), make("new")
    model.get_layer("old").words = ["a", "b"]
    ckpt_keras.save(tmp_path / "run", model, step=0)
    with pytest.raises(ckpt.StructureMismatch, match="old"):
        ckpt_keras.restore(tmp_path / "run", other)
    ckpt_keras.restore(tmp_path / "run", other, rename={"old": "new"})
    assert other.get_layer("new").words == ["a", "b"]


def test_a_layer_whose_name_only_begins_alike_is_not_renamed(tmp_path):
    def make(name: str) -> Any:
        inputs = x = keras.Input((4,))
        for one in (name, "header", "head_kernel_2"):
            x = layers.Dense(4, name=one)(x)
        body = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="head")], name="body")
        model = keras.Model(inputs, body(x))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    fill(model := make("head"))
    ckpt_keras.save(tmp_path / "run", model, step=0)
    other = make("tail")
    ckpt_keras.restore(tmp_path / "run", other, rename={"head": "tail"})
    assert values(other) == values(model)


def test_arguments_in_another_order_are_named(tmp_path):
    model = functional("a")
    for call in ("save", "restore"):
        with pytest.raises(
            TypeError, match=rf"got a Functional: the directory comes first.*{call}\(dir"
        ):
            getattr(ckpt_keras, call)(model, tmp_path)
        with pytest.raises(TypeError, match=r"must be a Keras model, got a dict"):
            getattr(ckpt_keras, call)(tmp_path, {})
    with pytest.raises(TypeError, match=r"got a Functional: .*load_model\(directory\)"):
        ckpt_keras.load_model(model)


def test_a_file_is_said_to_be_one(tmp_path):
    (tmp_path / "m.keras").write_bytes(b"content")
    for call in (
        lambda: ckpt_keras.load_model(tmp_path / "m.keras"),
        lambda: ckpt_keras.restore(os.fspath(tmp_path / "m.keras"), functional("a")),
    ):
        with pytest.raises(ckpt.CheckpointNotFound, match="is a file, and no directory"):
            call()
