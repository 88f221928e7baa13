"""``ckpt export`` of a module with tied weights gives what ``load_state_dict`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from ckpt_core import convert

torch: Any = pytest.importorskip("torch")
safetensors_torch: Any = pytest.importorskip("safetensors.torch")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3))
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.inner[0]


@pytest.fixture
def module():
    return Tied()


def check(module: torch.nn.Module, state: dict) -> None:
    other = Tied()
    other.load_state_dict(state)  # strict
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("nested", [False, True])
def test_every_name_has_its_tensor(tmp_path: Path, module: torch.nn.Module, nested: bool) -> None:
    ckpt.save(tmp_path / "a", {"model": module} if nested else module)
    only = {"only": "model/**"} if nested else {}
    convert.export_safetensors(tmp_path / "a", tmp_path / "w.safetensors", **only)
    convert.export_torch(tmp_path / "a", tmp_path / "w.pt", **only)
    convert.export_npz(tmp_path / "a", tmp_path / "w.npz", **only)
    start = "model." if nested else ""
    state = safetensors_torch.load_file(tmp_path / "w.safetensors")
    check(module, {name.removeprefix(start): tensor for name, tensor in state.items()})
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    check(module, {name.removeprefix(start): tensor for name, tensor in state.items()})


def test_a_pattern_may_name_either(tmp_path: Path, module: torch.nn.Module) -> None:
    ckpt.save(tmp_path / "a", module)
    for name in ("head.weight", "embed.weight"):
        convert.export_safetensors(tmp_path / "a", tmp_path / f"{name}.safetensors", only=name)
        (found,) = safetensors_torch.load_file(tmp_path / f"{name}.safetensors").items()
        assert found[0] == name and torch.equal(found[1], module.head.weight)


def test_a_key_that_only_has_the_name_stays(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"_tied_weights": {"x": {"y": True}}, "w": 1.0})
    convert.export_npz(tmp_path / "a", tmp_path / "w.npz")
    assert len(ckpt.inspect(tmp_path / "a").items["state"].leaves) == 2
