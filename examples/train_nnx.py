"""Training that survives `kill -9`: Flax NNX, Optax and Grain in one checkpoint.

    python examples/train_nnx.py --directory runs/first   # kill it when you like, start it again
    python examples/train_nnx.py --demo                   # kills it in five saves and compares every bit
    python examples/train_nnx.py --check                  # the short form: one kill

All code for checkpoints is in `train`.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from _charlm import CharTransformer, make_data, make_optimizer
from flax import nnx

import ckpt_core as ckpt
from ckpt_core.testing import assert_exact_resume

INTERVAL = 8  # steps between saves


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

    with ckpt.Checkpointer(directory, save_interval_steps=INTERVAL, max_to_keep=2) as checkpointer:
        restored = checkpointer.restore_latest(model=model, optimizer=optimizer, data=data)
        first_step = restored.step + 1 if restored else 0
        print(f"starting at step {first_step}", flush=True)

        for step in range(first_step, total_steps):
            loss = train_step(model, optimizer, next(data))
            if checkpointer.save(step, model=model, optimizer=optimizer, data=data):
                print(f"saving step {step}", flush=True)  # it continues in the background
            report(step, loss=loss)

    return model, optimizer, data


def demonstrate(directory: Path | None, total_steps: int, kills: list[int]) -> None:
    """Kills runs (SIGKILL) at these steps and starts them again; raises if a bit differs from a run that nobody kills."""
    training = functools.partial(train, total_steps=total_steps)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        compiled_once = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": f"{place}/jax_cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        os.environ |= compiled_once | os.environ
        found = assert_exact_resume(training, interrupt_at=kills, by="SIGKILL", directory=place)
    print(f"interrupted_at={found.interrupted_at}, resumed_from={found.resumed_from}")
    killed = zip(found.interrupted_at, found.resumed_from, strict=True)
    unfinished = sum(step % INTERVAL == 0 and resumed <= step for step, resumed in killed)
    print(f"kills: {len(kills)}, in the middle of a save: {unfinished}")
    print(f"OK: {found.leaves} values are those of the uninterrupted run, bit for bit")


def show(step: int, loss: jax.Array) -> None:
    """Prints the loss of a step."""
    print(f"step {step}: {float(loss):.4f}", flush=True)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="what the run writes")
    parser.add_argument("--steps", type=int, default=81)
    parser.add_argument("--demo", action="store_true", help="kill, resume, compare: two minutes")
    parser.add_argument(
        "--check", action="store_true", help="the same with one kill, in the temporary directory"
    )
    arguments = parser.parse_args()
    directory, steps = arguments.directory.expanduser().resolve(), arguments.steps

    if arguments.check:
        demonstrate(None, steps, [steps * 3 // 4])
        return
    directory.mkdir(parents=True, exist_ok=True)
    if arguments.demo:
        demonstrate(directory, steps, [*range(INTERVAL, steps, 2 * INTERVAL)])  # every second save
    else:
        train(directory / "checkpoints", show, steps)


if __name__ == "__main__":
    main()
