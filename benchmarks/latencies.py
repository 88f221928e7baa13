"""Measures short waits: importing, opening a directory, one leaf of many, numpy arrays.

    python benchmarks/latencies.py

Each figure is the median over repeats, with minimum and maximum; figures that are compared are
measured in turn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import numpy as np

import ckpt_core as ckpt

Milliseconds = dict[str, list[float]]


def clock(found: Milliseconds, name: str, work: Callable[[], Any]) -> Any:
    """Runs ``work``, records its time, and returns its result."""
    began = time.perf_counter()
    result = work()
    found.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
    return result


def imports(found: Milliseconds, rounds: int) -> None:
    """Times imports in new processes that have imported jax before."""
    script = "import time, jax; a = time.perf_counter(); import {}; print(time.perf_counter() - a)"
    for turn in range(rounds + 1):
        for module in ("ckpt_core", "orbax.checkpoint"):
            run = subprocess.run(
                [sys.executable, "-c", script.format(module)], capture_output=True, text=True
            )
            if turn and run.returncode == 0:  # not the first, which reads files from the disk
                found.setdefault(f"import {module}, beyond import jax", []).append(
                    float(run.stdout) * 1e3
                )


def many_steps(found: Milliseconds, folder: Path, rounds: int, steps: int) -> None:
    """Times opening a directory of many steps, all copies of one."""
    ckpt.save(folder / "0", {"w": jnp.ones(4)})
    for step in range(1, steps):
        shutil.copytree(folder / "0", folder / str(step))
    for _ in range(rounds):
        with clock(
            found, f"Checkpointer on {steps:,} steps", lambda: ckpt.Checkpointer(folder)
        ) as checkpointer:
            clock(found, f"latest_step of {steps:,}", checkpointer.latest_step)


def one_leaf(found: Milliseconds, folder: Path, rounds: int, leaves: int) -> None:
    """Times loading one leaf of thousands."""
    state = {f"layer{n}": jnp.full((16, 16), n, jnp.float32) for n in range(leaves)}
    ckpt.save(folder, state)
    for turn in range(rounds):
        name = f"layer{(turn * 997) % leaves}"
        loaded = clock(
            found, f"one leaf of {leaves:,}", lambda name=name: ckpt.load(folder, only=name)
        )
        assert int(loaded[name][0, 0]) == (turn * 997) % leaves


def numpy_arrays(found: Milliseconds, folder: Path, rounds: int) -> None:
    """Times loading 0.5 GiB in 16 leaves as numpy, and checksums of as many bytes in mapped memory."""
    state = {f"w{n}": np.full((2048, 4096), n, np.float32) for n in range(16)}
    ckpt.save(folder, state)
    blocks = [
        leaf.reshape(-1).view(np.uint8)[start : start + 2**22]
        for leaf in state.values()
        for start in range(0, leaf.nbytes, 2**22)
    ]
    unchecked = ckpt.Options(checksums=False)
    files = [file for file in folder.glob("state/ocdbt.process_0/d/*") if file.is_file()]

    def mapped_checksums() -> None:
        maps = [np.memmap(file, np.uint8, "r") for file in files]
        parts = [
            data[start : start + 2**22] for data in maps for start in range(0, data.size, 2**22)
        ]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(crc32c.crc32c, parts))

    def warm_checksums() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(crc32c.crc32c, blocks))

    def read_fresh() -> None:
        for file in files:
            np.fromfile(file, np.uint8)

    for _ in range(rounds):
        clock(found, "0.5 GiB as numpy, verified", lambda: ckpt.load(folder, as_numpy=True))
        clock(
            found,
            "0.5 GiB as numpy, checksums=False",
            lambda: ckpt.load(folder, as_numpy=True, options=unchecked),
        )
        clock(found, "0.5 GiB: crc32c of warm memory", warm_checksums)
        clock(found, "0.5 GiB: mapping files and crc32c", mapped_checksums)
        clock(found, "0.5 GiB: reading into fresh numpy arrays", read_fresh)
        clock(
            found,
            "0.5 GiB to jax arrays",
            lambda: jax.block_until_ready(ckpt.load(folder, sharding=None)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Small things that are waited for.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--leaves", type=int, default=5_000)
    parser.add_argument("--directory", type=Path, default=None)
    given = parser.parse_args()
    found: Milliseconds = {}
    imports(found, given.rounds)
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        folder = Path(name)
        numpy_arrays(found, folder / "large", given.rounds)
        one_leaf(found, folder / "many", given.rounds, given.leaves)
        many_steps(found, folder / "steps", given.rounds, given.steps)
    for what, values in found.items():
        print(
            f"{what:45} {statistics.median(values):9.2f} ms ({min(values):.2f} - {max(values):.2f})"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
