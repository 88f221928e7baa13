"""A damaged safetensors file is damaged through every way in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core import convert
from ckpt_torchax import import_file, load_into

torch: Any = pytest.importorskip("torch")

W, B = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
GOOD = {
    "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
}
DATA = W.tobytes() + B.tobytes()


def entry(**changed: Any) -> dict[str, Any]:
    return {**GOOD, "bias": {**GOOD["bias"], **changed}}


DAMAGED: dict[str, tuple[str, bytes]] = {
    "overlap": (json.dumps(entry(data_offsets=[20, 28])), DATA[:28]),
    "gap": (json.dumps(entry(data_offsets=[28, 36])), DATA + bytes(4)),
    "a name twice": (json.dumps(GOOD)[:-1] + ', "bias": ' + json.dumps(GOOD["bias"]) + "}", DATA),
    "bytes after the end": (json.dumps(GOOD), DATA + b"more"),
    "truncated": (json.dumps(GOOD), DATA[:-1]),
    "a negative dimension": (json.dumps(entry(shape=[-2, -1])), DATA),
    "a dimension that is no integer": (json.dumps(entry(shape=[2.0])), DATA),
    "another size": (json.dumps(entry(shape=[3])), DATA),
    "offsets backwards": (json.dumps(entry(data_offsets=[32, 24])), DATA),
    "a key too many": (json.dumps(entry(more=1)), DATA),
    "no JSON": ("{", DATA),
    "a list": ("[]", DATA),
}


def write(path: Path, header: str, data: bytes) -> Path:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def indexed(path: Path) -> Path:
    index = {"metadata": {}, "weight_map": dict.fromkeys(GOOD, path.name)}
    file = path.with_name("model.safetensors.index.json")
    file.write_text(json.dumps(index))
    return file


def ways(file: Path, place: Path) -> dict[str, Any]:
    return {
        "load": lambda: ckpt.load(file),
        "load as numpy": lambda: ckpt.load(file, as_numpy=True),
        "restore": lambda: ckpt.restore(file, model=torch.nn.Linear(3, 2)),
        "load_into": lambda: load_into(file, torch.nn.Linear(3, 2)),
        "import_file": lambda: import_file(file, place / "imported"),
        "import_weights": lambda: convert.import_weights(file, place / "imported"),
    }


WAYS = list(ways(Path(), Path()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("damage", DAMAGED)
def test_no_way_in_takes_it(tmp_path: Path, way: str, by_index: bool, damage: str) -> None:
    file = write(tmp_path / "model.safetensors", *DAMAGED[damage])
    file = indexed(file) if by_index else file
    module = torch.nn.Linear(3, 2)
    before = module.weight.detach().clone()
    with pytest.raises(ckpt.CheckpointCorrupt):
        ways(file, tmp_path)[way]()
    assert not (tmp_path / "imported").exists()
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_index", [False, True])
def test_every_way_in_takes_a_sound_one(tmp_path: Path, way: str, by_index: bool) -> None:
    file = write(tmp_path / "model.safetensors", json.dumps(GOOD), DATA)
    ways(indexed(file) if by_index else file, tmp_path)[way]()


def test_a_file_fills_a_module_as_a_checkpoint_does(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", json.dumps(GOOD), DATA)
    module = load_into(file, torch.nn.Linear(3, 2))
    assert torch.equal(module.weight, torch.arange(6.0).reshape(2, 3))
    named = torch.nn.Sequential(torch.nn.Linear(3, 2))
    load_into(file, named, rename={"weight": "0.weight", "bias": "0.bias"})
    assert torch.equal(named[0].bias, torch.ones(2))
    with pytest.raises(ckpt.StructureMismatch, match="dtype"):
        load_into(file, torch.nn.Linear(3, 2).half())
    half = load_into(file, torch.nn.Linear(3, 2).half(), cast=True)
    assert half.weight.dtype == torch.float16


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ([1.0, float("nan")], torch.int32),
        ([1.0, 3e9], torch.int32),
        ([1.0, -1.0], torch.uint8),
        ([300, 1], torch.uint8),
        ([-1, 1], torch.uint8),
        ([2**24 + 1, 1], torch.float32),
    ],
)
def test_a_cast_from_a_file_loses_nothing(
    tmp_path: Path, saved: Any, wanted: Any, suffix: str
) -> None:
    tensor = torch.tensor(
        saved, dtype=torch.float32 if isinstance(saved[0], float) else torch.int32
    )
    if suffix == "pt":
        torch.save({"n": tensor}, tmp_path / "w.pt")
    else:
        pytest.importorskip("safetensors.torch").save_file(
            {"n": tensor}, tmp_path / "w.safetensors"
        )
    module = torch.nn.Module()
    module.register_buffer("n", torch.zeros(2, dtype=wanted))
    with pytest.raises(ckpt.StructureMismatch, match="1 do not fit"):
        load_into(tmp_path / f"w.{suffix}", module, cast=True)
