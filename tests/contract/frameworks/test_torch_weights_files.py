"""Weights files without the frameworks that they do not need, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
safetensors_torch: Any = pytest.importorskip("safetensors.torch")
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

import ckpt_core as ckpt  # noqa: E402
from ckpt_torchax import export_file, import_file, load_into, to_torch  # noqa: E402
from tests.support.refusals import refuse  # noqa: E402

DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int8", "bool", "int4"]

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = sys.modules["torchax"] = sys.modules["flax"] = None
import ckpt_core as ckpt
from ckpt_torchax import export_file, import_file
path, file, imported, other = sys.argv[1:]
export_file(path, file)
import_file(file, imported)
loaded = ckpt.load(imported, as_numpy=True)["model"]
found = {name: [array.dtype.name, list(array.shape), array.tobytes().hex()] for name, array in loaded.items()}
errors = []
for call in (lambda: export_file(path, file + ".pt"), lambda: import_file(file + ".none.pt", imported), lambda: import_file(other, imported)):
    try:
        call()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
print(json.dumps([found, errors]))
"""


class Zoo(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.arrays = nnx.Dict({name: nnx.Param(jnp.arange(4).astype(name)) for name in DTYPES})
        self.layers = nnx.List([nnx.Param(jnp.ones(()))])


def test_safetensors_come_from_any_checkpoint_without_torch(run_python: Any, tmp_path: Path):
    model = Zoo()
    ckpt.save(tmp_path / "a", model=model)
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pt")
    file = tmp_path / "w.safetensors"
    found, errors = run_python(
        WITHOUT_TORCH, *(str(tmp_path / name) for name in ("a", file.name, "b", "other.pt"))
    )
    kernel = np.asarray(model.linear.kernel.get_value())
    assert found["linear.kernel"] == ["float32", [2, 3], kernel.tobytes().hex()]
    assert found["layers.0"][:2] == ["float32", []]
    for name in DTYPES:
        expected = np.asarray(jnp.arange(4).astype(name))
        expected = expected.astype(np.int8) if name == "int4" else expected
        assert found[f"arrays.{name}"] == [expected.dtype.name, [4], expected.tobytes().hex()]
    assert (
        errors[0].startswith("ModuleNotFoundError")
        and "pip install 'ckpt-core[torchax]'" in errors[0]
    )
    assert "CheckpointNotFound" in errors[1]
    assert errors[2].startswith("ModuleNotFoundError") and "use .safetensors" in errors[2]
    theirs = safetensors_torch.load_file(file)  # the format is the documented one
    ours = to_torch(tmp_path / "b")
    assert theirs.keys() == ours.keys() == found.keys()
    assert all(theirs[name].dtype == ours[name].dtype for name in ours)
    assert all(torch.equal(theirs[name].float(), ours[name].float()) for name in ours)


def test_both_formats_hold_the_same(tmp_path: Path):
    tied = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)
    )
    tied[1].weight = tied[0].weight
    ckpt.save(tmp_path / "a", model=tied)
    for suffix in ("safetensors", "pt"):
        export_file(tmp_path / "a", tmp_path / f"w.{suffix}")
    one = safetensors_torch.load_file(tmp_path / "w.safetensors")
    other = torch.load(tmp_path / "w.pt")
    assert one.keys() == other.keys() == tied.state_dict().keys()
    for name, tensor in other.items():
        assert one[name].dtype == tensor.dtype and torch.equal(one[name], tensor)


PLAIN = """
import json, sys
sys.modules["torchax"] = None
import torch
from torch import nn
import ckpt_core as ckpt
from ckpt_torchax import export_file, load_into
model = nn.Linear(2, 3)
ckpt.save(sys.argv[1] + "/a", model=model)
found = []
for name in ("a", "w.safetensors", "w.pt"):
    if "." in name:
        export_file(sys.argv[1] + "/a", sys.argv[1] + "/" + name)
    target = nn.Linear(2, 3)
    weight = target.weight
    assert load_into(sys.argv[1] + "/" + name, target) is target
    found.append(target.weight is weight and type(weight) is nn.Parameter and torch.equal(weight, model.weight))
print(json.dumps(found))
"""


def test_a_module_on_the_cpu_is_filled_without_torchax(run_python: Any, tmp_path: Path):
    assert run_python(PLAIN, str(tmp_path)) == [True, True, True]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "a", model=nn.Linear(2, 3))
    export_file(tmp_path / "a", tmp_path / "w.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_what_cannot_be_looked_at_is_not_absent(
    name: str, saved: Path, monkeypatch: pytest.MonkeyPatch
):
    export_file(saved / "a", saved / "w.pt")
    refuse(monkeypatch, saved / name, calls=("stat",))
    with pytest.raises(PermissionError):
        import_file(saved / name, saved / "b")


@pytest.mark.parametrize("name", ["no.safetensors", "no.pt", "no.safetensors.index.json", "no"])
def test_what_does_not_exist_is_not_found(name: str, saved: Path):
    with pytest.raises(ckpt.CheckpointNotFound, match=rf"{name}: it does not exist"):
        load_into(saved / name, nn.Linear(2, 3))
    if "." in name:
        with pytest.raises(ckpt.CheckpointNotFound, match=rf"{name}: it does not exist"):
            import_file(saved / name, saved / "b")


def test_arguments_in_another_order_are_named(saved: Path):
    model, file = nn.Linear(2, 3), saved / "w.safetensors"
    with pytest.raises(
        TypeError, match=r"got a Linear: the path comes first.*load_into\(path, module"
    ):
        load_into(model, file)  # pyright: ignore
    with pytest.raises(TypeError, match=r"fills a torch.nn.Module, got a dict.*to_torch\(path\)"):
        load_into(file, {})  # pyright: ignore
    with pytest.raises(TypeError, match=r"got a Linear: the path comes first"):
        to_torch(model, saved / "a")  # pyright: ignore
    with pytest.raises(
        ValueError, match=r"the checkpoint comes first, as in export_file\(path, file\)"
    ):
        export_file(file, saved / "a")
    with pytest.raises(
        ValueError, match=r"the weights file comes first, as in import_file\(file, pa"
    ):
        import_file(saved / "b", file)
    with pytest.raises(TypeError, match="got a Linear: the weights file comes first"):
        import_file(model, file)  # pyright: ignore


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("make", [Custom, lambda: nn.Linear(2, 3)])
def test_of_a_pickled_module_no_code_is_run_and_none_advised(
    make: Any, zipped: bool, tmp_path: Path
):
    file = tmp_path / "w.pt"
    torch.save(make(), file, _use_new_zipfile_serialization=zipped)
    for call in (
        lambda: import_file(file, tmp_path / "a"),
        lambda: load_into(file, nn.Linear(2, 3)),
    ):
        with pytest.raises(
            ckpt.UnsupportedLeaf, match=rf"{type(make()).__name__}.*state_dict"
        ) as refused:
            call()
        assert "weights_only=False" not in str(refused.value) and refused.value.__cause__ is None
        assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\3\4 is no zip", b"text", b"\x80\x02."])
def test_a_damaged_pt_file_is_said_to_be_damaged(content: bytes, tmp_path: Path):
    file = tmp_path / "w.pt"
    file.write_bytes(content)
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"w\.pt"):
        import_file(file, tmp_path / "a")


def test_a_file_without_names_is_no_state_dict(tmp_path: Path):
    torch.save([torch.ones(1)], tmp_path / "w.pt")
    with pytest.raises(TypeError, match=r"holds a list, so it is no state_dict.*import_file"):
        load_into(tmp_path / "w.pt", nn.Linear(2, 3))


# ------------------------------------------------------------------------------ renamed modules


def named(name: str, width: int = 3) -> nn.Module:
    model = nn.Module()
    model.add_module(name, nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width)))
    model.add_module("fc_other", nn.Linear(2, 2))
    return model


def assert_same(model: nn.Module, name: str, other: nn.Module, before: str) -> None:
    expected = other.get_submodule(before).state_dict()
    found = model.get_submodule(name).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    "rename",
    [
        {"fc": "body"},
        {"fc.": "body."},
        {"fc.0": "body.0", "fc.1": "body.1"},
        {"fc": "nowhere", "fc.0": "body.0", "fc.1": "body.1"},  # the longest counts
        lambda path: path.replace("fc.", "body."),
    ],
)
def test_a_renamed_module_moves_with_all_in_it(rename: Any, tmp_path: Path):
    saved, model = named("fc"), named("body")
    ckpt.save(tmp_path / "a", model=saved)
    ckpt.restore(tmp_path / "a", model=model, rename=rename)
    assert_same(model, "body", saved, "fc")
    assert_same(model, "fc_other", saved, "fc_other")
    again = load_into(tmp_path / "a", named("body"), rename=rename)
    assert_same(again, "body", saved, "fc")


def test_renames_reach_modules_in_containers_and_take_prefixes_away(tmp_path: Path):
    saved = nn.Module()
    saved.add_module("module", named("fc"))
    ckpt.save(tmp_path / "a", {"net": saved, "step": 1})
    model = named("body")
    rename = {"net/module.": "net/", "net/module.fc": "net/body"}
    ckpt.restore(tmp_path / "a", {"net": model, "step": 0}, rename=rename)
    assert_same(model, "body", saved, "module.fc")
    for prefix in ("module", "module."):
        plain = named("fc")
        ckpt.save(tmp_path / prefix, model=saved)
        ckpt.restore(tmp_path / prefix, model=plain, rename={prefix: ""})
        assert_same(plain, "fc", saved, "module.fc")


def test_a_name_that_only_begins_alike_is_not_renamed(tmp_path: Path):
    ckpt.save(tmp_path / "a", model=named("fc"))
    with pytest.raises(ckpt.StructureMismatch, match=r"fc\.0\.bias: saved"):
        ckpt.restore(tmp_path / "a", model=named("body"), rename={"f": "body"})
