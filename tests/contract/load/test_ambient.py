"""Loads inside of jit, and in the ambient settings of jax of the caller."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.meshes import explicit_mesh

STATE = {
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(4), 8),
    "x": jnp.arange(8.0),
}


def traced(work: Any) -> Any:
    """What ``work`` gives while a function is traced."""
    found: list[Any] = []

    def step(x: Any) -> Any:
        found.append(work())
        return x + 1

    jax.jit(step)(1.0)
    return found[0]


def same(one: Any, other: Any) -> bool:
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(one))
    bits = [
        jax.tree.map(
            lambda x: np.asarray(
                jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            ),
            tree,
        )
        for tree in (one, other)
    ]
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, *bits)))


@pytest.mark.parametrize("how", ["load", "target", "restore", "load_async", "sharding"])
def test_random_keys_are_values(tmp_path, how):
    """They came back as tracers, which nothing outside can use."""
    ckpt.save(tmp_path / "a", STATE)
    mesh = explicit_mesh((8,), ("x",))
    on_mesh = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    ways = {
        "load": lambda: ckpt.load(tmp_path / "a"),
        "target": lambda: ckpt.load(tmp_path / "a", STATE),
        "restore": lambda: ckpt.restore(tmp_path / "a", STATE).state,
        "load_async": lambda: ckpt.load_async(tmp_path / "a").result(),
        "sharding": lambda: ckpt.load(tmp_path / "a", only=["keys", "x"], sharding=on_mesh),
    }
    loaded = traced(ways[how])
    assert same(loaded, {name: STATE[name] for name in loaded})
    if how == "sharding":
        assert loaded["keys"].sharding.is_equivalent_to(on_mesh, 1)


@pytest.mark.parametrize("save", [ckpt.save, lambda *of: ckpt.save_async(*of).result()])
def test_random_keys_are_saved(tmp_path, save):
    traced(lambda: save(tmp_path / "a", STATE))
    assert same(ckpt.load(tmp_path / "a"), STATE)


def test_a_target_that_is_traced_is_refused_by_name(tmp_path):
    ckpt.save(tmp_path / "a", {"x": jnp.arange(4.0)})
    for load in (ckpt.load, ckpt.restore):
        with pytest.raises(
            ckpt.UnsupportedLeaf, match=r"x: it is being traced: load outside of jit"
        ):
            jax.jit(lambda x, load=load: load(tmp_path / "a", {"x": x}))(jnp.zeros(4))


def test_wide_types_of_the_caller(tmp_path):
    with jax.enable_x64(True):
        ckpt.save(tmp_path / "a", {"w": jnp.arange(3, dtype=jnp.float64)})
        pending = ckpt.load_async(tmp_path / "a")
    loaded = pending.result()["w"]
    assert loaded.dtype == np.float64
    pending = ckpt.load_async(tmp_path / "a")
    with pytest.raises(ckpt.CheckpointError, match="64-bit"):
        pending.result()


def test_the_default_device_of_the_caller(tmp_path):
    ckpt.save(tmp_path / "a", {"w": np.ones(3, np.float32), "x": jnp.ones(3)})
    device = jax.devices()[3]
    with jax.default_device(device):
        pending = ckpt.load_async(
            tmp_path / "a", {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, unexpected="ignore"
        )
    assert pending.result()["w"].devices() == {device}


def test_the_mesh_of_the_caller(tmp_path):
    ckpt.save(tmp_path / "a", {"w": np.arange(16, dtype=np.float32)})
    mesh = explicit_mesh((8,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    sharding = jax.sharding.NamedSharding(mesh.abstract_mesh, spec)
    target = {"w": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)}
    with jax.set_mesh(mesh):
        inside = ckpt.load_async(tmp_path / "a", target)
        assert inside.result()["w"].sharding == jax.sharding.NamedSharding(mesh, spec)
        outlives = ckpt.load_async(tmp_path / "a", target)
    assert outlives.result()["w"].sharding == jax.sharding.NamedSharding(mesh, spec)
    outside = ckpt.load_async(tmp_path / "a", target)
    with pytest.raises(ValueError, match="abstract mesh"):
        outside.result()


def test_a_call_while_a_function_is_traced(tmp_path):
    ckpt.save(tmp_path / "a", {"w": np.arange(4, dtype=np.float32)})
    made = jax.jit(lambda: jnp.sum(ckpt.load_async(tmp_path / "a", as_numpy=True).result()["w"]))
    assert made() == 6


def test_what_is_free_is_asked_of_the_default_device(tmp_path, monkeypatch):
    ckpt.save(tmp_path / "a", {"w": np.ones(300, np.float32)})
    target = {"w": jax.ShapeDtypeStruct((300,), jnp.float32)}
    full, empty = jax.devices()[0], jax.devices()[1]

    def memory_stats(device):
        return {"bytes_limit": 1000, "bytes_in_use": 1000 if device == full else 0}

    monkeypatch.setattr(type(full), "memory_stats", memory_stats)
    with pytest.raises(ckpt.CheckpointError, match="0 free bytes of the default device"):
        ckpt.load(tmp_path / "a", target)
    monkeypatch.setattr(
        type(full), "memory_stats", lambda device: memory_stats(device) | {"bytes_limit": 2000}
    )
    with jax.default_device(empty):
        assert ckpt.load(tmp_path / "a", target)["w"].devices() == {empty}


SETTINGS = [
    ("jax_threefry_partitionable", False),
    ("jax_default_prng_impl", "rbg"),
    ("jax_enable_x64", True),
    ("jax_default_matmul_precision", "highest"),
]


@pytest.mark.parametrize(("name", "other"), SETTINGS)
@pytest.mark.parametrize("call", ["save", "save_async", "run"])
def test_a_restore_under_other_settings_of_jax_says_how_to_set_them(name, other, call, tmp_path):
    before, state = getattr(jax.config, name), {"w": jnp.ones(2)}
    jax.config.update(name, other)
    try:
        if call == "run":
            with ckpt.Checkpointer(tmp_path) as run:
                run.save(0, state)
        else:
            pending = getattr(ckpt, call)(tmp_path / "0", state)
            if call == "save_async":
                pending.result()
        ckpt.restore(tmp_path / "0", state)
    finally:
        jax.config.update(name, before)
    assert ckpt.load(tmp_path / "0", state) is not None  # takes values alone
    with pytest.warns(UserWarning, match=rf"{name} was {other!r} and is {before!r}") as told:
        ckpt.restore(tmp_path / "0", state)
    line = str(told[0].message).splitlines()[-1].strip()
    try:
        eval(line, {"jax": jax})
        with ckpt.Checkpointer(tmp_path, read_only=True) as run:
            assert run.restore_latest(state) is not None
    finally:
        jax.config.update(name, before)


def test_settings_that_a_record_does_not_have_or_nobody_knows_say_nothing(tmp_path):
    ckpt.save(tmp_path / "a", {"w": jnp.ones(2)})
    for settings in (None, {}, {"jax_enable_x64": [1], "jax_debug_nans": True}):
        record = read_record(tmp_path / "a")
        record.pop("settings", None)
        write_record(tmp_path / "a", record | ({"settings": settings} if settings else {}))
        ckpt.restore(tmp_path / "a", {"w": jnp.ones(2)})
