"""Keras' own files: the variables to the bit; links, damage and objects are reported."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.support.keras_models import keras
from tests.support.same_bits import bits

h5py = pytest.importorskip("h5py")

# Keras gives its variables to h5py, whose call numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def model() -> Any:
    made = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(4, dtype=keras.DTypePolicy("bfloat16")),
            keras.layers.Dropout(0.1),
            *(keras.layers.Dense(4) for _ in range(11)),
        ]
    )
    made.compile("adam", "mse")
    made.fit(np.ones((4, 3)), np.ones((4, 4)), verbose=0)
    return made


def check(model: Any, found: Any) -> None:
    layers = [layer for layer in model.layers if layer.weights and "dense" in layer.name]
    names = ["dense", *(f"dense_{n}" for n in range(1, len(layers)))]
    for layer, name in zip(layers, names, strict=True):
        stored = found["layers"][name]["vars"]
        assert [bits(stored[str(n)]) for n in range(2)] == [
            bits(np.asarray(weight.value)) for weight in layer.weights
        ]
    variables = model.optimizer.variables
    stored = found["optimizer"]["vars"]
    assert [bits(one) for one in stored.values()] == [
        bits(np.asarray(one.value)) for one in variables
    ]


def test_a_model_and_its_optimizer(tmp_path: Path, model: Any) -> None:
    model.save(tmp_path / "m.keras")
    import_weights(tmp_path / "m.keras", tmp_path / "a")
    check(model, ckpt.load(tmp_path / "a"))
    assert ckpt.inspect(tmp_path / "a").metadata["keras_version"] == keras.__version__


def test_weights_alone_and_in_shards(tmp_path: Path, model: Any) -> None:
    model.save_weights(tmp_path / "m.weights.h5")
    import_weights(tmp_path / "m.weights.h5", tmp_path / "a")
    check(model, ckpt.load(tmp_path / "a"))
    model.save_weights(tmp_path / "s.weights.json", max_shard_size=3e-7)
    assert len(list(tmp_path.glob("s_*.weights.h5"))) > 2
    import_weights(tmp_path / "s.weights.json", tmp_path / "b")
    check(model, ckpt.load(tmp_path / "b"))
    (tmp_path / "s_00001.weights.h5").unlink()
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"s_00001\.weights\.h5 is missing"):
        import_weights(tmp_path / "s.weights.json", tmp_path / "c")
    (tmp_path / "s.weights.json").write_text('{"weight_map": {"a": "../m.weights.h5"}}')
    with pytest.raises(ckpt.CheckpointCorrupt, match="names files elsewhere"):
        import_weights(tmp_path / "s.weights.json", tmp_path / "c")


def test_links_and_objects_are_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.ones(3)
    makers = {
        "link": lambda file: file.__setitem__("a", h5py.ExternalLink("secret.h5", "/x")),
        "soft": lambda file: file.__setitem__("a", h5py.SoftLink("/b")),
        "external": lambda file: file.create_dataset(
            "a", (3,), np.uint8, external=[(str(tmp_path / "secret.h5"), 0, 3)]
        ),
        "text": lambda file: file.__setitem__("a", "text"),
    }
    for name, make in makers.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            make(file)
        with pytest.raises(ckpt.UnsupportedLeaf):
            import_weights(tmp_path / f"{name}.h5", tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_damage(tmp_path: Path, model: Any) -> None:
    model.save(tmp_path / "m.keras")
    whole = (tmp_path / "m.keras").read_bytes()
    (tmp_path / "m.keras").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ckpt.CheckpointError):
        import_weights(tmp_path / "m.keras", tmp_path / "a", format="keras")
    with zipfile.ZipFile(tmp_path / "n.keras", "w") as archive:
        archive.writestr("model.weights.h5", b"not HDF5 at all")
    with pytest.raises(ckpt.CheckpointCorrupt, match="no HDF5"):
        import_weights(tmp_path / "n.keras", tmp_path / "a")
