"""The other half of the flax package: Linen's states, with and within NNX."""

from typing import Any

import pytest

import ckpt_core as ckpt

pytest.importorskip("flax")
pytest.importorskip("ckpt_flax_nnx")
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from ckpt_flax_nnx import ADAPTER
from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)
from tests.support.nnx_models import X, host, same, state_of


def test_linen_objects_are_plain_pytrees(tmp_path):
    for cls in (TrainState, FrozenDict, nn.Partitioned, nn.Dense, nnx.TrainState):
        assert not ADAPTER.accepts(cls)
    tree = freeze({"params": {"kernel": nn.Partitioned(jnp.ones((2, 2)), (None, "model"))}})
    ckpt.save(tmp_path / "a", tree)
    loaded = ckpt.load(tmp_path / "a", jax.tree.map(jnp.zeros_like, tree))
    assert type(loaded) is FrozenDict
    assert same(loaded, tree)


def test_linen_train_state(tmp_path):
    dense = nn.Dense(3)

    def make(seed: int) -> TrainState:
        params = dense.init(jax.random.key(seed), jnp.ones((1, 2)))["params"]
        return TrainState.create(apply_fn=dense.apply, params=params, tx=optax.adam(1e-2))

    state = make(0)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    ckpt.save(tmp_path / "a", state)
    target = make(1)
    loaded = ckpt.load(tmp_path / "a", target)
    assert isinstance(loaded, TrainState)
    assert loaded.tx is target.tx
    assert type(loaded.step) is int
    assert loaded.step == 1
    assert same(jax.tree.leaves(loaded), jax.tree.leaves(state))


def test_objects_of_keras_are_not_taken():
    # In Keras' NNX mode its layers inherit from nnx.Module, and their attributes are no NNX graph.
    layer = type("Layer", (nnx.Module,), {"__module__": "keras.src.layers.layer"})
    mine = type("Mine", (layer,), {"__module__": "__main__"})
    assert not ADAPTER.accepts(layer)
    assert not ADAPTER.accepts(mine)


def test_linen_train_state_with_boxes_on_a_mesh(tmp_path, mesh):
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    dense = nn.Dense(4, kernel_init=init)
    tx = optax.adam(1e-2)  # static, so part of the structure

    def make() -> TrainState:
        params = dense.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
        return TrainState.create(apply_fn=dense.apply, params=params, tx=tx)

    abstract_state = jax.eval_shape(make)
    shardings = nn.get_sharding(abstract_state, mesh)
    state = jax.jit(make, out_shardings=shardings)()
    ckpt.save(tmp_path / "a", state)
    target = jax.tree.map(
        lambda box, sharding: jax.tree.map(lambda x: x.update(sharding=sharding), box),
        abstract_state,
        shardings,
        is_leaf=lambda x: isinstance(x, nn.Partitioned),
    )
    loaded = ckpt.load(tmp_path / "a", target)
    assert isinstance(loaded.params["kernel"], nn.Partitioned)
    assert loaded.params["kernel"].value.sharding.spec == P(None, "model")
    assert isinstance(loaded.step, jax.Array)
    assert same(loaded, state)


def test_nnx_inside_linen(tmp_path):
    linen = nnx.bridge.to_linen(nnx.Linear, 4, 3)
    variables = linen.init(jax.random.key(0), X)
    ckpt.save(tmp_path / "a", variables)
    other = linen.init(jax.random.key(1), X)
    loaded = ckpt.load(tmp_path / "a", other)
    assert same(loaded, variables)
    assert host(linen.apply(loaded, X)) == host(linen.apply(variables, X))


def test_linen_inside_nnx(tmp_path):
    def make(seed: int) -> Any:
        return nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(seed))

    model, other = make(0), make(1)
    model.lazy_init(X)
    ckpt.save(tmp_path / "a", model=model)
    with pytest.raises(ckpt.StructureMismatch, match="kernel"):
        ckpt.restore(tmp_path / "a", model=other)  # it has no parameters before lazy_init
    other.lazy_init(X)
    ckpt.restore(tmp_path / "a", model=other)
    assert same(state_of(other), state_of(model))
