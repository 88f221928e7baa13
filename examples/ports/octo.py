"""Trains as Octo does: one CheckpointManager for all weights, and in its directory another for the newest state."""

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax import linen as nn
from flax import struct
from flax.training import orbax_utils

STEPS, EVERY = 12, 2


class Policy(nn.Module):
    @nn.compact
    def __call__(self, seen, train):
        x = nn.Dropout(0.1, deterministic=not train)(nn.gelu(nn.Dense(32)(seen)))
        return nn.Dense(4)(x)


@struct.dataclass
class Robot:
    module: nn.Module = struct.field(pytree_node=False)
    config: dict = struct.field(pytree_node=False)
    params: Any
    example: Any

    def save_pretrained(self, step, manager):
        save_args = orbax_utils.save_args_from_target(self.params)
        manager.save(step, self.params, {"save_args": save_args})
        path = os.path.join(str(manager._directory), "config.json")
        if jax.process_index() == 0 and not os.path.exists(path):
            with open(path, "w") as file:
                json.dump(self.config, file)


@struct.dataclass
class TrainState:
    rng: Any
    model: Robot
    step: Any
    opt_state: Any


@jax.jit
def train_step(state, seen, wanted):
    rng, dropout = jax.random.split(state.rng)

    def loss_of(params):
        found = state.model.module.apply({"params": params}, seen, True, rngs={"dropout": dropout})
        return jnp.square(found - wanted).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.model.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.model.params)
    model = state.model.replace(params=optax.apply_updates(state.model.params, updates))
    return TrainState(rng, model, state.step + 1, opt_state), loss


tx = optax.adamw(1e-2)
policy, example = Policy(), {"seen": np.ones((1, 8), np.float32)}
params = policy.init(jax.random.PRNGKey(0), example["seen"], False)["params"]
model = Robot(policy, {"hidden": 32}, params, example)
state = TrainState(jax.random.PRNGKey(1), model, 0, tx.init(params))

state_manager = orbax.checkpoint.CheckpointManager(
    os.path.join(sys.argv[1], "state"),
    orbax.checkpoint.PyTreeCheckpointer(),
    options=orbax.checkpoint.CheckpointManagerOptions(max_to_keep=1),
)
params_manager = orbax.checkpoint.CheckpointManager(
    sys.argv[1], orbax.checkpoint.PyTreeCheckpointer()
)
if state_manager.latest_step() is not None:
    state = jax.device_get(state_manager.restore(state_manager.latest_step(), items=state))
for step in range(int(state.step), STEPS):
    seen = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    state, loss = train_step(state, seen, seen[:, :4] * seen[:, 4:])
    print("step", step, float(loss))
    if (step + 1) % EVERY == 0:
        state.model.save_pretrained(step + 1, manager=params_manager)
        save_args = orbax_utils.save_args_from_target(state)
        state_manager.save(step + 1, state, {"save_args": save_args})
