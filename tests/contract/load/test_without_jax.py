"""Weights as numpy arrays, and the commands that look at them, need no jax: its import takes a second; nor TensorStore."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_core as ckpt
from tests.support.command_line import LOADED
from tests.support.meshes import explicit_mesh

# Calls each of the functions, and prints which of them imported jax.
CALLS = """
import json, pathlib, sys
import ckpt_core as ckpt
folder = pathlib.Path(sys.argv[1])
one, run = folder / "one", folder / "run"

def read_only():
    with ckpt.Checkpointer(run, read_only=True) as checkpointer:
        return checkpointer.load(checkpointer.latest_step(), as_numpy=True)

calls = {
    "load": lambda: ckpt.load(one, as_numpy=True),
    "only": lambda: ckpt.load(one, only="**", as_numpy=True),
    "items": lambda: ckpt.load(folder / "items", as_numpy=True),
    "item": lambda: ckpt.load(folder / "items", item="model", as_numpy=True),
    "safetensors": lambda: ckpt.load(folder / "model.safetensors", as_numpy=True),
    "load_async": lambda: ckpt.load_async(one, as_numpy=True).result(),
    "read_only": read_only,
    "inspect": lambda: ckpt.inspect(one),
    "verify": lambda: ckpt.verify(run / "1"),
    "export": lambda: ckpt.convert.export_npz(folder / "items", folder / "w.npz", only="model/w"),
}
guilty = []
for name, call in calls.items():
    call()
    guilty += [(name, module) for module in ("jax", "tensorstore") if module in sys.modules]
    if guilty:
        break
print(json.dumps(guilty))
"""


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture(name="folder", scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of leaf and container, as one state, as items, as steps and as safetensors."""
    folder = tmp_path_factory.mktemp("saved")
    mesh = explicit_mesh((8,), ("d",))
    sharded = jax.device_put(
        jnp.arange(64.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    )
    state = {
        "sharded": sharded,
        "large": jnp.ones((300, 100)),
        "narrow": [jnp.ones(4, name) for name in ("bfloat16", "float8_e4m3fn", "int4")],
        "key": jax.random.key(1),
        "generator": np.random.default_rng(0),
        "pair": Pair(jnp.asarray(1.0), np.float32(2)),
        "plain": (1, 2.5, True, None, "text", b"bytes", 1j),
        "numbered": {3: np.ones(2), (1, 2): jnp.zeros((0, 3))},
    }
    ckpt.save(folder / "one", state)
    ckpt.save(folder / "items", model={"w": jnp.ones(9)}, notes=ckpt.Json({"a": 1}))
    with ckpt.Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(1, model={"w": jnp.ones(9)}, metrics={"loss": 0.5})
    save_file({"a.b": np.ones((3, 4), np.float16)}, folder / "model.safetensors")
    return folder


def test_the_functions_import_no_jax(folder, run_python):
    assert run_python(CALLS, str(folder)) == []


LOOKS = "ls run + ls --json run + show one"
READS = "verify run + stats one + diff one one + export items e.npz + report run -o r.html"


@pytest.mark.parametrize(
    ("commands", "absent"),
    [(LOOKS, {"tensorstore"}), (READS, set()), ("ls theirs + show theirs/3", set())],
    ids=["looks", "reads", "of Orbax"],
)
def test_nor_do_the_commands(folder, run_python, monkeypatch, commands, absent):
    if "theirs" in commands:
        ocp = pytest.importorskip("orbax.checkpoint")
        with ocp.CheckpointManager(folder / "theirs") as manager:
            manager.save(3, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    monkeypatch.chdir(folder)
    code, imported = run_python(LOADED, *commands.split())
    assert (code, {"jax", "jaxlib", *absent} & {*imported}) == (0, set())


def test_what_is_loaded_is_what_jax_holds(folder):
    loaded, live = ckpt.load(folder / "one", as_numpy=True), ckpt.load(folder / "one")
    assert loaded["narrow"][0].dtype == live["narrow"][0].dtype == jnp.bfloat16
    assert np.array_equal(loaded["key"], jax.random.key_data(live["key"]))
    assert np.array_equal(loaded["sharded"], np.asarray(live["sharded"]))
