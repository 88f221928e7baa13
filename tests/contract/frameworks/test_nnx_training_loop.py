"""Everything a training loop has, checkpointed in three lines, resumed to the bit."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import ckpt_core as ckpt

pytest.importorskip("flax")
pytest.importorskip("grain")

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ckpt_core.testing import assert_exact_resume
from tests.support.compiling import make_quick_compilation  # noqa: F401 (fixture)

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


class Net(nnx.Module):
    """Sharded over ``model``, with dropout and running statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs, kernel_metadata={"out_sharding": (None, "model")})
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


@nnx.jit
def train_step(model: Net, optimizer: Any, metrics: Any, noise: nnx.Rngs, batch: Any) -> Any:
    noisy = batch + 0.01 * noise.normal(batch.shape)

    def loss_of(model: Net) -> Any:
        return jnp.mean((model(noisy) - 1) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    metrics.update(values=loss)
    return loss


def train(directory: Path, report: Any) -> Any:
    """Model, optimizer, random numbers, metrics and data, on eight devices."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    metrics, noise = nnx.metrics.Average(), nnx.Rngs(5)
    numbers = np.arange(400, dtype=np.float32).reshape(50, 8) / 400
    dataset = grain.MapDataset.source(numbers).seed(0).shuffle().repeat().batch(8)
    data = iter(dataset.to_iter_dataset(READ))
    everything = {
        "model": model,
        "optimizer": optimizer,
        "averages": metrics,
        "noise": noise,
        "data": data,
    }
    with ckpt.Checkpointer(directory, max_to_keep=2) as checkpointer:
        restored = checkpointer.restore_latest(**everything)
        for step in range(restored.step + 1 if restored else 0, 6):
            batch = jax.device_put(next(data), NamedSharding(mesh, P("data")))
            loss = train_step(model, optimizer, metrics, noise, batch)
            report(step, loss=loss, batch=batch, **everything)
            checkpointer.save(step, **everything)
    assert model.up.kernel.get_value().sharding.spec == P(None, "model")
    assert len(model.up.kernel.get_value().sharding.device_set) == 8
    return everything


def test_it_resumes_exactly(tmp_path):
    found = assert_exact_resume(train, interrupt_at=(2, 4), directory=tmp_path)
    assert found.resumed_from == (2, 4)
    assert found.leaves > 200


def test_it_survives_being_killed(tmp_path):
    assert_exact_resume(train, interrupt_at=4, by="SIGKILL", directory=tmp_path)


def test_three_lines_are_enough():
    lines = [line for line in inspect.getsource(train).splitlines() if "heckpointer" in line]
    assert len(lines) == 3, lines
