"""Trains as Big Vision did: FSDP, with everything gathered and written by numpy.savez."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

path = os.path.join(sys.argv[1], "checkpoint.npz")
mesh = Mesh(np.array(jax.devices()), ("fsdp",))


def sharding_of(leaf):
    sizes = [size if size % 4 == 0 and leaf.size >= 512 else 0 for size in jnp.shape(leaf)]
    spec = [None] * len(sizes)
    if any(sizes):
        spec[int(np.argmax(sizes))] = "fsdp"
    return NamedSharding(mesh, P(*spec))


def spread(tree):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding_of(leaf)), tree)


def names_of(tree):
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(key, simple=True, separator="/") for key, _ in paths], treedef


def save(path, tree, step):
    names, _ = names_of(tree)
    arrays = {name: np.asarray(leaf) for name, leaf in zip(names, jax.tree.leaves(tree))}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + "-TMP", "wb") as file:
        np.savez(file, step=step, **arrays)
    os.rename(path + "-TMP", path)


def load(path, like):
    names, treedef = names_of(like)
    with np.load(path) as file:
        leaves = [file[name] for name in names]
        return spread(jax.tree.unflatten(treedef, leaves)), int(file["step"])


def loss_of(params, x, y):
    hidden = jax.nn.gelu(x @ params["embed"]["kernel"])
    logits = hidden @ params["head"]["kernel"] + params["head"]["bias"]
    return optax.sigmoid_binary_cross_entropy(logits, y).mean()


@jax.jit
def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adafactor(1e-2, min_dim_size_to_factor=32, momentum=0.9),
)
one, two = jax.random.split(jax.random.key(0))
params = spread(
    {
        "embed": {"kernel": jax.random.normal(one, (32, 128)) / 6},
        "head": {"kernel": jax.random.normal(two, (128, 64)) / 12, "bias": jnp.zeros((64,))},
    }
)
opt_state = spread(tx.init(params))
start = 0
if os.path.exists(path):
    (params, opt_state), last = load(path, (params, opt_state))
    start = last + 1
for step in range(start, 12):
    random = np.random.default_rng(step)
    x = random.normal(size=(16, 32)).astype(np.float32)
    params, opt_state, loss = update(params, opt_state, x, (x.repeat(2, 1) > 0) * 1.0)
    print("step", step, float(loss))
    save(path, (params, opt_state), step)
