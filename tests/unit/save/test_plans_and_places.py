"""A tree is planned once, a leaf does not look at every process again; trees of thousands of arrays; and a jax without its quick way of placing arrays."""

import functools
import gc
import logging
import os
import resource
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config
from jax._src.interpreters import pxla

import ckpt_core as ckpt
from ckpt_core import _processes
from ckpt_core._devices import shardings
from ckpt_core._save.plan import plan_tree
from ckpt_core.testing import assert_same


def planned() -> int:
    """How many trees were planned so far."""
    return plan_tree.cache_info().misses


def tree(seed: int) -> dict[str, Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    spread = jax.NamedSharding(mesh, jax.P("a", "b"))
    return {
        "w": jax.device_put(jax.random.normal(jax.random.key(seed), (8, 6)), spread),
        "steps": [jnp.int32(seed), seed, float(seed)],
        "host": np.full((3,), seed),
        "key": jax.random.key(seed),
        "name": f"run {seed}",
        "free": jnp.full(4, seed, jnp.float32),
        "weak": jnp.asarray(1.0 * seed),
    }


CHANGES = [
    lambda state: state | {"w": state["w"].astype("bfloat16")},
    lambda state: state | {"w": state["w"][:4]},
    lambda state: state | {"w": jax.device_put(state["w"], jax.devices()[0])},
    lambda state: state | {"free": jax.device_put(state["free"], jax.devices()[0])},
    lambda state: state | {"weak": jnp.float32(1.0)},
    lambda state: state | {"more": 1},
    lambda state: {"W" if key == "w" else key: value for key, value in state.items()},
    lambda state: state | {"steps": tuple(state["steps"])},
    lambda state: state | {"steps": [*state["steps"][:2], int(state["steps"][2])]},
    lambda state: state | {"name": 1},
]


def traits(tree: Any) -> list[Any]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return [(leaf.sharding, leaf.committed, leaf.aval.weak_type) for leaf in arrays]


@pytest.mark.parametrize("change", CHANGES)
def test_an_equal_tree_is_planned_once_and_another_one_anew(tmp_path, change):
    ckpt.save(tmp_path / "1", tree(1))
    before = planned()
    for name, state, more in (("2", tree(2), 0), ("3", change(tree(1)), 1), ("4", tree(3), 1)):
        ckpt.save(tmp_path / name, state)
        assert planned() == before + more
        loaded = ckpt.load(tmp_path / name)
        assert_same(loaded, state)
        assert traits(loaded) == traits(state)


def no_scope(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(config, "explicit_device_put_scope")
    patch.delattr(config, "explicit_device_get_scope")


LACKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "it is not there": lambda patch: patch.delattr(pxla, "batched_device_put"),
    "no scope": no_scope,
    "another signature": lambda patch: patch.setattr(pxla, "batched_device_put", lambda *, x: x),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_jax_without_the_quick_way_is_slower_and_says_so_once(
    tmp_path, monkeypatch, caplog, lack
):
    rows = jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    tree = {
        "one": jnp.arange(12.0),
        "sharded": jax.device_put(jnp.arange(32.0).reshape(8, 4), rows),
        "weak": jnp.asarray(1.5),
    }
    ckpt.save(tmp_path / "a", tree)
    for name in ("_private", "_warn"):
        unwrapped = getattr(shardings, name).__wrapped__
        monkeypatch.setattr(shardings, name, functools.cache(unwrapped))
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        with monkeypatch.context() as patch:  # jax itself needs it for what comes after
            LACKS[lack](patch)
            shardings._private()
        with jax.transfer_guard("disallow"):
            found = [ckpt.load(tmp_path / "a"), ckpt.restore(tmp_path / "a", state=tree)["state"]]
    for got in found:
        for name, want in tree.items():
            assert (got[name].sharding, got[name].weak_type) == (want.sharding, want.weak_type)
            np.testing.assert_array_equal(got[name], want)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "slower" in told[0] and jax.__version__ in told[0]


def test_a_writer_is_for_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(_processes, "this_run", lambda: _processes.Processes(0, 2))
    with pytest.raises(ckpt.CheckpointError, match="2 processes run"):
        ckpt.writer(tmp_path / "b")


def test_a_deleted_array_among_equal_ones_is_named(tmp_path):
    state = {f"w{n}": jnp.full((4, 4), n) for n in range(3)}
    ckpt.save(tmp_path / "1", state)
    state["w1"].delete()
    with pytest.raises(ckpt.UnsupportedLeaf, match=r"w1.*deleted"):
        ckpt.save(tmp_path / "2", state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


COUNT = 4000


def many_arrays(count: int = COUNT, elements: int = 512) -> dict[str, jax.Array]:
    rng = np.random.default_rng(count)
    values = rng.random((count, elements), np.float32)
    return {f"w{number}": jax.device_put(value) for number, value in enumerate(values)}


@pytest.mark.linux("open files are listed in /proc")
def test_a_load_that_an_index_stops_leaves_no_file_open(tmp_path):
    """Who goes back past damaged steps, or tries again and again, does not run out of descriptors."""
    ckpt.save(tmp_path / "a", many_arrays(300, elements=4), options=ckpt.Options(durable=False))
    nodes = next((tmp_path / "a" / "state" / "d").iterdir())
    nodes.write_bytes(bytes(nodes.stat().st_size))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ckpt.CheckpointCorrupt, match="index of the array database"):
            ckpt.load(tmp_path / "a")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("text", [{"config": "{}"}, {"n": 3, "s": "x"}, {}])
def test_a_large_item_beside_one_without_arrays(tmp_path, text):
    """Items of text alone have no array database; a large item beside them must not look for one."""
    state = {"w": np.arange(1 << 18, dtype=np.float32)}
    ckpt.save(tmp_path / "a", model=state, notes=text)
    loaded = ckpt.load(tmp_path / "a")
    assert loaded["notes"] == text
    assert loaded["model"]["w"].tobytes() == state["w"].tobytes()
    assert ckpt.verify(tmp_path / "a").ok


@pytest.mark.parametrize("count", [3, 600])
def test_the_error_of_a_full_disk_says_of_which(tmp_path, count):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {f"w{n}": np.zeros(300) for n in range(count)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            ckpt.save(tmp_path / "c", state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(caught.value)
