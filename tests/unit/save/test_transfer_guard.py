"""Saves and restores under `jax.transfer_guard`, and without the private functions of jax that they use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src import config
from jax._src.interpreters import pxla
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core._devices import placing
from tests.support import keras_models as km

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def tree(mesh: Any, devices: list[Any]) -> dict[str, Any]:
    rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return {
        "array": jnp.arange(12.0).reshape(3, 4),
        "large": jnp.ones((600, 1000)),
        "elsewhere": jax.device_put(jnp.ones(3), devices[-1]),
        "sharded": jax.device_put(jnp.arange(32.0).reshape(8, 4), rows),
        "replicated": jax.device_put(jnp.ones(5), everywhere),
        "weak": jnp.asarray(1.5),
        "weak everywhere": jax.device_put(2.5, everywhere),
        "bfloat16": jnp.ones(3, jnp.bfloat16),
        "four bits": jnp.ones(3, jnp.uint4),
        "empty": jnp.zeros((0, 2)),
        "key": jax.random.key(1),
        "keys": jax.device_put(jax.random.split(jax.random.key(2), 8), rows),
        "raw key": jax.random.PRNGKey(3),
        "numpy": np.arange(5),
        "scalar": np.float32(2.5),
        "python": [1, 2.5, True, "text", None],
        "generator": np.random.default_rng(0),
    }


def same(one: Any, other: Any) -> None:
    ones, others = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(ones) == len(others)
    for a, b in zip(ones, others, strict=True):
        if isinstance(a, jax.Array):
            assert (a.dtype, a.sharding, a.committed) == (b.dtype, b.sharding, b.committed)
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


WAYS: dict[str, Callable[[Path, Any], Any]] = {
    "load": lambda path, tree: ckpt.load(path),
    "load like": lambda path, tree: ckpt.load(path, tree),
    "load async": lambda path, tree: ckpt.load_async(path).result(),
    "restore": lambda path, tree: ckpt.restore(path, state=tree)["state"],
    "restore, cast": lambda path, tree: ckpt.restore(path, state=tree, cast=True)["state"],
}


@pytest.mark.parametrize("way", WAYS)
def test_trees(tmp_path: Path, tree: dict[str, Any], way: str) -> None:
    with jax.transfer_guard("disallow"):
        ckpt.save(tmp_path / "a", tree)
        ckpt.save_async(tmp_path / "b", tree).result()
        got = [WAYS[way](tmp_path / name, tree) for name in "ab"]
    for one in got:
        same(tree, one)


@pytest.mark.parametrize("snapshot", ["host", "device", "pinned_host"])
def test_snapshots_elsewhere(tmp_path: Path, tree: dict[str, Any], snapshot: Any) -> None:
    with jax.transfer_guard("disallow"):
        options = ckpt.Options(snapshot=snapshot)
        ckpt.save_async(tmp_path / "a", tree, options=options).result()
        got = ckpt.load(tmp_path / "a")
    same(tree, got)


class Model(nnx.Module):
    def __init__(self, value: float):
        self.w = nnx.Param(jnp.full((4, 4), value))
        self.reference = nnx.Variable(jnp.full(3, value), ref=True)
        self.rngs = nnx.Rngs(int(value))


def keras_model(value: float) -> Any:
    model = km.keras.Sequential([km.keras.Input((4,)), km.keras.layers.Dense(4)])
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    for variable in model.weights:
        variable.assign(jnp.full(variable.shape, value))
    return model


@pytest.mark.parametrize("make", [Model, keras_model])
@pytest.mark.parametrize("atomic", [False, True])
def test_live_objects(tmp_path: Path, make: Any, atomic: bool) -> None:
    saved, target = make(3.0), make(1.0)
    options = ckpt.Options(atomic_restore=atomic)
    with jax.transfer_guard("disallow"):
        ckpt.save(tmp_path / "a", model=saved)
        ckpt.restore(tmp_path / "a", model=target, options=options)
        ckpt.save(tmp_path / "b", model=target)
    same(ckpt.load(tmp_path / "a", as_numpy=True), ckpt.load(tmp_path / "b", as_numpy=True))


def test_who_forbids_explicit_transfers_too_gets_jax_s_own_error(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", model=Model(3.0))
    model = Model(1.0)
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            ckpt.restore(tmp_path / "a", model=model)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            ckpt.load(tmp_path / "a")
    assert bool((model.w.get_raw_value() == 1.0).all())


def another_signature(*, arrays: Any) -> Any:
    raise AssertionError("nobody can call it")


def no_longer_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pxla, "batched_device_put")


def no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(config, "explicit_device_put_scope")
    monkeypatch.delattr(config, "explicit_device_get_scope")


def of_another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pxla, "batched_device_put", another_signature)


@pytest.mark.parametrize("change", [no_longer_there, no_scope, of_another_signature])
def test_a_jax_without_the_quick_way_is_slower_and_says_so_once(
    tmp_path: Path,
    tree: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    ckpt.save(tmp_path / "a", tree)
    monkeypatch.setattr(placing, "_fast_path", placing._FastPath())
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        with monkeypatch.context() as patch:  # jax itself needs it for what comes after
            change(patch)
            placing._fast_path.get()
        with jax.transfer_guard("disallow"):
            loaded = ckpt.load(tmp_path / "a")
            restored = ckpt.restore(tmp_path / "a", state=tree)["state"]
    same(tree, loaded)
    same(tree, restored)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "slower" in told[0] and jax.__version__ in told[0]
