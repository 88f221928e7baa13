"""Training that survives `kill -9`: Flax NNX, Optax and Grain in one checkpoint.

    python examples/train_nnx.py --directory runs/first   # kill it when you like, start it again
    python examples/train_nnx.py --demo                   # does that and compares every bit
    python examples/train_nnx.py --check                  # the short form: one interruption

All code for checkpoints is in `train`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from _charlm import CharTransformer, make_data, make_optimizer
from _record import log_to, write_fingerprint
from flax import nnx

import ckpt_core as ckpt


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: CharTransformer, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    """One update in place; returns the loss before it."""

    def loss_of(model: CharTransformer) -> jax.Array:
        logits = model(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(
    directory: Path, report: Callable[..., None], total_steps: int = 81
) -> tuple[CharTransformer, nnx.Optimizer, Any]:
    """Trains up to `total_steps` updates, from the newest checkpoint if there is one."""
    model = CharTransformer(rngs=nnx.Rngs(0))
    optimizer = make_optimizer(model, total_steps)
    data = make_data(seed=0)

    with ckpt.Checkpointer(directory, save_interval_steps=8, max_to_keep=2) as checkpointer:
        restored = checkpointer.restore_latest(model=model, optimizer=optimizer, data=data)
        first_step = restored.step + 1 if restored else 0
        print(f"starting at step {first_step}", flush=True)

        for step in range(first_step, total_steps):
            loss = train_step(model, optimizer, next(data))
            report(step, loss=loss)
            if checkpointer.save(step, model=model, optimizer=optimizer, data=data):
                print(f"saving step {step}", flush=True)  # it continues in the background

    return model, optimizer, data


def main() -> int:
    """Parses the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="what the run writes")
    parser.add_argument("--steps", type=int, default=81)
    parser.add_argument("--demo", action="store_true", help="kill, resume, compare")
    parser.add_argument("--check", action="store_true", help="only check that resuming is exact")
    arguments = parser.parse_args()

    if arguments.demo:
        from kill_and_resume import demonstrate

        return demonstrate(arguments.directory, arguments.steps)

    if arguments.check:
        from ckpt_core.testing import assert_exact_resume

        training = functools.partial(train, total_steps=arguments.steps)
        middle = arguments.steps * 3 // 4
        print(assert_exact_resume(training, interrupt_at=middle, by="SIGKILL"))
        return 0

    arguments.directory.mkdir(parents=True, exist_ok=True)
    report = log_to(arguments.directory / "losses.jsonl")
    model, optimizer, data = train(arguments.directory / "checkpoints", report, arguments.steps)
    write_fingerprint(arguments.directory / "fingerprint.json", model, optimizer, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
