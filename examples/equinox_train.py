"""Training that survives `kill -9`: Equinox, Optax and Grain in one checkpoint.

    python examples/equinox_train.py --directory runs/equinox   # kill it when you like, start it again
    python examples/equinox_train.py --check                    # proves that resuming is exact

Equinox models are pytrees, so a restore returns a new one. Their functions (activations)
are code: they come from the model that the program has made.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ckpt_core as ckpt

OPTIMIZER = optax.adamw(3e-3)


def make_model(key: jax.Array) -> eqx.nn.Sequential:
    """A small network with dropout; its layers and an activation are in one list."""
    first, second = jax.random.split(key)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(8, 32, key=first),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.Dropout(0.1),
            eqx.nn.MLP(32, 1, 32, 2, key=second),
        ]
    )


def make_data(seed: int) -> Any:
    """Endless batches of points and their targets."""
    points = np.random.default_rng(seed).normal(size=(512, 8)).astype(np.float32)
    dataset = grain.MapDataset.source(points).seed(seed).shuffle().repeat().batch(32)
    return iter(dataset.to_iter_dataset())


@eqx.filter_jit(donate="all")
def train_step(model: Any, opt_state: Any, key: jax.Array, batch: Any) -> tuple[Any, ...]:
    """One update; returns the new model, optimizer state and key, and the loss before it."""
    key, used = jax.random.split(key)

    def loss_of(model: Any) -> jax.Array:
        keys = jax.random.split(used, len(batch))
        found = jax.vmap(lambda x, k: model(x, key=k))(batch, keys)
        return jnp.mean((found[:, 0] - jnp.sin(batch).sum(axis=1)) ** 2)

    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, key, loss


def train(directory: Path, report: Callable[..., None], total_steps: int = 60) -> Any:
    """Trains up to `total_steps` updates, from the newest checkpoint if there is one."""
    model = make_model(jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    key = jax.random.key(1)
    data = make_data(seed=0)

    with ckpt.Checkpointer(directory, save_interval_steps=5, max_to_keep=2) as checkpointer:
        restored = checkpointer.restore_latest(model=model, opt_state=opt_state, key=key, data=data)
        if restored:  # pytrees are returned as new ones; the iterator is set in place
            model, opt_state, key = restored["model"], restored["opt_state"], restored["key"]
        first_step = restored.step + 1 if restored else 0
        print(f"starting at step {first_step}", flush=True)

        for step in range(first_step, total_steps):
            model, opt_state, key, loss = train_step(model, opt_state, key, jnp.asarray(next(data)))
            report(step, loss=loss)
            checkpointer.save(step, model=model, opt_state=opt_state, key=key, data=data)
    return model


def show(step: int, loss: jax.Array) -> None:
    """Prints the loss of a step."""
    print(f"step {step}: {float(loss):.4f}", flush=True)


def main() -> int:
    """Parses the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/equinox"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--check", action="store_true", help="only check that resuming is exact")
    arguments = parser.parse_args()

    if arguments.check:
        from ckpt_core.testing import assert_exact_resume

        training = functools.partial(train, total_steps=arguments.steps)
        middle = arguments.steps * 3 // 4
        print(assert_exact_resume(training, interrupt_at=middle, by="SIGKILL"))
        return 0

    train(arguments.directory, show, arguments.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
