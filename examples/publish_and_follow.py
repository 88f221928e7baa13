"""A trainer publishes weights after each few steps, and a sampler follows them: start each in a terminal.

    python examples/publish_and_follow.py train --directory runs/weights
    python examples/publish_and_follow.py sample --directory runs/weights

Kill and start either when you like.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ckpt_core as ckpt


def make_model() -> nnx.Sequential:
    """A function of one number, as a small network."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(1, 256, rngs=rngs), nnx.tanh, nnx.Linear(256, 1, rngs=rngs))


@nnx.jit
def train_step(model: nnx.Sequential, optimizer: nnx.Optimizer[Any], x: jax.Array) -> jax.Array:
    """One update towards a sine; returns the loss before it."""
    loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - jnp.sin(3 * x)) ** 2).mean())(
        model
    )
    optimizer.update(model, gradients)
    return loss


def train(directory: Path, steps: int, secs: float) -> None:
    """Trains, resumes from its own checkpoints, and publishes each tenth step."""
    model = make_model()
    optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)
    weights = directory / "published"
    with (
        ckpt.Checkpointer(
            directory / "run", save_interval_steps=100, max_to_keep=2
        ) as checkpointer,
        ckpt.Publisher(weights, anchor_every=20, max_to_keep=2) as publisher,
    ):
        restored = checkpointer.restore_latest(model=model, optimizer=optimizer)
        for step in range(restored.step + 1 if restored else 0, steps):
            x = jax.random.uniform(jax.random.key(step), (64, 1), minval=-1.0)
            loss = train_step(model, optimizer, x)
            checkpointer.save(step, model=model, optimizer=optimizer)
            if step % 10 == 0:
                publisher.publish(step, model=model, cast=jnp.bfloat16)
                print(f"published {step}, loss {float(loss):.5f}", flush=True)
                time.sleep(secs)


def sample(directory: Path, last: int, patience_secs: float) -> None:
    """Sets its model to each newer version, until the last one, or until none comes any more."""
    model = make_model()
    follower = ckpt.Follower(directory / "published")
    version = -1
    while version < last:
        newer = follower.update(model=model, timeout_secs=patience_secs)
        if newer is None:
            print(f"nothing newer than {version} for {patience_secs:g} s")
            return
        version = newer
        (y,) = model(jnp.array([0.5]))
        print(f"version {version}: f(0.5) = {float(y):.4f}, and sin(1.5) = 0.9975", flush=True)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="a trainer and a sampler")
    parser.add_argument("role", choices=["train", "sample"])
    parser.add_argument("--directory", type=Path, default=Path("runs/weights"))
    parser.add_argument("--steps", type=int, default=1001)
    parser.add_argument("--secs", type=float, default=0.2, help="pause after each version")
    parser.add_argument("--patience-secs", type=float, default=60.0)
    given = parser.parse_args()
    if given.role == "train":
        train(given.directory, given.steps, given.secs)
    else:
        sample(given.directory, (given.steps - 1) // 10 * 10, given.patience_secs)


if __name__ == "__main__":
    main()
