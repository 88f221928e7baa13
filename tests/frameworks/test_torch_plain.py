"""PyTorch without torchax, and the ways between it, torchax, and weights files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
nets = pytest.importorskip("tests.support.torchax_nets")
safetensors_torch = pytest.importorskip("safetensors.torch")

from torch import nn  # noqa: E402

import ckpt_core as ckpt  # noqa: E402
from ckpt_torchax import export_file, import_file, load_into, to_torch  # noqa: E402
from tests.support.torchax_nets import Net, net, same, values  # noqa: E402

torchax = nets.torchax

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def bits(dtype: str, count: int = 64) -> Any:
    """A tensor of random bits; of bools, for bool."""
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    numbers = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, count * width)
    return torch.from_numpy(numbers.astype(np.uint8)).view(getattr(torch, dtype))


def bytes_of(value: Any) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.register_buffer("x", value)


# -------------------------------------------------------------------------- CPU tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_bit_by_bit(tmp_path: Path, dtype: str):
    value = bits(dtype)
    ckpt.save(tmp_path / "a", model=Holder(value))
    target = Holder(torch.zeros_like(value))
    same_object = target.x
    ckpt.restore(tmp_path / "a", model=target)
    assert target.x is same_object
    assert bytes_of(target.x) == bytes_of(value)
    assert bytes_of(to_torch(tmp_path / "a")["x"]) == bytes_of(value)


def test_reading_a_cpu_tensor_copies_nothing():
    from ckpt_torchax import ADAPTER

    for dtype in DTYPES:
        value = bits(dtype)
        array = ADAPTER.get_state(Holder(value))["x"]
        assert array.__array_interface__["data"][0] == value.data_ptr(), dtype


STRIDES = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(0, 3),
    "requires_grad": lambda: torch.ones(2, requires_grad=True),
    "bfloat16, sliced": lambda: torch.arange(12).to(torch.bfloat16)[1::2],
}


@pytest.mark.parametrize("name", STRIDES)
def test_however_it_lies_in_memory(tmp_path: Path, name: str):
    make = STRIDES[name]
    ckpt.save(tmp_path / "a", {"x": make()})
    target = {"x": make()}
    if name != "expanded":
        target["x"].detach().zero_()
    else:
        target["x"] = torch.zeros(3).expand(2, 3)
    before = target["x"].detach().clone()
    loaded = ckpt.load(tmp_path / "a", target)["x"]
    assert loaded is not target["x"] and loaded.requires_grad == target["x"].requires_grad
    assert torch.equal(loaded, make()) and torch.equal(target["x"], before)
    restored = ckpt.restore(tmp_path / "a", state=target)["state"]["x"]
    assert restored is target["x"]
    assert torch.equal(restored, make())


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex32": lambda: torch.zeros(2, dtype=torch.complex32),
    "is not initialized": lambda: nn.parameter.UninitializedBuffer(),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of prototypes and of what is deprecated
@pytest.mark.parametrize("word", REFUSED)
def test_20_what_cannot_be_saved_is_named(tmp_path: Path, word: str):
    with pytest.raises(ckpt.UnsupportedLeaf, match=word) as caught:
        ckpt.save(tmp_path / "a", model=nn.Sequential(Holder(REFUSED[word]())))
    assert caught.value.leaf == "0.x"
    assert not (tmp_path / "a").exists()


def test_20_meta_tensors_have_nothing_to_save(tmp_path: Path):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"weight.*no values"):
        ckpt.save(tmp_path / "a", model=model)


def test_entries_that_a_hook_makes_are_refused(tmp_path: Path):
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update(copy=torch.ones(2))
    )
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"copy: a hook made this.*load_state_dict"):
        ckpt.save(tmp_path / "a", model=model)


@pytest.mark.slow  # 5 s for torch to import its compiler
@pytest.mark.filterwarnings("ignore")  # torch's own, when it first compiles
def test_compiled_modules_have_the_names_of_the_bare_one(tmp_path: Path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    ckpt.save(tmp_path / "a", model=torch.compile(model, backend="eager"))
    ckpt.restore(tmp_path / "a", model=torch.compile(other, backend="eager"))
    assert same(values(model), values(other))


def test_generators_and_other_objects_with_a_state_dict(tmp_path: Path):
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ckpt.save(tmp_path / "a", generator=generator, scaler=scaler)
    expected = torch.rand(5, generator=generator)
    other = torch.Generator()
    fresh = torch.amp.GradScaler("cpu")
    ckpt.restore(tmp_path / "a", generator=other, scaler=fresh)
    assert torch.equal(torch.rand(5, generator=other), expected)
    assert fresh.state_dict()["scale"] == 8.0


def test_objects_of_torch_without_state_are_refused_by_type(tmp_path: Path):
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"torch\.dtype"):
        ckpt.save(tmp_path / "a", {"dtype": torch.float32})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    ],
)
def test_13_optimizers_of_plain_torch(tmp_path: Path, make: Any):
    def start() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return model, make(model.parameters())

    def step(model: Any, optimizer: Any, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = start()
    step(model, optimizer, 1)
    ckpt.save(tmp_path / "a", model=model, optimizer=optimizer)
    other, fresh = start()
    ckpt.restore(tmp_path / "a", model=other, optimizer=fresh)
    for seed in (2, 3):
        step(model, optimizer, seed)
        step(other, fresh, seed)
    assert same(values(model), values(other))
    groups = [[g["lr"] for g in o.param_groups] for o in (optimizer, fresh)]
    assert groups[0] == groups[1]
    ckpt.restore(tmp_path / "a", optimizer=fresh)  # into one that has a state, too
    assert (
        ckpt.load(tmp_path / "a")["optimizer"]["state"].keys() == fresh.state_dict()["state"].keys()
    )


def test_13_lbfgs_with_its_lists(tmp_path: Path):
    def start() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)

    def step(model: Any, optimizer: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 3)) - 1).square().sum() + model.weight.pow(4).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = start()
    step(model, optimizer)
    ckpt.save(tmp_path / "a", model=model, optimizer=optimizer)
    other, fresh = start()
    ckpt.restore(tmp_path / "a", model=other, optimizer=fresh)
    step(model, optimizer)
    step(other, fresh)
    assert same(values(model), values(other))


def test_a_fresh_optimizer_inside_of_a_container_is_refused(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckpt.save(tmp_path / "a", state={"optimizer": optimizer})
    fresh = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(ckpt.StructureMismatch, match="momentum_buffer"):
        ckpt.restore(tmp_path / "a", state={"optimizer": fresh})


# ------------------------------------------------------------- between torchax and torch


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A tied Net on JAX arrays, in a checkpoint, and the module."""
    with nets.torchax_enabled():
        model = net(0, tied=True)
        model.norm.num_batches_tracked.add_(5)
        ckpt.save(tmp_path / "saved", model=model, step=7)
    return tmp_path / "saved", model


def test_a_torchax_checkpoint_restores_into_a_cpu_module(saved: Any):
    path, model = saved
    on_cpu = Net(tied=True)
    ckpt.restore(path, model=on_cpu)
    assert on_cpu.norm.num_batches_tracked.dtype == torch.int64
    assert on_cpu.norm.num_batches_tracked == 5
    np.testing.assert_array_equal(on_cpu.head.weight.detach(), model.embed.weight.jax())
    assert on_cpu.head.weight is on_cpu.embed.weight


def test_a_cpu_checkpoint_restores_into_a_torchax_module(tmp_path: Path):
    model = Net()
    ckpt.save(tmp_path / "a", model=model)
    with nets.torchax_enabled():
        other = net(1)
        with pytest.raises(ckpt.StructureMismatch, match="num_batches_tracked: dtype"):
            ckpt.restore(tmp_path / "a", model=other)
        ckpt.restore(tmp_path / "a", model=other, cast=True)
        assert other.head.weight.jax().tolist() == model.head.weight.tolist()
        model.norm.num_batches_tracked.fill_(2**40)
        ckpt.save(tmp_path / "b", model=model)
        before = values(other)
        with pytest.raises(ckpt.StructureMismatch, match="1099511627776"):
            ckpt.restore(tmp_path / "b", model=other, cast=True)
        assert same(values(other), before)


def test_to_torch(saved: Any):
    path, model = saved
    state = to_torch(path)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert state["head.weight"] is state["embed.weight"]
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    Net().load_state_dict(state, strict=True)
    on_cpu = Net(tied=True)
    assert to_torch(path, on_cpu) is on_cpu
    np.testing.assert_array_equal(on_cpu.embed.weight.detach(), model.embed.weight.jax())
    with pytest.raises(ckpt.StructureMismatch, match=r"0\.weight"):
        to_torch(path, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ckpt.CheckpointNotFound):
        to_torch(path, item="other")


def test_to_torch_asks_which_item(tmp_path: Path):
    ckpt.save(tmp_path / "a", one={"w": torch.ones(2)}, two={"w": torch.ones(3)})
    with pytest.raises(ValueError, match="one, two"):
        to_torch(tmp_path / "a")
    assert to_torch(tmp_path / "a", item="two")["w"].shape == (3,)


def test_to_torch_makes_a_meta_module(saved: Any):
    path, model = saved
    with torch.device("meta"):
        on_meta = Net(tied=True)
    with pytest.raises(ckpt.StructureMismatch, match="table"):
        to_torch(path, on_meta)
    on_meta.table = torch.arange(3.0)
    to_torch(path, on_meta)
    assert on_meta.head.weight is on_meta.embed.weight
    assert on_meta.head.weight.device.type == "cpu"
    assert on_meta.table.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(on_meta.embed.weight.detach(), model.embed.weight.jax())


BROKEN = """
import json, sys
import ckpt_torchax
imported = sorted({"torch", "torchax", "jax"} & set(sys.modules))
import ckpt_core as ckpt
loaded = ckpt.load(sys.argv[1], as_numpy=True)["model"]["embed.weight"].tolist()
import torch
try:
    import torchax
    reason = "importable"
except AttributeError as error:
    reason = str(error)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
ckpt.save(sys.argv[2], model=Net())
ckpt.restore(sys.argv[2], model=Net())
from ckpt_torchax import load_into, to_torch
assert to_torch(sys.argv[1])["head.weight"].tolist() == loaded
assert load_into(sys.argv[2], Net()).w.tolist() == [1, 1]  # on the CPU, where it was
try:
    load_into(sys.argv[2], Net().to("meta"))
    remedy = ""
except ModuleNotFoundError as error:
    remedy = str(error)
print(json.dumps([imported, loaded, reason, remedy]))
"""


def test_21_a_broken_torchax_disturbs_nobody(saved: Any, run_python: Any, tmp_path: Path):
    path, model = saved
    imported, loaded, reason, remedy = run_python(BROKEN, str(path), str(tmp_path / "b"))
    assert imported == []
    assert loaded == model.embed.weight.jax().tolist()
    assert "no overload name" in reason, "the pair is mended: delete ckpt_torchax.shim"
    assert "cannot be imported with torch" in remedy
    assert "ckpt_torchax.shim.install()" in remedy


TORCH_ABSENT = """
import json, sys
sys.modules["torch"] = None
import ckpt_torchax, ckpt_core as ckpt
try:
    ckpt_torchax.to_torch
    told = ""
except ModuleNotFoundError as error:
    told = str(error)
print(json.dumps([ckpt.load(sys.argv[1])["model"]["embed.weight"].tolist(), told]))
"""


def test_21_without_torch_a_checkpoint_is_arrays(saved: Any, run_python: Any):
    path, model = saved
    loaded, told = run_python(TORCH_ABSENT, str(path))
    assert loaded == model.embed.weight.jax().tolist()
    assert "pip install 'ckpt-core[torchax]'" in told


# ---------------------------------------------------------------------------- load_into


def on_meta(tied: bool = True) -> Any:
    with torch.device("meta"):
        return Net(tied)


def test_16_a_meta_module_goes_straight_to_its_devices(saved: Any, mesh: Any):
    path, model = saved
    module = on_meta()
    with pytest.raises(ckpt.StructureMismatch, match=r"table: wanted a non-persistent buffer"):
        load_into(path, module)
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    load_into(
        path, module, shardings={"embed.weight": sharding}, buffers={"table": torch.arange(3.0)}
    )
    assert module.embed.weight.jax().sharding == sharding
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.requires_grad
    assert not module.norm.running_mean.requires_grad
    assert isinstance(module.table, torchax.tensor.Tensor)
    assert module.table.jax().tolist() == [0, 1, 2]
    assert same(values(module), values(model))
    with nets.torchax_enabled():
        tokens, _ = nets.batch(0)
        np.testing.assert_allclose(
            module.eval()(tokens).jax(), model.eval()(tokens).jax(), rtol=1e-5, atol=1e-6
        )


def test_16_what_was_made_beside_the_meta_device_follows(saved: Any):
    path, _ = saved
    module = on_meta()
    module.table = torch.arange(3.0) + 1
    load_into(path, module)
    assert module.table.jax().tolist() == [1, 2, 3]


def test_16_nothing_changes_unless_everything_fits(saved: Any):
    path, _ = saved
    module = on_meta()
    module.head = nn.Linear(8, 12, bias=False, device="meta")
    table = {"table": torch.arange(3.0)}
    with pytest.raises(ckpt.StructureMismatch, match=r"head\.weight"):
        load_into(path, module, buffers=table)
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    with pytest.raises(KeyError, match="tabel"):
        load_into(path, on_meta(), buffers={"tabel": torch.arange(3.0)})
    with pytest.raises(ValueError, match="shape"):
        load_into(path, on_meta(), buffers={"table": torch.arange(4.0)})


def test_16_a_checkpointer_restores_into_a_meta_module(tmp_path: Path):
    with nets.torchax_enabled(), ckpt.Checkpointer(tmp_path) as checkpointer:
        model = nn.Linear(3, 2).to("jax")
        checkpointer.save(0, model=model)
        torchax.disable_globally()
        with torch.device("meta"):
            module = nn.Linear(3, 2)
        torchax.enable_globally()
        checkpointer.wait_until_finished()
        checkpointer.restore_latest(model=module)
        assert same(values(module), values(model))


def test_16_counters_of_plain_torch_fit_or_are_refused(tmp_path: Path):
    model = Net()
    model.norm.num_batches_tracked.fill_(9)
    ckpt.save(tmp_path / "a", model=model)
    table = {"table": torch.arange(3.0)}
    module = load_into(tmp_path / "a", on_meta(tied=False), buffers=table)
    counter = module.norm.num_batches_tracked.jax()
    assert (counter.dtype.name, int(counter)) == ("int32", 9)
    model.norm.num_batches_tracked.fill_(2**40)
    ckpt.save(tmp_path / "b", model=model)
    with pytest.raises(ckpt.StructureMismatch, match="num_batches_tracked"):
        load_into(tmp_path / "b", on_meta(tied=False), buffers=table)


# -------------------------------------------------------------------------------- files


def zoo() -> dict[str, Any]:
    """One tensor of each dtype that safetensors, torch and torchax have."""
    wide = {"int64", "uint64", "float64", "complex64", "complex128"}
    return {dtype: bits(dtype) for dtype in DTYPES if dtype not in wide}


ON_JAX = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int8", "bool"]


def test_17_our_safetensors_and_theirs_are_the_same(tmp_path: Path):
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
def test_17_files_into_torchax(tmp_path: Path, kind: str, enabled: bool):
    """18 as well: torchax, on globally, breaks the readers of safetensors' own library."""
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


def test_17_exported_files_load_in_a_process_without_jax(
    saved: Any, run_python: Any, tmp_path: Path
):
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


def test_17_tied_weights_of_a_file_are_stored_once(saved: Any, tmp_path: Path):
    path, _ = saved
    export_file(path, tmp_path / "a.pt")
    import_file(tmp_path / "a.pt", tmp_path / "b")
    names = [leaf.path for leaf in ckpt.inspect(tmp_path / "b").items["model"].leaves]
    assert "head.weight" not in names
    target = Net(tied=True)
    ckpt.restore(tmp_path / "b", model=target)
    assert torch.equal(target.head.weight, to_torch(path)["head.weight"])


def test_17_files_are_compared_before_anything_is_set(tmp_path: Path):
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
def test_17_damaged_files(tmp_path: Path, damage: Any):
    file = tmp_path / "w.safetensors"
    safetensors_torch.save_file({"weight": torch.ones(3, 2)}, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ckpt.CheckpointCorrupt, match=r"w\.safetensors"):
        import_file(file, tmp_path / "a")


def test_17_an_index_cannot_point_elsewhere(tmp_path: Path):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    with pytest.raises(ckpt.CheckpointCorrupt, match="other directories"):
        import_file(file, tmp_path / "a")


class Hostile:
    def __reduce__(self) -> Any:
        return (print, ("code of the file runs",))


def test_17_pt_files_run_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.save({"w": Hostile()}, tmp_path / "w.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        import_file(tmp_path / "w.pt", tmp_path / "a")
    assert "runs" not in capsys.readouterr().out


def test_17_other_suffixes_and_values(tmp_path: Path):
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
