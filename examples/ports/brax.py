"""Trains as Brax does: PyTreeCheckpointer at paths of the program's own, JSON beside the arrays."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

directory = pathlib.Path(sys.argv[1])
config = {"observation_size": 4, "hidden": 32, "learning_rate": 1e-2}


def init(key):
    one, two = jax.random.split(key)
    return {
        "policy": jax.random.normal(one, (config["observation_size"], config["hidden"])) / 2,
        "head": jax.random.normal(two, (config["hidden"], 4)) / 4,
        "value": jnp.zeros((config["hidden"],)),
    }


def loss_of(params, key):
    place = jax.random.normal(key, (64, config["observation_size"]))
    hidden = jnp.tanh(place @ params["policy"])
    after = place + hidden @ params["head"]
    reward = -jnp.square(after).sum(-1)
    return jnp.square(hidden @ params["value"] - reward).mean() - reward.mean()


@jax.jit
def update(params, opt_state, key):
    loss, grads = jax.value_and_grad(loss_of)(params, key)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def save(step, *state):
    path = directory / f"{step:012d}"
    path.mkdir(parents=True, exist_ok=True)
    ocp.PyTreeCheckpointer().save(path, state, force=True)
    (path / "config.json").write_text(json.dumps(config))


def newest():
    found = directory.glob("*/config.json")
    return max((file.parent for file in found if file.parent.name.isdigit()), default=None)


def load(path, *like):
    assert json.loads((path / "config.json").read_text()) == config
    restore_args = ocp.checkpoint_utils.construct_restore_args(like)
    return ocp.PyTreeCheckpointer().restore(path, item=like, restore_args=restore_args)


tx = optax.adam(config["learning_rate"])
params = init(jax.random.key(0))
opt_state = tx.init(params)
random = jax.random.key_data(jax.random.key(1))
start = 0
if (path := newest()) is not None:
    params, opt_state, random = load(path, params, opt_state, random)
    start = int(path.name) + 1

for step in range(start, 12):
    key, after = jax.random.split(jax.random.wrap_key_data(random))
    random = jax.random.key_data(after)
    params, opt_state, loss = update(params, opt_state, key)
    print("step", step, float(loss))
    save(step, params, opt_state, random)
