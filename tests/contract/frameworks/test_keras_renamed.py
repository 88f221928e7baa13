"""Layers of Keras models under other names: renamed by the user, or lost by the configuration."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import keras_models as km
from tests.support.keras_models import fill, keras, layers

pytestmark = km.QUIET


@pytest.fixture(autouse=True)
def counters_from_zero():
    keras.backend.clear_session()


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
