"""Trains a PyTorch network on JAX arrays through torchax; the training survives `kill -9`.

    python examples/torchax_train.py --directory runs/digits   # kill it when you like, start it again
    python examples/torchax_train.py --demo                    # does that and compares the losses

Checkpoints take five lines: the import of ckpt_core, and four lines in `train`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
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


def train(path: Path, total_steps: int) -> dict[int, str]:
    """Trains up to `total_steps`, from the newest step in `path`; returns step -> bits of the loss."""
    losses: dict[int, str] = {}
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
            losses[step] = float(loss).hex()
            run.save(step, model={**weights, **buffers}, optimizer=opt_state, random=env)
    return losses


def demonstrate(directory: Path) -> int:
    """Kills a run, resumes it, and compares its next 50 losses with an uninterrupted run."""
    killed = start(directory / "killed", 1_000_000)
    first_saved = directory / "killed" / "step_100"
    while not first_saved.exists():
        if killed.poll() is not None:
            raise SystemExit("the run ended by itself")
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()

    with ckpt.Checkpointer(directory / "killed", step_prefix="step", read_only=True) as run:
        latest = run.latest_step()
    assert latest is not None
    resuming = start(directory / "killed", latest + 51)
    straight = train(directory / "straight", latest + 51)
    resumed: dict[str, str] = json.loads(resuming.communicate()[0] or "{}")
    following = range(latest + 1, latest + 51)
    equal = sum(resumed.get(str(step)) == straight[step] for step in following)
    print(f"killed, resumed after step {latest}: {equal} of the next 50 losses are equal")
    print(f"loss at first {float.fromhex(straight[0])}, now {float.fromhex(straight[latest + 50])}")
    return 0 if len(resumed) == equal == 50 else 1


def start(path: Path, total_steps: int) -> subprocess.Popen[str]:
    """Starts this script in a new process, which prints its losses at the end."""
    command = [sys.executable, __file__, "--directory", str(path), "--steps", str(total_steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> int:
    """Parses the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/digits"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--demo", action="store_true", help="kill, resume, compare")
    arguments = parser.parse_args()
    if arguments.demo:
        return demonstrate(arguments.directory)
    print(json.dumps(train(arguments.directory, arguments.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
