"""NNX models to save, and what it means that two are the same."""

from typing import Any

import pytest

pytest.importorskip("flax")
pytest.importorskip("ckpt_flax_nnx")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ckpt_flax_nnx import ADAPTER


def host(value: Any) -> Any:
    """A leaf as something that compares bit for bit."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        array = np.asarray(value)
        return (array.dtype.name, array.shape, array.tobytes())
    return (type(value), value)


def same(left: Any, right: Any) -> bool:
    """Whether two states have the same structure, types and bits."""
    leaves, structure = jax.tree.flatten(left)
    others, other_structure = jax.tree.flatten(right)
    return structure == other_structure and list(map(host, leaves)) == list(map(host, others))


def state_of(obj: Any) -> Any:
    """A copy of everything that a live object holds."""
    return jax.tree.map(lambda x: x.copy() if hasattr(x, "copy") else x, ADAPTER.get_state(obj))


class MLP(nnx.Module):
    def __init__(self, seed: int = 0, *, width: int = 8, layers: int = 2):
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(self.dropout(self.norm(x)))


class Holder(nnx.Module):
    """A module with the attributes that it is given."""

    def __init__(self, **attributes: Any):
        for name, value in attributes.items():
            setattr(self, name, value)


@nnx.jit
def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


class Annotated(nnx.Module):
    def __init__(self, seed: int, **metadata: Any):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(
            8, 16, rngs=rngs, kernel_metadata={"out_sharding": (None, "model"), **metadata}
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.data(jnp.ones(3))

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def build(seed: int) -> dict[str, Any]:
    model = Annotated(seed)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}
