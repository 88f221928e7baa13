"""Saves and restores under `jax.transfer_guard`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ckpt_core as ckpt
from ckpt_core.testing import assert_same
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


def traits(tree: Any) -> list[Any]:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return [(leaf.sharding, leaf.committed, getattr(leaf, "weak_type", None)) for leaf in arrays]


@pytest.mark.parametrize("snapshot", ["host", "device", "pinned_host"])
def test_trees(tmp_path, tree, snapshot):
    options = ckpt.Options(snapshot=snapshot)
    with jax.transfer_guard("disallow"):
        ckpt.save(tmp_path / "a", tree)
        ckpt.save_async(tmp_path / "b", tree, options=options).result()
        got = [
            ckpt.load(tmp_path / "a"),
            ckpt.load(tmp_path / "b"),
            ckpt.load(tmp_path / "a", tree),
            ckpt.load_async(tmp_path / "b").result(),
            ckpt.restore(tmp_path / "a", state=tree)["state"],
            ckpt.restore(tmp_path / "b", state=tree, cast=True)["state"],
        ]
    for one in got:
        assert_same(one, tree)
        assert traits(one) == traits(tree)


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


@pytest.mark.parametrize(("make", "atomic"), [(Model, False), (Model, True), (keras_model, False)])
def test_live_objects(tmp_path, make, atomic):
    saved, target = make(3.0), make(1.0)
    options = ckpt.Options(atomic_restore=atomic)
    with jax.transfer_guard("disallow"):
        ckpt.save(tmp_path / "a", model=saved)
        ckpt.restore(tmp_path / "a", model=target, options=options)
        ckpt.save(tmp_path / "b", model=target)
    # leaf by leaf: the names of Keras' layers are counted in the process
    one, other = (jax.tree.leaves(ckpt.load(tmp_path / name, as_numpy=True)) for name in "ab")
    assert_same(one, other)


def test_who_forbids_explicit_transfers_too_gets_jax_s_own_error(tmp_path):
    ckpt.save(tmp_path / "a", model=Model(3.0))
    model = Model(1.0)
    with jax.transfer_guard("disallow_explicit"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            ckpt.restore(tmp_path / "a", model=model)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            ckpt.load(tmp_path / "a")
    assert bool((model.w.get_raw_value() == 1.0).all())
