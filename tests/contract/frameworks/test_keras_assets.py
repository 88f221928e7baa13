"""Files of layers (vocabularies): saved, loaded, and exchanged with Keras' own callback and loaders.

Keras' lookup layers need TensorFlow; ``Words`` keeps its vocabulary in the same way, as a file.
"""

import os

import jax
import pytest

import ckpt_core as ckpt
import ckpt_keras
from tests.support import keras_models as km
from tests.support.damage import flip
from tests.support.keras_models import OrbaxCheckpointCallback, keras, layers

compiled_once, pytestmark = km.compiled_once, km.OF_ORBAX


@keras.saving.register_keras_serializable(package="ckpt_tests")
class Words(layers.Layer):
    """Learned words, which are in no variable and not in the configuration."""

    empty_file = True

    def __init__(self, words=None, **kwargs):
        super().__init__(**kwargs)
        self.words = list(words or ())

    def call(self, x):
        return x

    def get_config(self):
        return super().get_config()

    def save_assets(self, dir_path):
        os.mkdir(os.path.join(dir_path, "more"))
        for name in ("words.txt", os.path.join("more", "again.txt")):
            with open(os.path.join(dir_path, name), "w") as file:
                file.write("\n".join(self.words))
        if self.empty_file:
            open(os.path.join(dir_path, "empty.txt"), "w").close()

    def load_assets(self, dir_path):
        assert not self.empty_file or os.path.getsize(os.path.join(dir_path, "empty.txt")) == 0
        with open(os.path.join(dir_path, "more", "again.txt")) as file:
            again = file.read()
        with open(os.path.join(dir_path, "words.txt")) as file:
            self.words = file.read().split("\n")
        assert again == "\n".join(self.words)


def make(*names, words=(), seed=0):
    """A model with a vocabulary for each name, one of them in a model of its own."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((4,))
    found = [list(w) for w in words] or [[] for _ in names]
    parts = [Words(w, name=n) for n, w in zip(names, found, strict=True)]
    inner = keras.Model(inputs, parts[0](inputs), name="inner")
    x = inner(inputs)
    for part in parts[1:]:
        x = part(x)
    model = keras.Model(inputs, layers.Dense(2, name="out")(x), name="net")
    model.compile("adam", "mse")
    return model


def vocabularies(model):
    return {each.name: each.words for each in model._flatten_layers() if isinstance(each, Words)}


GERMAN = {"cities": ["Bonn", "Köln"], "names": ["Ada", "Zoë", "水"]}


def trained(directory, callback=OrbaxCheckpointCallback, epochs=1, **arguments):
    model = make("cities", "names", words=GERMAN.values())
    km.fit(model, [callback(directory, **arguments)], epochs=epochs)
    return model


def test_load_model_restore_and_the_manager_have_them(tmp_path):
    model = trained(tmp_path)
    assert vocabularies(ckpt_keras.load_model(tmp_path)) == GERMAN
    other = make("cities", "names", seed=1)
    ckpt_keras.restore(tmp_path, other)
    assert vocabularies(other) == GERMAN
    km.assert_same(km.values(model), km.values(other))
    weights = make("cities", "names", seed=1)
    ckpt_keras.restore(tmp_path, weights, what="weights")
    assert vocabularies(weights) == GERMAN
    path = ckpt_keras.save(tmp_path / "one", model)
    assert vocabularies(ckpt_keras.load_model(path)) == GERMAN
    with ckpt_keras.KerasCheckpointManager(model, tmp_path / "m") as manager:
        manager.save_state(0)
        third = make("cities", "names", seed=2)
        manager.model = third
        assert manager.restore_state().step == 0
    assert vocabularies(third) == GERMAN
    assert ckpt.verify(tmp_path / "0").ok


def test_two_vocabularies_are_not_mixed_up(tmp_path):
    """Keras' place is a class and a number: in another order, names would be cities."""
    trained(tmp_path)
    other = make("names", "cities", seed=1)
    with pytest.raises(ckpt.StructureMismatch, match="cities"):
        # one of them lies in a model of its own, and the other one did
        ckpt_keras.restore(tmp_path, other)

    def flat(*names, words=((), ())):
        inputs = x = keras.Input((4,))
        for name, each in zip(names, words, strict=True):
            x = Words(each, name=name)(x)
        return keras.Model(inputs, layers.Dense(2, name="out")(x), name="net")

    ckpt_keras.save(tmp_path / "flat", flat("cities", "names", words=GERMAN.values()), step=0)
    other = flat("names", "cities")
    ckpt_keras.restore(tmp_path / "flat", other)
    assert vocabularies(other) == GERMAN
    ckpt_keras.save(tmp_path / "auto", flat(None, None, words=GERMAN.values()), step=0)
    other = flat(None, None)
    ckpt_keras.restore(tmp_path / "auto", other)
    assert list(vocabularies(other).values()) == list(GERMAN.values())


def test_assets_of_a_layer_that_is_gone_are_not_dropped_in_silence(tmp_path):
    trained(tmp_path)
    other = make("cities", "other", seed=1)
    before = km.values(other)
    with pytest.raises(ckpt.StructureMismatch, match=r"names.*\n.*that have assets.*other"):
        ckpt_keras.restore(tmp_path, other)
    km.assert_same(before, km.values(other))
    assert vocabularies(other) == {"cities": [], "other": []}


def test_a_damaged_vocabulary_does_not_load(tmp_path):
    trained(tmp_path)
    paths = [path for path in (tmp_path / "0" / "assets").rglob("*") if path.parent.name == "d"]
    assert paths
    for path in paths:
        flip(path)
    with pytest.raises(ckpt.CheckpointCorrupt):
        ckpt_keras.load_model(tmp_path)


def test_what_the_core_leaves_out_is_said(tmp_path):
    model = make("cities", "names", words=GERMAN.values())
    with pytest.warns(UserWarning, match=r"assets.*inner/cities, names.*ckpt_keras.save"):
        ckpt.save(tmp_path / "one", model=model)
    ckpt.save(tmp_path / "none", model=km.small())  # has none, and nothing is said


def test_ours_is_read_by_keras(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    model = trained(tmp_path)
    loaded = keras.saving.load_model(str(tmp_path))
    assert vocabularies(loaded) == GERMAN
    km.assert_same(km.values(model), km.values(loaded))


def test_theirs_is_read_by_us(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")
    monkeypatch.setattr(Words, "empty_file", False)  # Orbax cannot save any
    model = trained(tmp_path, keras.callbacks.OrbaxCheckpoint)
    assert vocabularies(ckpt_keras.load_model(tmp_path)) == GERMAN
    other = make("cities", "names", seed=1)
    ckpt_keras.restore(tmp_path, other)
    assert vocabularies(other) == GERMAN
    km.assert_same(km.values(model), km.values(other))
    again = make("cities", "names", seed=1)
    history = km.fit(again, [OrbaxCheckpointCallback(tmp_path)], epochs=2)
    assert history.epoch == [1] and vocabularies(again) == GERMAN
    assert vocabularies(keras.saving.load_model(str(tmp_path))) == GERMAN


def test_checkpoints_of_older_versions_are_read(tmp_path):
    """Their item is called ``model``, and has no assets beside it."""
    model = km.trained(km.small(), [OrbaxCheckpointCallback(tmp_path / "new")])
    items = {name: ckpt.load(tmp_path / "new" / "0", item=name) for name in ("fit", "model_config")}
    items["model"] = ckpt.load(tmp_path / "new" / "0", item="pytree")
    with ckpt.Checkpointer(tmp_path / "old") as checkpointer:
        checkpointer.save(0, items=items)
    km.assert_same(km.values(model), km.values(ckpt_keras.load_model(tmp_path / "old")))
    straight = km.trained(km.small(), epochs=2)
    other = km.small(1)
    assert km.fit(other, [OrbaxCheckpointCallback(tmp_path / "old")], epochs=2).epoch == [1]
    km.assert_same(km.values(straight), km.values(other))
    assert jax.tree.structure(ckpt.load(tmp_path / "old" / "1", item="pytree"))
