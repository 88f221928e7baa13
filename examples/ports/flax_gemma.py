"""Trains as Flax' Gemma example does: an NNX model, and a CheckpointManager with policies."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import checkpoint_managers

mesh = Mesh(np.array(jax.devices()), ("fsdp",))


class Block(nnx.Module):
    def __init__(self, size, rngs):
        self.norm = nnx.RMSNorm(size, rngs=rngs)
        self.up = nnx.Linear(size, 4 * size, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(4 * size, size, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.drop(nnx.gelu(self.up(self.norm(x)))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = nnx.List([Block(16, rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def spread(leaf):
    sharded = leaf.ndim == 2 and leaf.shape[0] % 4 == 0
    return jax.device_put(leaf, NamedSharding(mesh, P("fsdp") if sharded else P()))


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def state():
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
for part in (model, optimizer):
    nnx.update(part, jax.tree.map(spread, nnx.state(part)))

manager = ocp.CheckpointManager(
    sys.argv[1],
    options=ocp.CheckpointManagerOptions(
        save_decision_policy=checkpoint_managers.FixedIntervalPolicy(1),
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(
            [checkpoint_managers.LatestN(2), checkpoint_managers.EveryNSteps(5)]
        ),
    ),
)
start = 0
if manager.latest_step() is not None:
    target = ocp.args.StandardRestore(state())
    restored = manager.restore(manager.latest_step(), args=target)
    nnx.update(model, restored["model"])
    nnx.update(optimizer, restored["optimizer"])
    start = manager.latest_step() + 1
for step in range(start, 12):
    tokens = jnp.asarray(np.random.default_rng(step).integers(0, 32, (8, 17)))
    print("step", step, float(train_step(model, optimizer, tokens)))
    manager.save(step, args=ocp.args.StandardSave(state()))
manager.close()
