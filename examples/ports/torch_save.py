"""Trains as torchax' example does, with dropout, and saves by torch.save."""

import os
import sys

import jax
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_torchax import shim

shim.install()
import torchax
import torchax.train
from torchax.interop import call_jax, jax_view, torch_view

path = os.path.join(sys.argv[1], "last.pt")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.2)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


def forward(weights, buffers, images):
    return torch.func.functional_call(model, {**weights, **buffers}, (images,))


def save(step, *trees):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax_view(trees))]
    os.makedirs(sys.argv[1], exist_ok=True)
    torch.save({"step": step, "leaves": [torch.from_numpy(leaf) for leaf in leaves]}, path + ".tmp")
    os.replace(path + ".tmp", path)


def load(*trees):
    state = torch.load(path)
    leaves = [jax.numpy.asarray(leaf.numpy()) for leaf in state["leaves"]]
    treedef = jax.tree.structure(jax_view(trees))
    return state["step"], torch_view(jax.tree.unflatten(treedef, leaves))


torch.manual_seed(0)
torchax.enable_globally()
env = torchax.default_env()
env.manual_seed(0)
model = Classifier().to("jax")
weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
optimizer = optax.adam(1e-2)
opt_state = call_jax(optimizer.init, weights)
train_step = torchax.train.make_train_step(forward, F.cross_entropy, optimizer)

start = 0
if os.path.exists(path):
    last, (weights, opt_state, random) = load(weights, opt_state, env.param.prng)
    env.param.prng, start = jax_view(random), last + 1
for step in range(start, 12):
    numbers = np.random.default_rng(step)
    images = torch.tensor(numbers.normal(size=(16, 16)).astype(np.float32)).to("jax")
    labels = torch.tensor(numbers.integers(0, 4, 16).astype(np.int32)).to("jax")
    loss, weights, opt_state = train_step(weights, buffers, opt_state, images, labels)
    print("step", step, float(loss))
    save(step, weights, opt_state, env.param.prng)
