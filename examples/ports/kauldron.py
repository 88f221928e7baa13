"""Trains and evaluates as Kauldron does: a CheckpointHandler, and checkpoints_iterator."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training import train_state


class Batches:
    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        x = np.random.default_rng(self.position).normal(size=(16, 8))
        return x.astype(np.float32), x.sum(1, keepdims=True).astype(np.float32)


class BatchesHandler(ocp.CheckpointHandler):
    def save(self, directory, args):
        (directory / "position.json").write_text(json.dumps(args.batches.position))

    def restore(self, directory, args):
        args.batches.position = json.loads((directory / "position.json").read_text())
        return args.batches


@ocp.args.register_with_handler(BatchesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class BatchesArgs(ocp.args.CheckpointArgs):
    batches: Batches


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(32)(x)))


@jax.jit
def update(state, x, y):
    def loss_of(params):
        return jnp.square(state.apply_fn(params, x) - y).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def evaluate(state):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    return float(jnp.square(state.apply_fn(state.params, x) - x.sum(1, keepdims=True)).mean())


net = Net()
params = net.init(jax.random.key(0), jnp.ones((1, 8)))
state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-2))
batches = Batches()

manager = ocp.CheckpointManager(
    sys.argv[1], options=ocp.CheckpointManagerOptions(max_to_keep=3, step_prefix="ckpt")
)
start = 0
if manager.latest_step() is not None:
    restored = manager.restore(
        manager.latest_step(),
        args=ocp.args.Composite(params=ocp.args.StandardRestore(state), data=BatchesArgs(batches)),
    )
    state, start = restored.params, manager.latest_step() + 1
for step in range(start, 12):
    state, loss = update(state, *next(batches))
    print("step", step, float(loss))
    manager.save(
        step,
        args=ocp.args.Composite(params=ocp.args.StandardSave(state), data=BatchesArgs(batches)),
    )
manager.wait_until_finished()

seen = {}
steps = ocp.checkpoint_utils.checkpoints_iterator(
    sys.argv[1], step_prefix="ckpt", timeout=0.1, timeout_fn=lambda: True
)
for step in steps:
    found = manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(state)))
    seen[step] = evaluate(found.params)
manager.close()
