"""Weights files of PyTorch and safetensors: imported, exported, loaded into modules; and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
nets = pytest.importorskip("tests.support.torchax_nets")
safetensors_torch: Any = pytest.importorskip("safetensors.torch")
from flax import nnx  # noqa: E402
from torch import nn  # noqa: E402

import ckpt_core as ckpt  # noqa: E402
from ckpt_core import convert  # noqa: E402
from ckpt_torchax import export_file, import_file, load_into, to_torch  # noqa: E402
from tests.support.refusals import refuse  # noqa: E402
from tests.support.torch_modules import DTYPES, bits, bytes_of, make_saved  # noqa: E402, F401
from tests.support.torchax_nets import Net  # noqa: E402

# ------------------------------------------------------------------------------------ both ways


def all_bytes(state: Any) -> dict[str, bytes]:
    return {name: bytes_of(value) for name, value in state.items()}


def test_our_safetensors_and_theirs_are_the_same(tmp_path: Path):
    wide = {"int64", "uint64", "float64", "complex64", "complex128"}
    written = {name: bits(name) for name in DTYPES if name not in wide and "fnuz" not in name}
    safetensors_torch.save_file(written, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    import_file(tmp_path / "theirs.safetensors", tmp_path / "a")
    assert all_bytes(to_torch(tmp_path / "a")) == all_bytes(written)
    export_file(tmp_path / "a", tmp_path / "ours.safetensors")
    assert all_bytes(safetensors_torch.load_file(tmp_path / "ours.safetensors")) == all_bytes(
        written
    )


@pytest.mark.parametrize(
    ("kind", "enabled"), [("pt", False), ("pt", True), ("safetensors", True), ("index", False)]
)
def test_weights_files_load_into_torchax_on_globally_or_not(
    tmp_path: Path, kind: str, enabled: bool
):
    """Torchax, on globally, breaks the readers of safetensors' own library."""
    on_jax = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int8", "bool"]
    state = {f"a_{name}": bits(name) for name in on_jax}
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

    def use() -> None:
        load_into(file, module)
        import_file(file, tmp_path / "a")
        export_file(tmp_path / "a", tmp_path / "back.pt")
        export_file(tmp_path / "a", tmp_path / "back.safetensors")

    if enabled:
        with nets.torchax_enabled():
            use()
    else:
        use()
    for name, value in state.items():
        assert np.asarray(getattr(module, name).jax()).tobytes() == bytes_of(value), name
    assert all_bytes(torch.load(tmp_path / "back.pt")) == all_bytes(state)
    assert all_bytes(safetensors_torch.load_file(tmp_path / "back.safetensors")) == all_bytes(state)


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
    files = [tmp_path / f"a.{suffix}" for suffix in ("pt", "safetensors")]
    for file in files:
        export_file(path, file)
    assert files[0].stat().st_size < 6000, "tied weights are there twice"
    expected = [model.embed.weight.jax()[0].tolist(), "torch.int64"]
    assert run_python(PLAIN_PROCESS, *map(str, files)) == [expected, expected]
    import_file(files[0], tmp_path / "b")
    names = [leaf.path for leaf in ckpt.inspect(tmp_path / "b").items["model"].leaves]
    assert "head.weight" not in names  # once there, too
    target = Net(tied=True)
    ckpt.restore(tmp_path / "b", model=target)
    assert torch.equal(target.head.weight, to_torch(path)["head.weight"])


def test_tied_weights_have_their_values_under_each_name(tmp_path: Path):
    model = Net(tied=True)
    ckpt.save(tmp_path / "a", {"model": model})
    for suffix, export, load in (
        ("safetensors", convert.export_safetensors, safetensors_torch.load_file),
        ("pt", convert.export_torch, torch.load),
    ):
        export(tmp_path / "a", tmp_path / f"w.{suffix}", only="model/**")
        state = load(tmp_path / f"w.{suffix}")
        other = Net()
        other.load_state_dict({name.removeprefix("model."): one for name, one in state.items()})
        assert all_bytes(other.state_dict()) == all_bytes(model.state_dict())
    for name in ("head.weight", "embed.weight"):  # a pattern may name either
        file = tmp_path / f"{name}.safetensors"
        convert.export_safetensors(tmp_path / "a", file, only=f"model/{name}")
        (found,) = safetensors_torch.load_file(file).items()
        assert found[0] == f"model.{name}" and torch.equal(found[1], model.head.weight)


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
OF_JAX = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int8", "bool", "int4"]


class Zoo(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.arrays = nnx.Dict({name: nnx.Param(jnp.arange(4).astype(name)) for name in OF_JAX})
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
    for name in OF_JAX:
        expected = np.asarray(jnp.arange(4).astype(name))
        expected = expected.astype(np.int8) if name == "int4" else expected
        assert found[f"arrays.{name}"] == [expected.dtype.name, [4], expected.tobytes().hex()]
    assert errors[0].startswith("ModuleNotFoundError")
    assert "pip install 'ckpt-core[torchax]'" in errors[0]
    assert "CheckpointNotFound" in errors[1]
    assert errors[2].startswith("ModuleNotFoundError") and "use .safetensors" in errors[2]
    theirs, ours = safetensors_torch.load_file(file), to_torch(tmp_path / "b")
    assert theirs.keys() == ours.keys() == found.keys()
    assert all(theirs[name].dtype == ours[name].dtype for name in ours)
    assert all(torch.equal(theirs[name].float(), ours[name].float()) for name in ours)


# ----------------------------------------------------------------------------------- what fits


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
    ("saved", "wanted", "suffix"),
    [
        ([1.0, float("nan")], torch.int32, "pt"),
        ([1.0, 3e9], torch.int32, "safetensors"),
        ([1.0, -1.0], torch.uint8, "pt"),
        ([300, 1], torch.uint8, "safetensors"),
        ([2**24 + 1, 1], torch.float32, "safetensors"),
    ],
)
def test_a_cast_from_a_file_loses_nothing(tmp_path: Path, saved: Any, wanted: Any, suffix: str):
    dtype = torch.float32 if isinstance(saved[0], float) else torch.int32
    save = torch.save if suffix == "pt" else safetensors_torch.save_file
    save({"n": torch.tensor(saved, dtype=dtype)}, tmp_path / f"w.{suffix}")
    module = nn.Module()
    module.register_buffer("n", torch.zeros(2, dtype=wanted))
    with pytest.raises(ckpt.StructureMismatch, match="1 do not fit"):
        load_into(tmp_path / f"w.{suffix}", module, cast=True)


# ------------------------------------------------------------------------------------- damaged

W, B = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
GOOD = {
    "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
}
DATA = W.tobytes() + B.tobytes()


def entry(**changed: Any) -> str:
    return json.dumps({**GOOD, "bias": {**GOOD["bias"], **changed}})


DAMAGED: dict[str, tuple[str, bytes]] = {
    "overlap": (entry(data_offsets=[20, 28]), DATA[:28]),
    "gap": (entry(data_offsets=[28, 36]), DATA + bytes(4)),
    "a name twice": (json.dumps(GOOD)[:-1] + ', "bias": ' + json.dumps(GOOD["bias"]) + "}", DATA),
    "bytes after the end": (json.dumps(GOOD), DATA + b"more"),
    "truncated": (json.dumps(GOOD), DATA[:-1]),
    "no data": (json.dumps(GOOD), b""),
    "a negative dimension": (entry(shape=[-2, -1]), DATA),
    "a dimension that is no integer": (entry(shape=[2.0]), DATA),
    "another size": (entry(shape=[3]), DATA),
    "offsets backwards": (entry(data_offsets=[32, 24]), DATA),
    "a key too many": (entry(more=1), DATA),
    "no JSON": ("{", DATA),
    "deep JSON": ("[" * 200_000, DATA),
    "a list": ("[]", DATA),
}
WAYS: dict[str, Any] = {
    "load": lambda file, _: ckpt.load(file),
    "load as numpy": lambda file, _: ckpt.load(file, as_numpy=True),
    "restore": lambda file, module: ckpt.restore(file, model=module),
    "load_into": load_into,
    "import_file": lambda file, _: import_file(file, file.parent / "imported"),
    "import_weights": lambda file, _: convert.import_weights(file, file.parent / "imported"),
}


def write(path: Path, header: str, data: bytes, by_index: bool) -> Path:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    if not by_index:
        return path
    index = path.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(GOOD, path.name)}))
    return index


ROWS = [(damage, [*WAYS][n % 6], n % 4 < 2) for n, damage in enumerate(DAMAGED)]
ROWS += [("truncated", way, n % 2 == 0) for n, way in enumerate(WAYS)]


@pytest.mark.parametrize(("damage", "way", "by_index"), ROWS)
def test_no_way_in_takes_it(tmp_path: Path, way: str, by_index: bool, damage: str):
    sound = write(tmp_path / "model.safetensors", json.dumps(GOOD), DATA, by_index)
    module = nn.Linear(3, 2)
    WAYS[way](sound, nn.Linear(3, 2))
    before = module.weight.detach().clone()
    place = tmp_path / "damaged"
    place.mkdir()
    file = write(place / "model.safetensors", *DAMAGED[damage], by_index)
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"model\.safetensors"):
        WAYS[way](file, module)
    assert not (place / "imported").exists()
    assert torch.equal(module.weight, before)


def test_what_may_be_newer_and_what_points_elsewhere(tmp_path: Path):
    file = write(tmp_path / "w.safetensors", entry(dtype="F99"), DATA, by_index=False)
    with pytest.raises(ckpt.CheckpointError, match=r"w\.safetensors") as caught:
        import_file(file, tmp_path / "a")
    assert not isinstance(caught.value, ckpt.CheckpointCorrupt)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    with pytest.raises(ckpt.CheckpointCorrupt, match="impossible name of a file"):
        import_file(index, tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"PK\3\4 is no zip", b"text", b"\x80\x02."])
def test_a_damaged_pt_file_is_said_to_be_damaged(content: bytes, tmp_path: Path):
    file = tmp_path / "w.pt"
    file.write_bytes(content)
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"w\.pt"):
        import_file(file, tmp_path / "a")


# ------------------------------------------------------------------------------------- refused


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(("make", "zipped"), [(Custom, True), (lambda: nn.Linear(2, 3), False)])
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
        assert "weights_only=False" not in str(refused.value)


def test_suffixes_and_values_that_no_file_holds_are_refused(tmp_path: Path):
    ckpt.save(tmp_path / "a", model={"w": torch.ones(2), "step": 3})
    with pytest.raises(ValueError, match=r"\.safetensors, \.pt"):
        export_file(tmp_path / "a", tmp_path / "w.npz")
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"step: safetensors holds arrays.*\.pt"):
        export_file(tmp_path / "a", tmp_path / "w.safetensors")
    assert not list(tmp_path.glob("*w.*")), "nothing is left behind"
    export_file(tmp_path / "a", tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt")["step"] == 3
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "nested.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    for name in ("nested", "list"):
        with pytest.raises(TypeError, match="import_file"):
            load_into(tmp_path / f"{name}.pt", nn.Linear(2, 2, device="meta"))
    import_file(tmp_path / "nested.pt", tmp_path / "b")
    assert ckpt.load(tmp_path / "b")["model"]["epoch"] == 1


@pytest.fixture(name="linear")
def make_linear(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "a", model=nn.Linear(2, 3))
    for suffix in ("safetensors", "pt"):
        export_file(tmp_path / "a", tmp_path / f"w.{suffix}")
    return tmp_path


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_what_cannot_be_looked_at_is_not_absent(
    name: str, linear: Path, monkeypatch: pytest.MonkeyPatch
):
    refuse(monkeypatch, linear / name, calls=("stat",))
    with pytest.raises(PermissionError):
        import_file(linear / name, linear / "b")


@pytest.mark.parametrize("name", ["no.safetensors", "no.pt", "no.safetensors.index.json", "no"])
def test_what_does_not_exist_is_not_found(name: str, tmp_path: Path):
    with pytest.raises(ckpt.CheckpointNotFound, match=rf"{name}: it does not exist"):
        load_into(tmp_path / name, nn.Linear(2, 3))
    if "." in name:
        with pytest.raises(ckpt.CheckpointNotFound, match=rf"{name}: it does not exist"):
            import_file(tmp_path / name, tmp_path / "b")


def test_arguments_in_another_order_are_named(linear: Path):
    model, file, path = nn.Linear(2, 3), linear / "w.safetensors", linear / "a"
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: load_into(model, file), TypeError, r"got a Linear: the path comes first.*module"),
        (lambda: load_into(file, {}), TypeError, r"got a dict.*to_torch\(path\)"),
        (lambda: to_torch(model, path), TypeError, "got a Linear: the path comes first"),
        (lambda: export_file(file, path), ValueError, r"comes first, as in export_file\(path, f"),
        (lambda: import_file(path, file), ValueError, r"comes first, as in import_file\(file, pa"),
        (lambda: import_file(model, file), TypeError, "Linear: the weights file comes first"),
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


# ------------------------------------------------------------------------------ renamed modules


def named(name: str) -> nn.Module:
    model = nn.Module()
    model.add_module(name, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    model.add_module("fc_other", nn.Linear(2, 2))
    return model


def assert_same(model: nn.Module, name: str, other: nn.Module, before: str) -> None:
    expected = other.get_submodule(before).state_dict()
    assert all_bytes(model.get_submodule(name).state_dict()) == all_bytes(expected)


@pytest.mark.parametrize(
    "rename",
    [
        {"fc": "body"},
        {"fc.": "body."},
        {"fc": "nowhere", "fc.0": "body.0", "fc.1": "body.1"},  # the longest counts
        lambda path: path.replace("fc.", "body."),
    ],
)
def test_a_renamed_module_moves_with_all_in_it(rename: Any, tmp_path: Path):
    model, other = named("fc"), named("body")
    ckpt.save(tmp_path / "a", model=model)
    ckpt.restore(tmp_path / "a", model=other, rename=rename)
    assert_same(other, "body", model, "fc")
    assert_same(other, "fc_other", model, "fc_other")
    assert_same(load_into(tmp_path / "a", named("body"), rename=rename), "body", model, "fc")


def test_renames_reach_modules_in_containers_and_take_prefixes_away(tmp_path: Path):
    model = nn.Module()
    model.add_module("module", named("fc"))
    ckpt.save(tmp_path / "a", {"net": model, "step": 1})
    other = named("body")
    rename = {"net/module.": "net/", "net/module.fc": "net/body"}
    ckpt.restore(tmp_path / "a", {"net": other, "step": 0}, rename=rename)
    assert_same(other, "body", model, "module.fc")
    for prefix in ("module", "module."):
        plain = named("fc")
        ckpt.save(tmp_path / prefix, model=model)
        ckpt.restore(tmp_path / prefix, model=plain, rename={prefix: ""})
        assert_same(plain, "fc", model, "module.fc")
    with pytest.raises(ckpt.StructureMismatch, match=r"module\.fc\.0\.bias: saved"):
        ckpt.restore(
            tmp_path / "module", model=named("fc"), rename={"mod": ""}
        )  # only begins alike
