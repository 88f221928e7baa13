"""Measures the second save of a state that is 99 % unchanged: python benchmarks/frozen_leaves.py

Three Checkpointers save the same state in turn, with one new leaf each time: the first writes
everything, the second gets the same array objects as in the step before, and the third gets arrays
that passed through a jitted function, which are new objects. The table shows the bytes that each step
does not share with the one before, and the median (minimum, maximum) time of a durable save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the working tree, uninstalled

import jax
import jax.numpy as jnp

import ckpt_core as ckpt

MIB = 1024 * 1024
WHOLE, SAME, PASSED = "everything is written", "the same objects", "through a jitted function"


def own_bytes(path: Path) -> int:
    """Bytes of the files of a step that no other step has."""
    status = (file.stat() for file in path.rglob("*") if file.is_file())
    return sum(found.st_size for found in status if found.st_nlink == 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=128)
    parser.add_argument("--leaf-mib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", help="on a real disk; the current one by default")
    arguments = parser.parse_args()
    size = arguments.leaf_mib * MIB // 4
    state = {f"leaf{i:04}": jnp.full(size, float(i)) for i in range(arguments.leaves)}
    through = jax.jit(lambda tree: tree)
    times: dict[str, list[float]] = {WHOLE: [], SAME: [], PASSED: []}
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory or ".") as directory:
        savers = {
            name: ckpt.Checkpointer(
                Path(directory) / str(number),
                asynchronous=False,
                max_to_keep=2,
                options=ckpt.Options(link_unchanged=name != WHOLE),
            )
            for number, name in enumerate(times)
        }
        for step in range(arguments.rounds + 1):
            state["leaf0007"] = state["leaf0007"] + 1
            for name, saver in savers.items():
                value = jax.block_until_ready(through(state) if name == PASSED else state)
                os.sync()
                begin = time.perf_counter()
                saver.save(step, value)
                if step:  # the first step has nothing to share
                    times[name].append(time.perf_counter() - begin)
                    written[name] = own_bytes(Path(saver.directory) / str(step))
        for saver in savers.values():
            saver.close()
    print(
        "| second save | bytes of its own | ms | times less | times faster |\n|---|---|---|---|---|"
    )
    for name, secs in times.items():
        middle = statistics.median(secs)
        print(
            f"| {name} | {written[name]:,} | {middle * 1e3:.0f} ({min(secs) * 1e3:.0f}, "
            f"{max(secs) * 1e3:.0f}) | {written[WHOLE] / written[name]:.1f} "
            f"| {statistics.median(times[WHOLE]) / middle:.1f} |"
        )


if __name__ == "__main__":
    main()
