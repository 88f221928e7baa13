"""A PyTorch network trained on JAX arrays through torchax, that survives `kill -9`.

    python examples/torchax_train.py --directory runs/digits   # kill it when you like, start it again
    python examples/torchax_train.py --demo                    # does that and compares the losses

Everything that concerns checkpoints is five lines: the import of ckpt_core, and four in `train`.
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

shim.install()  # torchax 0.0.13 with torch 2.13 only; goes with torchax's next release
import torchax  # noqa: E402
import torchax.train  # noqa: E402
from torchax.interop import call_jax, jax_jit, torch_view  # noqa: E402

BATCH = 64


class Network(nn.Module):
    """An ordinary PyTorch module that knows nothing of torchax: 784-120-84-10, with dropout."""

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
    """Images of 28 x 28 (each pixel of scikit-learn's 8 x 8 nine times, and a margin), and labels."""
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
        # The key comes in as an argument: torchax 0.0.13 cannot draw one inside of compiled code.
        images, key = inputs
        with env.override_property(prng=key.jax()):
            return torch.func.functional_call(model, {**weights, **buffers}, (images,))

    return jax_jit(torchax.train.make_train_step(forward, F.cross_entropy, optimizer))


def train(path: Path, total_steps: int) -> None:
    """Trains up to `total_steps`, from the last step that was saved in `path`; prints every loss."""
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
            print(json.dumps({"step": step, "loss": float(loss).hex()}), flush=True)
            run.save(step, model={**weights, **buffers}, optimizer=opt_state, random=env)


def demonstrate(directory: Path) -> int:
    """Kills a run, resumes it, and compares its next 50 losses with those of a run left alone."""
    killed = start(directory / "killed", 1_000_000)
    first_saved = directory / "killed" / "step_100"
    while not first_saved.exists():
        if killed.poll() is not None:
            print("the run ended by itself", file=sys.stderr)
            return 1
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()

    with ckpt.Checkpointer(directory / "killed", step_prefix="step", read_only=True) as run:
        latest = run.latest_step()
    assert latest is not None
    both = [start(directory / name, latest + 51) for name in ("killed", "straight")]
    resumed, straight = map(losses, both)
    equal = [resumed[step] == straight[step] for step in range(latest + 1, latest + 51)]
    print(f"killed, resumed after step {latest}: {sum(equal)} of the next 50 losses are equal")
    print(
        f"loss at first {float.fromhex(straight[0])}, at last {float.fromhex(resumed[latest + 50])}"
    )
    return 0 if len(resumed) == 50 and all(equal) else 1


def start(path: Path, total_steps: int) -> subprocess.Popen[str]:
    """This script in a process of its own."""
    command = [sys.executable, __file__, "--directory", str(path), "--steps", str(total_steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def losses(process: subprocess.Popen[str]) -> dict[int, str]:
    """Step -> loss, to the bit, of a run that ends by itself."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a run failed with status {process.returncode}")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["step"]: line["loss"] for line in lines}


def main() -> int:
    """Parses the command line; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/digits"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--demo", action="store_true", help="kill, resume, compare")
    arguments = parser.parse_args()
    if arguments.demo:
        return demonstrate(arguments.directory)
    train(arguments.directory, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
