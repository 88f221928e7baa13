"""Trains a PyTorch network on JAX arrays through torchax; the training survives `kill -9`.

    python examples/torchax_train.py --directory runs/digits   # kill it when you like, start it again
    python examples/torchax_train.py --demo                    # does that and compares the losses

Checkpoints take five lines: the import of ckpt_core, and four lines in `train`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ckpt_core as ckpt
from ckpt_torchax import shim

shim.install()  # for torchax 0.0.13 with torch 2.13; unnecessary with torchax's next release
import torchax  # noqa: E402
import torchax.train  # noqa: E402
from torchax.interop import call_jax, jax_jit, torch_view  # noqa: E402

BATCH = 64


class Network(nn.Module):
    """An ordinary PyTorch module without any torchax code: 784-120-84-10, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(28 * 28))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 28 * 28) - self.mean
        x = self.dropout(F.relu(self.fc1(x)))
        x = self.dropout(F.relu(self.fc2(x)))
        return self.fc3(x)


def digits() -> tuple[Any, Any]:
    """Images of 28 x 28 pixels (scikit-learn's 8 x 8 scaled by 3, with a margin), and labels."""
    bunch: Any = load_digits()
    large = np.kron(bunch.images / 16, np.ones((1, 3, 3)))
    images = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.float32)
    return (
        torch.tensor(images).flatten(1).to("jax"),
        torch.tensor(bunch.target.astype(np.int32)).to("jax"),
    )


def make_step(model: nn.Module, optimizer: Any, env: Any) -> Any:
    """The compiled update: (weights, buffers, opt_state, inputs, labels) -> loss, weights, opt_state."""

    def forward(weights: Any, buffers: Any, inputs: Any) -> Any:
        # The key is an argument, because torchax 0.0.13 cannot draw one inside compiled code.
        images, key = inputs
        with env.override_property(prng=key.jax()):
            return torch.func.functional_call(model, {**weights, **buffers}, (images,))

    return jax_jit(torchax.train.make_train_step(forward, F.cross_entropy, optimizer))


def train(path: Path, report: Callable[..., None], total_steps: int = 1000) -> None:
    """Trains up to `total_steps`, from the newest step in `path`."""
    torchax.enable_globally()
    env = torchax.default_env()
    torch.manual_seed(0)
    env.manual_seed(0)
    images, labels = digits()
    model = Network().to("jax")
    model.mean.copy_(images.mean(0))
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    optimizer = optax.adam(1e-3)
    opt_state = call_jax(optimizer.init, weights)
    update = make_step(model, optimizer, env)

    with ckpt.Checkpointer(path, step_prefix="step", max_to_keep=3, save_interval_steps=100) as run:
        restored = run.restore_latest(model=model, optimizer=opt_state, random=env)
        for step in range(restored.step + 1 if restored else 0, total_steps):
            rows = torch_view(np.arange(BATCH) + step * BATCH) % len(labels)
            inputs = (images[rows], torch_view(env.get_and_rotate_prng_key()))
            loss, weights, opt_state = update(weights, buffers, opt_state, inputs, labels[rows])
            run.save(step, model={**weights, **buffers}, optimizer=opt_state, random=env)
            report(step, loss=float(loss))


def demonstrate() -> None:
    """Kills a run, resumes it, and compares its losses with an uninterrupted run."""
    from ckpt_core.testing import assert_exact_resume

    training = functools.partial(train, total_steps=200)
    found = assert_exact_resume(training, interrupt_at=149, by="SIGKILL")
    (killed,), (resumed,) = found.interrupted_at, found.resumed_from
    following = sum(step > killed for step in found.steps)
    print(f"killed at step {killed}, resumed from step {resumed}: ", end="")
    print(f"{following} of the next {following} losses are equal")


def show(step: int, loss: float) -> None:
    """Prints the loss of every tenth step."""
    if step % 10 == 0:
        print(f"step {step}: {loss:.4f}", flush=True)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/digits"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--demo", action="store_true", help="kill, resume, compare")
    arguments = parser.parse_args()
    if arguments.demo:
        demonstrate()
    else:
        train(arguments.directory, show, arguments.steps)


if __name__ == "__main__":
    main()
