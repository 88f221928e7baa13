"""Several processes: whatever a save acknowledged, the same program restores in new processes."""

import pytest

from tests.support.same_program import comes_back

MESH = """
import jax.numpy as jnp
mesh = Mesh(np.array(jax.devices()), ("x",))
def sharded(values, *spec):
    values = np.asarray(values)
    place = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(values.shape, place, lambda at: values[at])
def params(n):
    return {"w": sharded(np.arange(32, dtype=np.float32).reshape(8, 4) + n, "x"), "b": sharded(np.ones(4) + n)}
"""

STATES = {
    "a step and a key": """
def make(n):
    return {"params": params(n), "step": jnp.int32(n), "key": jax.random.key(n), "weak": jnp.asarray(n * 1.0)}
""",
    "only a step": """
def make(n):
    return {"step": jnp.int32(n), "host": n, "text": "seven", "array": np.arange(3)}
""",
    "optax": """
import optax
def make(n):
    p = params(n)
    tx = optax.adamw(1e-3)
    return {"params": p, "opt": jax.tree.map(lambda leaf: leaf + n, tx.init(p))}
""",
    "a TrainState": """
import optax
from flax.training.train_state import TrainState
tx = optax.adam(1e-3)
def apply(*arguments): return None
def make(n):
    return TrainState.create(apply_fn=apply, params=params(n), tx=tx).replace(step=jnp.int32(n))
""",
    "an Equinox module": """
import equinox as eqx
class Model(eqx.Module):
    w: jax.Array
    scale: jax.Array
    inner: eqx.nn.Linear
def make(n):
    return Model(params(n)["w"], jnp.float32(n), eqx.nn.Linear(2, 3, key=jax.random.key(n)))
""",
    "stages": """
def of(process):
    return [device for device in jax.devices() if device.process_index == process]
def on(place, values):
    parts = [jax.device_put(values[at], device)
        for device, at in place.addressable_devices_indices_map(values.shape).items()]
    return jax.make_array_from_single_device_arrays(values.shape, place, parts, dtype=values.dtype)
def make(n):
    found = {"params": params(n), "step": jnp.int32(n)}
    for process in range(count):
        submesh = Mesh(np.array(of(process)), ("y",))
        values = np.arange(8, dtype=np.float32) + n + process
        found[f"stage{process}"] = on(NamedSharding(submesh, P("y")), values)
        found[f"whole{process}"] = on(NamedSharding(submesh, P()), values)
        found[f"single{process}"] = on(jax.sharding.SingleDeviceSharding(of(process)[1]), values)
    return found
""",
    "an NNX model": """
from flax import nnx
class Model(nnx.Module):
    def __init__(self, n):
        self.w = nnx.Param(params(n)["w"])
        self.small = nnx.Param(jnp.arange(3.0) + n)
        self.step = nnx.Variable(jnp.int32(n))
        self.rngs = nnx.Rngs(n, dropout=n + 1)
def make(n):
    return Model(n)
def view(model):
    return nnx.to_pure_dict(nnx.state(model)) if isinstance(model, nnx.Module) else None
""",
    "one stage": """
def make(n):
    place = NamedSharding(Mesh(np.array([d for d in jax.devices() if d.process_index == 1]), ("y",)), P("y"))
    values = np.arange(8, dtype=np.float32) + n
    parts = [jax.device_put(values[at], device)
        for device, at in place.addressable_devices_indices_map(values.shape).items()]
    return {"stage": jax.make_array_from_single_device_arrays(values.shape, place, parts, dtype=values.dtype)}
""",
}


@pytest.mark.parametrize("name", STATES)
def test_what_was_acknowledged_comes_back(tmp_path, name):
    """Sharded arrays beside those that no mesh holds, and arrays of one process alone."""
    comes_back(MESH + STATES[name], tmp_path / "saved")


def test_four_processes(tmp_path):
    comes_back(MESH + STATES["stages"], tmp_path / "saved", processes=4)
