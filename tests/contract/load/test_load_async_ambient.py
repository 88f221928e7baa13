"""``load_async`` loads with the 64-bit types, the default device and the mesh of the thread that called it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt_core as ckpt
from tests.contract.faults.crafted.signed import read_record, write_record
from tests.support.meshes import explicit_mesh


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
