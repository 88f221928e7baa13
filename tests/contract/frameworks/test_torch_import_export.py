"""Weights files of PyTorch and safetensors: imported and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nets = pytest.importorskip("tests.support.torchax_nets")
safetensors_torch = pytest.importorskip("safetensors.torch")
from torch import nn  # noqa: E402

import ckpt_core as ckpt  # noqa: E402
from ckpt_torchax import export_file, import_file, load_into, to_torch  # noqa: E402
from tests.support.torch_modules import (  # noqa: E402
    DTYPES,
    bits,
    bytes_of,
    make_saved,  # noqa: F401 (fixtures)
)
from tests.support.torchax_nets import Net  # noqa: E402


def zoo() -> dict[str, Any]:
    """One tensor of each dtype that safetensors, torch and torchax have."""
    wide = {"int64", "uint64", "float64", "complex64", "complex128"}
    return {dtype: bits(dtype) for dtype in DTYPES if dtype not in wide}


ON_JAX = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int8", "bool"]


def test_our_safetensors_and_theirs_are_the_same(tmp_path: Path):
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    written = {n: v for n, v in zoo().items() if "fnuz" not in n}  # their writer lacks these
    safetensors_torch.save_file(written, theirs, metadata={"format": "pt"})
    import_file(theirs, tmp_path / "a")
    loaded = to_torch(tmp_path / "a")
    assert {name: bytes_of(value) for name, value in loaded.items()} == {
        name: bytes_of(value) for name, value in written.items()
    }
    export_file(tmp_path / "a", ours)
    back = safetensors_torch.load_file(ours)
    assert {name: bytes_of(value) for name, value in back.items()} == {
        name: bytes_of(value) for name, value in written.items()
    }


@pytest.mark.parametrize("kind", ["pt", "safetensors", "index"])
@pytest.mark.parametrize("enabled", [False, True])
def test_weights_files_load_into_torchax_on_globally_or_not(
    tmp_path: Path, kind: str, enabled: bool
):
    """Torchax, on globally, breaks the readers of safetensors' own library."""
    state = {f"a_{name}": value for name, value in zoo().items() if name in ON_JAX}
    file = tmp_path / f"w.{kind}"
    if kind == "pt":
        torch.save(state, file)
    elif kind == "safetensors":
        safetensors_torch.save_file(state, file)
    else:
        file = tmp_path / "model.safetensors.index.json"
        places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(state)}
        for place in set(places.values()):
            part = {name: value for name, value in state.items() if places[name] == place}
            safetensors_torch.save_file(part, tmp_path / place)
        file.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    module = nn.Module()
    for name, value in state.items():
        module.register_buffer(name, torch.empty_like(value, device="meta"))
    if enabled:
        with nets.torchax_enabled():
            load_into(file, module)
            import_file(file, tmp_path / "a")
            export_file(tmp_path / "a", tmp_path / "back.pt")
            export_file(tmp_path / "a", tmp_path / "back.safetensors")
    else:
        load_into(file, module)
        import_file(file, tmp_path / "a")
        export_file(tmp_path / "a", tmp_path / "back.pt")
        export_file(tmp_path / "a", tmp_path / "back.safetensors")
    for name, value in state.items():
        assert np.asarray(getattr(module, name).jax()).tobytes() == bytes_of(value), name
    for back in (
        torch.load(tmp_path / "back.pt"),
        safetensors_torch.load_file(tmp_path / "back.safetensors"),
    ):
        assert {n: bytes_of(v) for n, v in back.items()} == {
            n: bytes_of(v) for n, v in state.items()
        }


PLAIN_PROCESS = """
import json, sys
sys.modules["jax"] = sys.modules["torchax"] = None
import torch, safetensors.torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
model = Net()
out = []
for state in (torch.load(sys.argv[1]), safetensors.torch.load_file(sys.argv[2])):
    model.load_state_dict(state, strict=True)
    out.append([model.head.weight[0].tolist(), str(state["norm.num_batches_tracked"].dtype)])
print(json.dumps(out))
"""


def test_exported_files_load_in_a_process_without_jax(saved: Any, run_python: Any, tmp_path: Path):
    path, model = saved
    export_file(path, tmp_path / "a.pt")
    export_file(path, tmp_path / "a.safetensors")
    assert (tmp_path / "a.pt").stat().st_size < 6000, "tied weights are there twice"
    expected = [model.embed.weight.jax()[0].tolist(), "torch.int64"]
    assert run_python(
        PLAIN_PROCESS, *(str(tmp_path / f"a.{s}") for s in ("pt", "safetensors"))
    ) == [
        expected,
        expected,
    ]


def test_tied_weights_of_a_file_are_stored_once(saved: Any, tmp_path: Path):
    path, _ = saved
    export_file(path, tmp_path / "a.pt")
    import_file(tmp_path / "a.pt", tmp_path / "b")
    names = [leaf.path for leaf in ckpt.inspect(tmp_path / "b").items["model"].leaves]
    assert "head.weight" not in names
    target = Net(tied=True)
    ckpt.restore(tmp_path / "b", model=target)
    assert torch.equal(target.head.weight, to_torch(path)["head.weight"])


def test_files_are_compared_before_anything_is_set(tmp_path: Path):
    file = tmp_path / "w.safetensors"
    safetensors_torch.save_file(
        {"weight": torch.ones(3, 2), "bias": torch.ones(2).double(), "other": torch.ones(1)}, file
    )
    module = nn.Linear(2, 2, device="meta")
    module.register_buffer("more", torch.empty(1, device="meta"))
    with pytest.raises(ckpt.StructureMismatch) as caught:
        load_into(file, module)
    assert sorted((m.path, m.kind) for m in caught.value.mismatches) == [
        ("bias", "dtype"),
        ("more", "missing"),
        ("other", "unexpected"),
        ("weight", "shape"),
    ]
    assert module.weight.is_meta


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:5],
        lambda data: data[:40],
        lambda data: data[:-1],
        lambda data: (2**60).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"[" * (len(data) - 8),
        lambda data: data.replace(b'"F32"', b'"F99"'),
    ],
)
def test_damaged_safetensors_are_refused_by_name(tmp_path: Path, damage: Any):
    file = tmp_path / "w.safetensors"
    safetensors_torch.save_file({"weight": torch.ones(3, 2)}, file)
    file.write_bytes(damage(file.read_bytes()))
    unknown = b'"F99"' in file.read_bytes()  # maybe of a newer format, which is no damage
    expected = ckpt.CheckpointError if unknown else ckpt.CheckpointCorrupt
    with pytest.raises(expected, match=r"w\.safetensors"):
        import_file(file, tmp_path / "a")


def test_an_index_cannot_point_elsewhere(tmp_path: Path):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    with pytest.raises(ckpt.CheckpointCorrupt, match="impossible name of a file"):
        import_file(file, tmp_path / "a")


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("code of the file runs",))


def test_pt_files_run_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"w": Hostile()}, tmp_path / "w.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        import_file(tmp_path / "w.pt", tmp_path / "a")
    assert "runs" not in capsys.readouterr().out


def test_suffixes_and_values_that_no_file_holds_are_refused(tmp_path: Path):
    ckpt.save(tmp_path / "a", model={"w": torch.ones(2), "step": 3})
    with pytest.raises(ValueError, match=r"\.safetensors, \.pt"):
        export_file(tmp_path / "a", tmp_path / "w.npz")
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"step: safetensors holds arrays.*\.pt"):
        export_file(tmp_path / "a", tmp_path / "w.safetensors")
    assert not list(tmp_path.glob("*w.*")), "nothing is left behind"
    export_file(tmp_path / "a", tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt")["step"] == 3
    nested = tmp_path / "nested.pt"
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 1}, nested)
    with pytest.raises(TypeError, match="import_file"):
        load_into(nested, nn.Linear(2, 2, device="meta"))
    import_file(nested, tmp_path / "b")
    assert ckpt.load(tmp_path / "b")["model"]["epoch"] == 1
