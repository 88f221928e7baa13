"""The journey of a torchax user in processes of their own: killed, resumed, large, and two at once."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt
from tests.support.paths import EXAMPLES, ROOT
from tests.support.ports import free_port
from tests.support.units import MIB

pytest.importorskip("torch")
pytest.importorskip("optax")
pytest.importorskip("sklearn")
pytest.importorskip("safetensors")

EXAMPLE = EXAMPLES / "torchax_train.py"


def environment(devices: int = 1) -> dict[str, str]:
    folders = [str(ROOT), *filter(None, sys.path)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders), "XLA_FLAGS": flags}


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the example's demonstration printed, and where it ran."""
    directory = tmp_path_factory.mktemp("example")
    command = [sys.executable, str(EXAMPLE), "--demo", "--directory", str(directory)]
    compiled_once = {  # the three runs compile the same
        "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        command,
        env=environment() | compiled_once,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout, directory


@pytest.mark.slow  # a minute; without a process of its own it is test_all_of_a_training_state_goes_on_exactly
def test_killed_and_resumed_the_next_50_losses_are_equal(demonstrated: Any):
    printed, _ = demonstrated
    assert "50 of the next 50 losses are equal" in printed


@pytest.mark.slow
def test_the_directory_is_the_one_that_the_article_describes(demonstrated: Any):
    _, directory = demonstrated
    step = directory / "killed" / "step_100"
    assert (step / "commit_success.txt").is_file()
    model = step / "model"
    for name in ("manifest.ocdbt", "_METADATA", "_sharding"):
        assert (model / name).is_file(), name
    for name in ("ocdbt.process_0", "d", "array_metadatas"):
        assert (model / name).is_dir(), name
    # "a JSON blueprint": the names of the module's tensors
    described = json.loads((model / "_METADATA").read_text())["tree_metadata"]
    assert any("fc1.weight" in key for key in described)
    info = ckpt.inspect(step)
    shapes = {leaf.path: leaf.shape for leaf in info.items["model"].leaves}
    assert shapes["fc1.weight"] == (120, 784)
    assert shapes["fc3.weight"] == (10, 84)
    assert set(info.items) == {"model", "optimizer", "random"}
    assert ckpt.verify(step).ok


def test_the_checkpoint_part_is_at_most_six_lines():
    """Lines that would not be there without checkpoints; `for` would be, but says where to begin."""
    source = EXAMPLE.read_text()
    train = next(node for node in ast.parse(source).body if getattr(node, "name", None) == "train")
    lines = ast.get_source_segment(source, train).splitlines()
    words = ("ckpt.", "restore", "run.")
    body = lines[2:]  # not the signature and the docstring
    part = ["import ckpt_core as ckpt", *(line for line in body if any(w in line for w in words))]
    assert "import ckpt_core as ckpt" in source.splitlines()
    assert any("restore_latest" in line for line in part)
    assert any(".save(" in line for line in part)
    assert len(part) <= 6, part


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


def measured(tmp_path: Path, count: int) -> tuple[int, int]:
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
    return size, peak


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_model_is_in_memory_once(tmp_path: Path):
    size, peak = measured(tmp_path, 20)
    assert peak <= 1.2 * size, f"{peak / size:.2f} times"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_gigabyte_is_in_memory_once(tmp_path: Path):
    size, peak = measured(tmp_path, 64)
    assert peak <= 1.1 * size, f"{peak / size:.2f} times"


TWO = """
import json, os, sys, time
index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
import numpy as np
import torch
from torch import nn
from tests.support.torchax_nets import torchax
import ckpt_core as ckpt

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
sharding = jax.NamedSharding(mesh, jax.P("data"))
env = torchax.default_env()
env.manual_seed(7)  # else each process draws its own, which the save refuses

def module(offset):
    made = nn.Linear(4, 8, bias=False)
    values = np.arange(32, dtype=np.float32).reshape(8, 4) + offset
    array = jax.make_array_from_callback((8, 4), sharding, lambda where: values[where])
    made.weight = nn.Parameter(torchax.tensor.Tensor(array, env))
    return made

model = module(1)
assert not model.weight.jax().is_fully_addressable
ckpt.save(directory, model=model, env=env)
target = module(100)
weight = target.weight
ckpt.restore(directory, model=target, env=env)
parts = {str(s.index): s.data.tolist() for s in target.weight.jax().addressable_shards}
same = weight is target.weight and weight.jax().sharding == sharding
print("REPORT" + json.dumps([parts, same]), flush=True)
open(f"{directory}.{index}", "w").close()
while not os.path.exists(f"{directory}.{1 - index}"):
    time.sleep(0.02)
os._exit(0)  # the first process holds the coordinator, so both go at once
"""


def test_two_processes_save_and_restore_their_shards(tmp_path: Path):
    port = str(free_port())
    directory = tmp_path / "run"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(index), port, str(directory)],
            env=environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    rows: list[float] = []
    try:
        for child in children:
            printed, errors = child.communicate(timeout=120)
            assert child.returncode == 0, errors[-3000:]
            report = next(line for line in printed.splitlines() if line.startswith("REPORT"))
            parts, same = json.loads(report.removeprefix("REPORT"))
            assert same
            rows += [number for part in parts.values() for row in part for number in row]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert sorted(rows) == [float(number) for number in range(1, 33)]
    item = directory / "model"
    assert {path.name for path in item.glob("ocdbt.process_*")} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
    loaded = ckpt.load(directory, as_numpy=True)["model"]["weight"]
    assert loaded.ravel().tolist() == [float(number) for number in range(1, 33)]
