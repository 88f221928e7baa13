"""Trains an Equinox model: a line of JSON, then tree_serialise_leaves."""

import json
import os
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

directory = sys.argv[1]
hyper = {"in_size": 2, "out_size": 1, "width_size": 32, "depth": 2}


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    scale: jax.Array

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(**hyper, key=key)
        self.dropout = eqx.nn.Dropout(0.1)
        self.scale = jnp.ones(())

    def __call__(self, x, key):
        return self.scale * self.mlp(self.dropout(x, key=key))


@eqx.filter_jit
def update(model, opt_state, x, y, key):
    def loss_of(model):
        found = jax.vmap(model)(x, jax.random.split(key, len(x)))
        return jnp.square(found[:, 0] - y).mean()

    loss, grads = eqx.filter_value_and_grad(loss_of)(model)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def save(step, model, opt_state):
    os.makedirs(directory, exist_ok=True)
    with open(f"{directory}/{step}.tmp", "wb") as file:
        file.write((json.dumps(hyper) + "\n").encode())
        eqx.tree_serialise_leaves(file, (model, opt_state))
    os.rename(f"{directory}/{step}.tmp", f"{directory}/{step}.eqx")


def load(step, like):
    with open(f"{directory}/{step}.eqx", "rb") as file:
        assert json.loads(file.readline()) == hyper
        return eqx.tree_deserialise_leaves(file, like)


tx = optax.adamw(1e-2)
model = Net(jax.random.key(0))
opt_state = tx.init(eqx.filter(model, eqx.is_array))
names = os.listdir(directory) if os.path.isdir(directory) else []
last = max((int(name[:-4]) for name in names if name.endswith(".eqx")), default=-1)
if last >= 0:
    model, opt_state = load(last, (model, opt_state))
for step in range(last + 1, 12):
    x = np.random.default_rng(step).normal(size=(32, 2)).astype(np.float32)
    key = jax.random.fold_in(jax.random.key(1), step)
    model, opt_state, loss = update(model, opt_state, x, np.sin(x).sum(1), key)
    print("step", step, float(loss))
    save(step, model, opt_state)
