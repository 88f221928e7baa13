"""Folders of ``torch.distributed.checkpoint``: tensors of one and of several processes, and hostile indices."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core.convert import import_weights
from tests.support.same_bits import bits

torch = pytest.importorskip("torch")
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
