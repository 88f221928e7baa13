"""The ways between PyTorch and torchax, and modules without memory of their own."""

from __future__ import annotations

from importlib import metadata
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
from ckpt_torchax import load_into, to_torch  # noqa: E402
from tests.support.torch_modules import make_saved  # noqa: E402, F401 (fixtures)
from tests.support.torchax_nets import Net, net, same, values  # noqa: E402

torchax = nets.torchax


# ------------------------------------------------------------- between torchax and torch


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


def test_a_broken_torchax_disturbs_nobody(saved: Any, run_python: Any, tmp_path: Path):
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


TORCH_ABSENT = """
import json, sys
sys.modules["torch"] = None
import ckpt_torchax, ckpt_core as ckpt
try:
    ckpt_torchax.to_torch
    message = ""
except ModuleNotFoundError as error:
    message = str(error)
print(json.dumps([ckpt.load(sys.argv[1])["model"]["embed.weight"].tolist(), message]))
"""


def test_without_torch_a_checkpoint_is_arrays(saved: Any, run_python: Any):
    path, model = saved
    loaded, message = run_python(TORCH_ABSENT, str(path))
    assert loaded == model.embed.weight.jax().tolist()
    assert "pip install 'ckpt-core[torchax]'" in message


# ---------------------------------------------------------------------------- load_into


def on_meta(tied: bool = True) -> Any:
    with torch.device("meta"):
        return Net(tied)


def test_a_meta_module_goes_straight_to_its_devices(saved: Any, mesh: Any):
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


def test_what_was_made_beside_the_meta_device_follows(saved: Any):
    path, _ = saved
    module = on_meta()
    module.table = torch.arange(3.0) + 1
    load_into(path, module)
    assert module.table.jax().tolist() == [1, 2, 3]


def test_nothing_changes_unless_everything_fits(saved: Any):
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


def test_a_checkpointer_restores_into_a_meta_module(tmp_path: Path):
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
