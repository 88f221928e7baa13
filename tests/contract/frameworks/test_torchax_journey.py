"""torchax in processes of their own: large, and two at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from tests.support.launch import launch, reports
from tests.support.paths import ROOT
from tests.support.units import MIB

pytest.importorskip("torch")


def environment(devices: int = 1) -> dict[str, str]:
    folders = [str(ROOT), *filter(None, sys.path)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders), "XLA_FLAGS": flags}


MEMORY = """
import json, sys
import torch
from torch import nn
from tests.support.torchax_nets import torchax
import jax, numpy as np
import ckpt_core as ckpt
from ckpt_torchax import load_into

def memory(name):
    text = open("/proc/self/status").read()
    return int(text.partition(name + ":")[2].split()[0]) * 1024

class Large(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.layers[0].weight

def meta(*arguments):
    with torch.device("meta"):
        return Large(*arguments)

path, warm, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
load_into(warm, meta(1, 64))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
base = memory("VmRSS")
model = load_into(path, meta(count, 2048))
size = sum(p.jax().nbytes for p in model.parameters())
assert model.head.weight is model.layers[0].weight
print(json.dumps([size, memory("VmHWM") - base, float(model.layers[count - 1].weight.jax()[5, 5])]))
"""


def large(count: int, width: int) -> dict[str, Any]:
    import jax.numpy as jnp

    state: dict[str, Any] = {
        f"layers.{i}.weight": jnp.full((width, width), float(i)) for i in range(count)
    }
    state["_tied_weights"] = {"layers.0.weight": {"head.weight": True}}
    return state


@pytest.mark.parametrize(("count", "times"), [(20, 1.2), (64, 1.1)])
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_model_is_in_memory_once(tmp_path: Path, count: int, times: float):
    ckpt.save(tmp_path / "large", model=large(count, 2048))
    ckpt.save(tmp_path / "warm", model=large(1, 64))
    arguments = [str(tmp_path / "large"), str(tmp_path / "warm"), str(count)]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, peak, value = json.loads(done.stdout.splitlines()[-1])
    assert size == count * 16 * MIB
    assert value == count - 1
    assert peak <= times * size, f"{peak / size:.2f} times"


TWO = """
import torch
from torch import nn
from tests.support.torchax_nets import torchax

sharding = NamedSharding(mesh, P("data"))
env = torchax.default_env()
env.manual_seed(7)  # else each process draws its own, which the save refuses

def module(offset):
    made = nn.Linear(4, 8, bias=False)
    array = put(np.arange(32, dtype=np.float32).reshape(8, 4) + offset)
    made.weight = nn.Parameter(torchax.tensor.Tensor(array, env))
    return made

model = module(1)
assert not model.weight.jax().is_fully_addressable
ckpt.save(directory, model=model, env=env)
target = module(100)
weight = target.weight
ckpt.restore(directory, model=target, env=env)
parts = {str(s.index): s.data.tolist() for s in target.weight.jax().addressable_shards}
report(parts=parts, same=weight is target.weight and weight.jax().sharding == sharding)
"""


@pytest.mark.always
def test_two_processes_save_and_restore_their_shards(tmp_path: Path):
    directory = tmp_path / "run"
    rows: list[float] = []
    for one in reports(launch(TWO, directory)):
        assert one["same"]
        rows += [number for part in one["parts"].values() for row in part for number in row]
    assert sorted(rows) == [float(number) for number in range(1, 33)]
    found = [path.stat().st_size > 40 for path in (directory / "model").glob("checksums/process_*")]
    assert found == [True, True]
    loaded = ckpt.load(directory, as_numpy=True)["model"]["weight"]
    assert loaded.ravel().tolist() == [float(number) for number in range(1, 33)]
