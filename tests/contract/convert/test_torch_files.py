"""``.pt`` in and out, beside torch, and folders of ``torch.distributed.checkpoint``: to the bit, and without running what a file names."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import export_torch, import_weights
from tests.support.same_bits import bits

torch: Any = pytest.importorskip("torch")
DTYPES = [
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn"),
    *("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def raw(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    name = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.detach().contiguous().reshape(-1)
    return name, tuple(tensor.shape), bytes(flat.view(torch.uint8).tolist())


def array_raw(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    host = np.asarray(array)
    return str(host.dtype), host.shape, host.tobytes()


def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randint(0, 2, (3, 4))
    return {
        **{name: base.to(getattr(torch, name)) for name in DTYPES},
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "part": torch.arange(100.0)[10:40:3],
        "expanded": torch.ones(1).expand(5),
        "empty": torch.zeros(0, 2),
        "zero": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_every_tensor_and_back(tmp_path: Path) -> None:
    saved = tensors()
    torch.save(saved, tmp_path / "a.pt")
    import_weights(tmp_path / "a.pt", tmp_path / "a")
    found = ckpt.load(tmp_path / "a", as_numpy=True)
    assert {name: array_raw(array) for name, array in found.items()} == {
        name: raw(tensor) for name, tensor in saved.items()
    }
    (written,) = export_torch(tmp_path / "a", tmp_path / "b.pt")
    for mapped in (False, True):
        again = torch.load(written, weights_only=True, mmap=mapped)
        assert {name: raw(one) for name, one in again.items()} == {
            name: raw(one) for name, one in saved.items()
        }
        assert all(one.data_ptr() % 64 == 0 for one in again.values() if mapped)


def test_a_module_and_its_optimizer(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "name": "a"}
    torch.save(state, tmp_path / "a.pt")
    import_weights(tmp_path / "a.pt", tmp_path / "a")
    found = ckpt.load(tmp_path / "a")
    assert bits(found["model"]["0.weight"]) == bits(module[0].weight.detach().numpy())
    moment = state["optimizer"]["state"][1]["exp_avg"].numpy()
    assert bits(found["optimizer"]["state"][1]["exp_avg"]) == bits(moment)
    group = found["optimizer"]["param_groups"][0]
    assert (group["betas"], group["params"], group["lr"]) == ((0.9, 0.999), [0, 1, 2, 3], 1e-3)
    assert found["name"] == "a"
    export_torch(tmp_path / "a", tmp_path / "b.pt", only="model/**")
    again = torch.load(tmp_path / "b.pt", weights_only=True)
    cut = {name.removeprefix("model."): one for name, one in again.items()}
    torch.nn.Module.load_state_dict(module, cut)


class Harm:
    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return (os.system, (self.text,))


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"a": Harm(f"touch {mark}")}, tmp_path / "a.pt")
    with pytest.raises(ckpt.UnsupportedLeaf, match="system, and to make it would run code"):
        import_weights(tmp_path / "a.pt", tmp_path / "out")
    assert not mark.exists()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "b.pt")
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"torch\.nn\.modules\.linear\.Linear"):
        import_weights(tmp_path / "b.pt", tmp_path / "out")


def test_a_file_of_before_1_6(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    import_weights(tmp_path / "a.pt", tmp_path / "a")
    assert ckpt.load(tmp_path / "a")["a"].tolist() == [1, 1]


def test_what_is_no_tree_of_tensors(tmp_path: Path) -> None:
    torch.save({"a": {1, 2}}, tmp_path / "a.pt")
    with pytest.raises(ckpt.CheckpointError, match=r"a\.pt.*set"):
        import_weights(tmp_path / "a.pt", tmp_path / "out")
    torch.save({"a": torch.ones(2)}, tmp_path / "c.pt")
    (tmp_path / "c.pt").write_bytes((tmp_path / "c.pt").read_bytes()[:-30])
    with pytest.raises(ckpt.CheckpointCorrupt, match="cut short"):
        import_weights(tmp_path / "c.pt", tmp_path / "out")
    torch.save({"a": torch.ones(2).to_sparse()}, tmp_path / "d.pt")
    with pytest.raises(ckpt.UnsupportedLeaf, match="sparse"):
        import_weights(tmp_path / "d.pt", tmp_path / "out")


@pytest.mark.parametrize(
    "asked",
    [
        {"rules": [{"saved": "a.b", "wanted": "c"}]},
        {"like": {"a": {"b": jnp.zeros(3)}}},
        {"split": "."},
    ],
    ids=str,
)
def test_of_two_tensors_of_one_name_none_is_lost(tmp_path: Path, asked: dict[str, Any]) -> None:
    """The dot is a level in one, and part of the name in the other."""
    torch.save({"a.b": torch.ones(3), "a": {"b": torch.zeros(3)}}, tmp_path / "a.pt")
    with pytest.raises(ckpt.CheckpointError, match="two values would be at a/b"):
        import_weights(tmp_path / "a.pt", tmp_path / "a", **asked)
    assert not (tmp_path / "a").exists()


dcp = pytest.importorskip("torch.distributed.checkpoint")


def save(state: dict[str, Any], path: Path, **how: Any) -> None:
    # Copies ahead ask torch for its accelerator, which torchax has replaced if an earlier test of this process enabled it.
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, storage_writer=writer, no_dist=True, **how)


def test_a_model_its_optimizer_and_numbers(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    half = torch.arange(6).to(torch.bfloat16).reshape(2, 3).T
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 3,
        "name": "run",
        "half": half,
        "list": [torch.ones(2), 4, {"x": None}],
        "empty": torch.zeros(0, 3),
    }
    save(state, tmp_path / "a")
    import_weights(tmp_path / "a", tmp_path / "c")
    found = ckpt.load(tmp_path / "c")
    assert bits(found["model"]["weight"]) == bits(model.weight.detach().numpy())
    assert bits(found["half"]) == bits(
        np.ascontiguousarray(half.float().numpy()).astype("bfloat16")
    )
    moments = found["optim"]["state"]["0"]["exp_avg"]
    assert bits(moments) == bits(optimizer.state_dict()["state"][0]["exp_avg"].numpy())
    assert found["optim"]["param_groups"][0]["lr"] == 1e-3
    assert (found["step"], found["name"], found["list"][1]) == (3, "run", 4)
    assert found["empty"].shape == (0, 3)


SHARDED = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meet", rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
big = torch.arange(70.0).reshape(10, 7)
state = {
    "rows": distribute_tensor(big, mesh, [Shard(0), Replicate()]),
    "both": distribute_tensor(big, mesh, [Shard(0), Shard(1)]),
    "whole": distribute_tensor(big, mesh, [Replicate(), Replicate()]),
    "few": distribute_tensor(torch.arange(3.0), mesh, [Shard(0), Shard(0)]),
}
dcp.save(state, checkpoint_id=f"{sys.argv[2]}/a")
dist.destroy_process_group()
"""


def test_tensors_in_parts_of_four_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHARDED]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors
    finally:
        for process in started:  # the others wait for one that failed
            process.kill()
            process.communicate()
    assert len(list((tmp_path / "a").glob("*.distcp"))) > 1
    import_weights(tmp_path / "a", tmp_path / "c")
    found = ckpt.load(tmp_path / "c")
    big = np.arange(70, dtype=np.float32).reshape(10, 7)
    for name in ("rows", "both", "whole"):
        assert bits(found[name]) == bits(big), name
    assert bits(found["few"]) == bits(np.arange(3, dtype=np.float32))


def test_no_code_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    save({"a": torch.ones(2)}, tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"posix\.system"):
        import_weights(tmp_path / "a", tmp_path / "c")
    assert not (tmp_path / "ran").exists()


def test_a_missing_and_a_cut_file(tmp_path: Path) -> None:
    save({"a": torch.ones(200)}, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ckpt.CheckpointCorrupt):
        import_weights(tmp_path / "a", tmp_path / "c")
    file.unlink()
    with pytest.raises(ckpt.CheckpointCorrupt, match="is missing"):
        import_weights(tmp_path / "a", tmp_path / "c")
