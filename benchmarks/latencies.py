"""Measures short waits, importing, opening a directory, one leaf of many, numpy arrays: python benchmarks/latencies.py

Each figure is the median over repeats, with minimum and maximum; figures that are compared are
measured in turn.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared import fresh, import_secs, in_turn, options, spread, timed  # isort: skip

import crc32c
import jax
import jax.numpy as jnp
import numpy as np

import ckpt_core as ckpt

BLOCK_BYTES = 2**22
Seconds = dict[str, list[float]]


def clock(found: Seconds, name: str, work: Callable[[], Any]) -> Any:
    """Runs ``work``, records its time, and returns its result."""
    secs, result = timed(work)
    found.setdefault(name, []).append(secs)
    return result


def many_steps(found: Seconds, folder: Path, rounds: int, steps: int) -> None:
    """Times opening a directory of many steps, all copies of one."""
    ckpt.save(folder / "0", {"w": jnp.ones(4)})
    for step in range(1, steps):
        shutil.copytree(folder / "0", folder / str(step))
    for _ in range(rounds):
        name = f"Checkpointer on {steps:,} steps"
        with clock(found, name, lambda: ckpt.Checkpointer(folder)) as checkpointer:
            clock(found, f"latest_step of {steps:,}", checkpointer.latest_step)


def one_leaf(found: Seconds, folder: Path, rounds: int, leaves: int) -> None:
    """Times loading one leaf of thousands."""
    state = {f"layer{n}": jnp.full((16, 16), n, jnp.float32) for n in range(leaves)}
    ckpt.save(folder, state)
    for turn in range(rounds):
        number = (turn * 997) % leaves
        load = lambda name=f"layer{number}": ckpt.load(folder, only=name)  # noqa: E731
        loaded = clock(found, f"one leaf of {leaves:,}", load)
        assert int(loaded[f"layer{number}"][0, 0]) == number


def numpy_arrays(found: Seconds, folder: Path, rounds: int) -> None:
    """Times loading 0.5 GiB in 16 leaves as numpy, and checksums of as many bytes in mapped memory."""
    state = {f"w{n}": np.full((2048, 4096), n, np.float32) for n in range(16)}
    ckpt.save(folder, state)
    files = [file for file in folder.glob("state/ocdbt.process_0/d/*") if file.is_file()]
    unchecked = ckpt.Options(checksums=False)

    def checksums(memory: list[Any]) -> None:
        flat = [array.reshape(-1).view(np.uint8) for array in memory]
        with ThreadPoolExecutor(4) as pool:
            starts = ((data, at) for data in flat for at in range(0, data.size, BLOCK_BYTES))
            list(pool.map(lambda one: crc32c.crc32c(one[0][one[1] :][:BLOCK_BYTES]), starts))

    works: dict[str, Callable[[], Any]] = {
        " as numpy, verified": lambda: ckpt.load(folder, as_numpy=True),
        " as numpy, checksums=False": lambda: ckpt.load(folder, as_numpy=True, options=unchecked),
        ": crc32c of warm memory": lambda: checksums([*state.values()]),
        ": mapping files and crc32c": lambda: checksums(
            [np.memmap(file, np.uint8, "r") for file in files]
        ),
        ": reading into fresh numpy arrays": lambda: [
            np.fromfile(file, np.uint8).size for file in files
        ],
        " to jax arrays": lambda: jax.block_until_ready(ckpt.load(folder)),
    }
    secs = in_turn(works, rounds, lambda name: timed(works[name])[0])
    found |= {f"0.5 GiB{name}": values for name, values in secs.items()}


def main() -> None:
    given = options(__doc__, rounds=11, steps=10_000, leaves=5_000)
    found: Seconds = {}
    # not the first round, which reads files from the disk
    modules = ("ckpt_core", "orbax.checkpoint")
    secs = in_turn(modules, given.rounds, lambda module: fresh(import_secs, module), warm_ups=1)
    found |= {f"import {module}, beyond import jax": values for module, values in secs.items()}
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        folder = Path(name)
        numpy_arrays(found, folder / "large", given.rounds)
        one_leaf(found, folder / "many", given.rounds, given.leaves)
        many_steps(found, folder / "steps", given.rounds, given.steps)
    for what, values in found.items():
        print(f"{what:45} {spread(values, '.2f', 1e3)} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
