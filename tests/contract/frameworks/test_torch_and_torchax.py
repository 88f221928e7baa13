"""The ways between PyTorch, torchax and weights files; modules without memory of their own."""

import json
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch as safetensors_torch
import torch
from flax import nnx
from torch import nn

import ckpt_core as ckpt
from ckpt_torchax import export_file, import_file, load_into, to_torch
from tests.support import torchax_nets as nets
from tests.support.torchax_nets import Net, bits, bytes_of, make_saved, net, same, values  # noqa: F401 (fixture)

torchax = nets.torchax


def test_a_torchax_checkpoint_restores_into_a_cpu_module(saved):
    path, model = saved
    on_cpu = Net(tied=True)
    ckpt.restore(path, model=on_cpu)
    assert on_cpu.norm.num_batches_tracked.dtype == torch.int64
    assert on_cpu.norm.num_batches_tracked == 5
    np.testing.assert_array_equal(on_cpu.head.weight.detach(), model.embed.weight.jax())
    assert on_cpu.head.weight is on_cpu.embed.weight


def test_a_cpu_checkpoint_restores_into_a_torchax_module(tmp_path):
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


def test_to_torch(saved):
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


def test_to_torch_asks_which_item(tmp_path):
    ckpt.save(tmp_path / "a", one={"w": torch.ones(2)}, two={"w": torch.ones(3)})
    with pytest.raises(ValueError, match="one, two"):
        to_torch(tmp_path / "a")
    assert to_torch(tmp_path / "a", item="two")["w"].shape == (3,)


def test_to_torch_makes_a_meta_module(saved):
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
from ckpt_torchax import export_file, load_into, to_torch
assert to_torch(sys.argv[1])["head.weight"].tolist() == loaded
for name in (sys.argv[2], sys.argv[2] + ".safetensors", sys.argv[2] + ".pt"):
    if "." in name:
        export_file(sys.argv[2], name)
    net = Net()
    weight = net.w
    torch.nn.init.zeros_(weight)
    assert load_into(name, net) is net and net.w is weight
    assert weight.tolist() == [1, 1] and type(weight) is torch.nn.Parameter  # on the CPU, where it was
try:
    load_into(sys.argv[2], Net().to("meta"))
    remedy = ""
except ModuleNotFoundError as error:
    remedy = str(error)
print(json.dumps([imported, loaded, reason, remedy]))
"""


def test_a_broken_torchax_disturbs_nobody(saved, run_python, tmp_path):
    path, model = saved
    imported, loaded, reason, remedy = run_python(BROKEN, str(path), str(tmp_path / "b"))
    assert imported == []
    assert loaded == model.embed.weight.jax().tolist()
    if metadata.version("torchax") != "0.0.13":  # when it is the floor, delete ckpt_torchax.shim
        assert (reason, remedy) == ("importable", "")
        return
    assert "no overload name" in reason
    assert "cannot be imported with torch" in remedy
    assert "ckpt_torchax.shim.install()" in remedy


def on_meta(tied: bool = True) -> Any:
    with torch.device("meta"):
        return Net(tied)


def test_a_meta_module_goes_straight_to_its_devices(saved, mesh):
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


def test_nothing_changes_unless_everything_fits(saved):
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


def test_a_checkpointer_restores_into_a_meta_module(tmp_path):
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


def all_bytes(state: Any) -> dict[str, bytes]:
    return {name: bytes_of(value) for name, value in state.items()}


@pytest.mark.parametrize(
    ("kind", "enabled"), [("pt", True), ("safetensors", True), ("index", False)]
)
def test_weights_files_load_into_torchax_on_globally_or_not(tmp_path, kind, enabled):
    """Torchax, on globally, breaks the readers of safetensors' own library."""
    state = {name: bits(name) for name in ("bfloat16", "float8_e4m3fn", "float32", "int8", "bool")}
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
        module.register_buffer(f"{name}_", torch.empty_like(value, device="meta"))
    with nets.torchax_enabled():
        if not enabled:
            torchax.disable_globally()
        load_into(file, module, rename=lambda name: f"{name}_")
        import_file(file, tmp_path / "a")
        export_file(tmp_path / "a", tmp_path / "back.pt")
        export_file(tmp_path / "a", tmp_path / "back.safetensors")
        if not enabled:
            torchax.enable_globally()
    for name, value in state.items():
        assert np.asarray(getattr(module, f"{name}_").jax()).tobytes() == bytes_of(value), name
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
    out.append([model.head.weight[0].tolist(), model.norm.num_batches_tracked.item()])
print(json.dumps(out))
"""


def test_exported_files_load_in_a_process_without_jax(saved, run_python, tmp_path):
    path, model = saved
    files = [tmp_path / f"a.{suffix}" for suffix in ("pt", "safetensors")]
    for file in files:
        file.write_text("the last one, which is replaced")
        export_file(path, file)
    expected = [model.embed.weight.jax()[0].tolist(), 5]
    assert run_python(PLAIN_PROCESS, *map(str, files)) == [expected, expected]
    for file in files:
        import_file(file, tmp_path / "b", overwrite=True)
        target = Net(tied=True)
        ckpt.restore(tmp_path / "b", model=target, cast=True)
        assert target.head.weight is target.embed.weight
        assert torch.equal(target.head.weight, to_torch(path)["head.weight"])
    only = tmp_path / "head.safetensors"  # a pattern may name either
    ckpt.convert.export_safetensors(path, only, item="model", only="head.weight")
    (found,) = safetensors_torch.load_file(only).items()
    assert found[0] == "head.weight" and torch.equal(found[1], to_torch(path)["head.weight"])


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = sys.modules["torchax"] = sys.modules["flax"] = None
import ckpt_core as ckpt
import ckpt_torchax
path, file, imported, saved = sys.argv[1:]
ckpt_torchax.export_file(path, file)
ckpt_torchax.import_file(file, imported)
told = []
for call in (lambda: ckpt_torchax.export_file(path, file + ".pt"), lambda: ckpt_torchax.to_torch):
    try:
        call()
    except (ckpt.CheckpointError, ModuleNotFoundError) as error:
        told.append(str(error))
print(json.dumps([*told, ckpt.load(saved)["model"]["embed.weight"].tolist()]))
"""


def test_safetensors_come_from_any_checkpoint_without_torch(saved, run_python, tmp_path):
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    ckpt.save(tmp_path / "a", model=nnx.List([linear]), step=1)
    paths = [str(tmp_path / name) for name in ("a", "w.safetensors", "b")]
    no_export, no_tensors, loaded = run_python(WITHOUT_TORCH, *paths, str(saved[0]))
    assert "pip install torch" in no_export
    assert "pip install 'ckpt-core[torchax]'" in no_tensors
    assert loaded == saved[1].embed.weight.jax().tolist()  # and a checkpoint is arrays
    theirs, ours = safetensors_torch.load_file(paths[1]), to_torch(tmp_path / "b")
    assert all_bytes(theirs) == all_bytes(ours)
    kernel = np.asarray(linear.kernel.get_value())
    assert bytes_of(ours["0.kernel"]) == kernel.tobytes()
    assert ours["0.kernel"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"\.safetensors, \.pt.*as in export_file\(path, file"):
        export_file(tmp_path / "a", tmp_path / "w.npz")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "saved", "w.safetensors"]


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_files_are_compared_before_anything_is_set(tmp_path, suffix):
    file = tmp_path / f"w.{suffix}"
    save = torch.save if suffix == "pt" else safetensors_torch.save_file
    save({"weight": torch.ones(3, 2), "bias": torch.ones(2).half(), "other": torch.ones(1)}, file)
    module = nn.Linear(2, 2, device="meta")
    module.register_buffer("more", torch.empty(1, device="meta"))
    with pytest.raises(ckpt.StructureMismatch, match=file.name) as caught:
        load_into(file, module)
    assert sorted((m.path, m.kind) for m in caught.value.mismatches) == [
        ("bias", "dtype"),
        ("more", "missing"),
        ("other", "unexpected"),
        ("weight", "shape"),
    ]
    assert module.weight.is_meta
    with pytest.raises(ckpt.CheckpointNotFound, match=rf"none\.{suffix}"):
        load_into(tmp_path / f"none.{suffix}", module)


def named(name: str) -> Any:
    model = nn.Module()
    model.add_module(name, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    model.add_module("fc_other", nn.Linear(2, 2))
    return model


@pytest.mark.parametrize(
    "rename",
    [
        {"fc": "body"},
        {"fc": "nowhere", "fc.0": "body.0", "fc.1": "body.1"},  # the longest counts
        lambda path: path.replace("fc.", "body."),
    ],
)
def test_a_renamed_module_moves_with_all_in_it(rename, tmp_path):
    model, other = named("fc"), named("body")
    ckpt.save(tmp_path / "a", model=model)
    export_file(tmp_path / "a", tmp_path / "a.pt")
    ckpt.restore(tmp_path / "a", model=other, rename=rename)
    for found in (other, load_into(tmp_path / "a.pt", named("body"), rename=rename)):
        assert all_bytes(found.body.state_dict()) == all_bytes(model.fc.state_dict())
        assert all_bytes(found.fc_other.state_dict()) == all_bytes(model.fc_other.state_dict())


def test_renames_reach_modules_in_containers_and_take_prefixes_away(tmp_path):
    model, other = nn.Sequential(named("fc")), named("body")
    ckpt.save(tmp_path / "a", {"net": model, "step": 1})
    rename = {"net/0.": "net/", "net/0.fc": "net/body"}
    ckpt.restore(tmp_path / "a", {"net": other, "step": 0}, rename=rename)
    assert all_bytes(other.body.state_dict()) == all_bytes(model[0].fc.state_dict())
    with pytest.raises(ckpt.StructureMismatch, match=r"0\.fc\.0\.bias: saved"):  # only begins alike
        ckpt.restore(tmp_path / "a", {"net": other, "step": 0}, rename={"net/0.f": "net/b"})
