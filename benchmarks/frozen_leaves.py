"""Measures the second save of a state that is 99 % unchanged: python benchmarks/frozen_leaves.py

Three Checkpointers save the same state in turn, with one new leaf each time: the first writes
everything, the second gets the same array objects as in the step before, and the third gets arrays
that passed through a jitted function, which are new objects. The table shows the bytes that each step
does not share with the one before, and the median (minimum, maximum) time of a durable save.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

from shared import MIB, middle, options, spread, table, timed  # isort: skip

import jax
import jax.numpy as jnp

import ckpt_core as ckpt
from ckpt_core.bench import settle

WHOLE, SAME, PASSED = "everything is written", "the same objects", "through a jitted function"


def own_bytes(path: Path) -> int:
    """Bytes of the files of a step that no other step has."""
    status = (file.stat() for file in path.rglob("*") if file.is_file())
    return sum(found.st_size for found in status if found.st_nlink == 1)


def main() -> None:
    given = options(__doc__, leaves=128, leaf_mib=4, rounds=7)
    size = given.leaf_mib * MIB // 4
    state = {f"leaf{i:04}": jnp.full(size, float(i)) for i in range(given.leaves)}
    through = jax.jit(lambda tree: tree)
    secs: dict[str, list[float]] = {WHOLE: [], SAME: [], PASSED: []}
    written: dict[str, int] = {}
    with (
        tempfile.TemporaryDirectory(dir=given.directory or ".") as directory,
        contextlib.ExitStack() as stack,
    ):
        savers = {
            name: stack.enter_context(
                ckpt.Checkpointer(
                    Path(directory) / str(number),
                    asynchronous=False,
                    max_to_keep=2,
                    options=ckpt.Options(link_unchanged=name != WHOLE),
                )
            )
            for number, name in enumerate(secs)
        }
        for step in range(given.rounds + 1):
            state["leaf0007"] = state["leaf0007"] + 1
            for name, saver in savers.items():
                value = jax.block_until_ready(through(state) if name == PASSED else state)
                with settle():
                    took, _ = timed(functools.partial(saver.save, step, value))
                if step:  # the first step has nothing to share
                    secs[name].append(took)
                    written[name] = own_bytes(Path(saver.directory) / str(step))
    rows = {
        name: (
            f"{written[name]:,}",
            spread(found, ".0f", 1e3),
            f"{written[WHOLE] / written[name]:.1f}",
            f"{middle(secs[WHOLE]) / middle(found):.1f}",
        )
        for name, found in secs.items()
    }
    table(("second save", "bytes of its own", "ms", "times less", "times faster"), rows)


if __name__ == "__main__":
    main()
