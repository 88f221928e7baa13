"""Trains as Flax' ImageNet example does: Linen, batch statistics, flax.training.checkpoints."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import checkpoints, train_state

workdir = sys.argv[1]


class TrainState(train_state.TrainState):
    batch_stats: dict


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(x.mean((1, 2)))


@jax.jit
def train_step(state, images, labels):
    def loss_of(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, changed["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


net = Net()
variables = net.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
state = TrainState.create(
    apply_fn=net.apply,
    params=variables["params"],
    batch_stats=variables["batch_stats"],
    tx=optax.sgd(optax.cosine_decay_schedule(0.1, 12), momentum=0.9, nesterov=True),
)

state = checkpoints.restore_checkpoint(workdir, state)
for step in range(int(state.step), 12):
    random = np.random.default_rng(step)
    images = random.normal(size=(16, 8, 8, 3)).astype(np.float32)
    state, loss = train_step(state, images, random.integers(0, 10, 16))
    print("step", step, float(loss))
    checkpoints.save_checkpoint_multiprocess(workdir, state, int(state.step), keep=3)
