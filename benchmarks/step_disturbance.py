"""Measures how much a save slows training beside it, as plain threads do: python benchmarks/step_disturbance.py

A loop of jitted steps runs in turn: alone, during saves of a state, and while plain threads write,
fsync and checksum the same bytes. A step is slower during a save because both share the
cores and the memory bandwidth; no library can avoid the part that plain threads cause. Also printed: an
upper bound for the time that a save holds Python's interpreter lock, and how much memory the first step
after a save takes, since it cannot reuse the memory that is being written.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared import in_turn, middle, options, spread, timed  # isort: skip

import crc32c
import jax
import jax.numpy as jnp
import numpy as np

import ckpt_core as ckpt

_BLOCK_BYTES = 4 * 2**20


@jax.jit
def step(x: jax.Array) -> jax.Array:
    """About ten milliseconds of matrix products."""
    for _ in range(4):
        x = jnp.tanh(x @ x)
    return x


def steps_while(x: jax.Array, work: Callable[[], Any]) -> tuple[list[float], float]:
    """Seconds of each step while ``work`` runs in another thread, one at least, and seconds of the work."""
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(timed, work)
        found: list[float] = []
        while not found or not pending.done():
            secs, x = timed(lambda x=x: step(x).block_until_ready())
            if not found or not pending.done():
                found.append(secs)
        return found, pending.result()[0]


def write_plainly(arrays: list[np.ndarray[Any, Any]], folder: Path) -> None:
    """Writes, fsyncs and checksums the same bytes in two threads.

    Like a save that replaces another, it writes new files beside the old ones and then deletes the
    old ones: a disk may be slower at blocks that were not written recently.
    """
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    folder.mkdir()

    def one(number: int) -> None:
        data = arrays[number].reshape(-1).view(np.uint8)
        with open(folder / str(number), "wb", buffering=0) as file:
            for start in range(0, data.size, _BLOCK_BYTES):
                block = data[start : start + _BLOCK_BYTES]
                file.write(block.data)
                crc32c.crc32c(block)
            os.fsync(file.fileno())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(len(arrays))))
    shutil.rmtree(old, ignore_errors=True)


def python_share(work: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds of the thread that does the work, and its wall seconds.

    The first is an upper bound for the time that it held the interpreter lock; it includes
    checksums, which release the lock.
    """
    began, cpu_began = time.perf_counter(), time.thread_time()
    work()
    return time.thread_time() - cpu_began, time.perf_counter() - began


def new_memory(donate: Any, state: dict[str, jax.Array]) -> tuple[int, dict[str, jax.Array]]:
    """The bytes of donated memory that a donating step could not reuse."""
    before = {leaf.unsafe_buffer_pointer() for leaf in state.values()}
    state = jax.block_until_ready(donate(state))
    fresh = [leaf for leaf in state.values() if leaf.unsafe_buffer_pointer() not in before]
    return sum(leaf.nbytes for leaf in fresh), state


def main() -> None:
    given = options(__doc__, mib=512, leaves=16, rounds=7, width=512)
    size = given.mib * 2**20 // given.leaves // 4
    state = {f"w{n}": jnp.full((size // 1024, 1024), n, jnp.float32) for n in range(given.leaves)}
    hosts = [np.asarray(leaf) for leaf in state.values()]
    x = jnp.eye(given.width)
    step(x).block_until_ready()
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        folder = Path(name)

        def save() -> None:
            ckpt.save_async(folder / "ckpt", state, overwrite=True).result()

        choices: dict[str, Callable[[], Any]] = {
            "alone": lambda: time.sleep(0.3),
            "plain threads": lambda: write_plainly(hosts, folder / "plain"),
            "ckpt": save,
        }

        def disturbed(what: str) -> tuple[float, float]:
            os.sync()
            found, secs = steps_while(x, choices[what])
            return sum(found) / len(found), secs

        both = in_turn(choices, given.rounds, disturbed, warm_ups=1)
        rows = {what: [step_secs for step_secs, _ in found] for what, found in both.items()}
        works = {what: [secs for _, secs in found] for what, found in both.items()}
        many = {f"w{n}": np.full((16, 16), n, np.float32) for n in range(5000)}
        trees = {"these leaves": state, "5,000 leaves of 1 KiB": many}

        def shared_lock(what: str) -> tuple[float, float]:
            target = folder / what
            found = python_share(functools.partial(ckpt.save, target, trees[what]))
            shutil.rmtree(target)
            return found

        shares = in_turn(trees, given.rounds, shared_lock)
        hosts.clear()  # these views would prevent the arrays from being donated
        donate = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
        state = jax.block_until_ready(donate(state))
        undisturbed_bytes, state = new_memory(donate, state)
        pending = ckpt.save_async(folder / "donated", state)
        extra_bytes, state = new_memory(donate, state)
        pending.result()
    alone = middle(rows["alone"])
    for what, values in rows.items():
        ratios = [value / bare for value, bare in zip(values, rows["alone"], strict=True)]
        print(
            f"{what:14} step {spread(values, '.2f', 1e3)} ms, "
            f"{(middle(values) / alone - 1) * 100:6.1f} % slower "
            f"({(min(ratios) - 1) * 100:.0f} - {(max(ratios) - 1) * 100:.0f}), "
            f"work {middle(works[what]):.3f} s"
        )
    for what, pairs in shares.items():
        cpu, wall = (middle(secs) * 1e3 for secs in zip(*pairs, strict=True))
        print(f"a save of {what}: the interpreter lock for {cpu:.0f} ms at most, of {wall:.0f}")
    print(
        f"a step that donates {given.mib} MiB takes new memory for {undisturbed_bytes >> 20} MiB, "
        f"the first one after a save for {extra_bytes >> 20}"
    )
    print(json.dumps({"step_secs": rows, "work_secs": works, "shares": shares}))


if __name__ == "__main__":
    main()
