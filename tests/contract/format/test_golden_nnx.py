"""NNX objects saved when their arrays were named like their paths, without Orbax's key `value`.

The checkpoint was written once, by the code of that time; every later one must load it.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import ckpt_core as ckpt
from ckpt_core.testing import assert_same

GOLDEN = Path(__file__).parent / "golden" / "v1_nnx"


class Net(nnx.Module):
    """A Variable of every sort: parameters, statistics, keys, a tree, a number; and a bare array."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])
        self.heads = nnx.Dict({"0": nnx.Linear(3, 1, rngs=rngs)})
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tree = nnx.Variable({"a": jnp.ones(2), "b": (jnp.zeros(1), jnp.ones(1))})
        self.number = nnx.Variable(2.5)
        self.bare = nnx.data(jnp.arange(3))


def objects(seed):
    """A model and its optimizer."""
    model = Net(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def numbered(objects_, start):
    """Sets every array to numbers of its own, which every platform makes the same."""
    for position, variable in enumerate(
        jax.tree.leaves(
            [nnx.state(obj) for obj in objects_], is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
    ):
        value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else None
        if isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            numbers = np.arange(value.size) + start + position
            variable.set_raw_value(jnp.asarray(numbers.reshape(value.shape), value.dtype))
    return objects_


def saved():
    """What the golden checkpoint holds."""
    return numbered(objects(0), 1)


def test_restores_into_live_objects():
    model, optimizer = objects(1)
    ckpt.restore(GOLDEN, model=model, optimizer=optimizer)
    want_model, want_optimizer = saved()
    assert_same(model, want_model)
    assert_same(optimizer, want_optimizer)


def test_loads_into_a_state_and_without_a_target():
    want, _ = saved()
    state = ckpt.load(GOLDEN, nnx.state(objects(1)[0]), item="model")
    assert isinstance(state, nnx.State)
    assert_same(state, nnx.state(want))
    plain = ckpt.load(GOLDEN, item="model")
    np.testing.assert_array_equal(plain["layers"][0]["kernel"], want.layers[0].kernel)
    assert plain["number"] == 2.5


def test_verifies_and_shows_the_same_paths_as_today(tmp_path):
    assert ckpt.verify(GOLDEN).ok
    model, optimizer = saved()
    ckpt.save(tmp_path / "now", model=model, optimizer=optimizer)
    before, now = ckpt.inspect(GOLDEN).items, ckpt.inspect(tmp_path / "now").items
    for item in ("model", "optimizer"):
        assert [leaf.path for leaf in before[item].leaves] == [
            leaf.path for leaf in now[item].leaves
        ]
