"""A save is of the moment of the call, whatever is changed, donated or deleted after it."""

import copy
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_core as ckpt
from tests.support import seams
from tests.support.same_bits import is_key
from tests.support.trees import assert_same, meshes


def test_numpy_changed_right_after_an_asynchronous_save(tmp_path):
    """A snapshot is of the moment of the call, small and large, contiguous or not."""
    large, small = np.zeros((2000, 1000)), np.zeros(10)
    tree = {"large": large, "small": small, "view": large[::3, ::7], "list": [1, 2]}
    want = copy.deepcopy(tree)
    pending = ckpt.save_async(tmp_path / "c", tree)
    large[:], small[:] = 7, 7
    tree["list"].append(3)
    tree["extra"] = 5
    pending.result()
    assert_same(ckpt.load(tmp_path / "c"), want)


def test_donated_right_after_an_asynchronous_save(tmp_path):
    mesh = meshes()["4x2"]
    make = jax.jit(
        lambda: {"w": jnp.ones((1024, 512)), "b": jnp.zeros(4)},
        out_shardings=NamedSharding(mesh, P()),
    )
    state = make()
    state["w"] = jax.device_put(state["w"], NamedSharding(mesh, P("x", "y")))
    state["keys"] = jax.device_put(
        jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x"))
    )
    want = jax.tree.map(lambda x: x if is_key(x) else np.array(x), state)
    want["keys"] = np.array(jax.random.key_data(state["keys"]))
    step = jax.jit(
        lambda s: s | {"w": s["w"] + 1, "b": s["b"] + 1, "keys": s["keys"][::-1]}, donate_argnums=0
    )
    pending = []
    for index in range(4):
        pending.append(ckpt.save_async(tmp_path / str(index), state))
        state = step(state)
    for index, one in enumerate(pending):
        one.result()
        got = ckpt.load(tmp_path / str(index))
        np.testing.assert_array_equal(got["w"], want["w"] + index)
        np.testing.assert_array_equal(got["b"], want["b"] + index)
        keys = want["keys"][::-1] if index % 2 else want["keys"]
        np.testing.assert_array_equal(jax.random.key_data(got["keys"]), keys)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_memory_that_torch_writes_to_right_after_an_asynchronous_save(tmp_path, monkeypatch):
    nets = pytest.importorskip("tests.support.torchax_nets")
    array, gate = jnp.zeros(1000), seams.Gate()
    seams.at(monkeypatch, "write", before=gate)
    with nets.torchax_enabled():
        shared = nets.torch_view(array).cpu()
        options = ckpt.Options(snapshot="host")
        pending = ckpt.save_async(tmp_path / "c", {"t": nets.torch_view(array)}, options=options)
        shared.fill_(7)
        gate.go.set()
        pending.result()
    assert array[0] == 7, "torch has its own memory: this tests nothing"
    np.testing.assert_array_equal(ckpt.load(tmp_path / "c", as_numpy=True)["t"], np.zeros(1000))


def test_deleted_right_after_an_asynchronous_save(tmp_path):
    array = jnp.arange(10.0**6)
    pending = ckpt.save_async(tmp_path / "c", {"a": array})
    array.delete()
    pending.result()
    np.testing.assert_array_equal(
        ckpt.load(tmp_path / "c")["a"], np.arange(10.0**6, dtype=np.float32)
    )


def test_generators_drawn_from_right_after_an_asynchronous_save(tmp_path):
    tree = {"g": np.random.default_rng(0), "r": random.Random(0), "s": np.random.RandomState(0)}
    want = copy.deepcopy(tree)
    pending = ckpt.save_async(tmp_path / "c", tree)
    tree["g"].normal(), tree["r"].random(), tree["s"].normal()
    pending.result()
    assert_same(ckpt.load(tmp_path / "c"), want)


def test_a_loaded_array_is_no_view_of_the_file(tmp_path):
    """Overwriting or removing the files later must not reach what was loaded."""
    ckpt.save(tmp_path / "c", {"a": jnp.ones((1024, 1024)), "n": np.ones((1024, 1024))})
    got = ckpt.load(tmp_path / "c")
    for path in (tmp_path / "c").rglob("d/*"):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    np.testing.assert_array_equal(got["a"], np.ones((1024, 1024)))
    np.testing.assert_array_equal(got["n"], np.ones((1024, 1024)))
