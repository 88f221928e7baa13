"""Measures how a save in the background slows training on an accelerator, and copies: python benchmarks/gpu_snapshot.py

Prints for each value of ``Options(snapshot=)``, measured in turn: how long ``save_async`` blocks,
how much longer the next steps take while the save runs, and how long until it is committed. Also prints
the bandwidth of a plain copy to the host, of a copy of many arrays at once, and of a copy into
page-locked memory. On a CPU it runs, but the figures mean nothing. The state is saved to a RAM disk if
there is one, because the copy is measured, not the disk.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import in_turn, middle, options, timed  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import ckpt_core as ckpt

PLACES = ("host", "device", "pinned_host")


def make_state(mib: int, leaves: int) -> dict[str, jax.Array]:
    """Float32 leaves of equal size on the first device."""
    size = mib * 2**20 // leaves // 4
    keys = jax.random.split(jax.random.key(0), leaves)
    return {f"w{n}": jax.random.normal(key, (size // 1024, 1024)) for n, key in enumerate(keys)}


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Matrix products that keep the device busy, and an update of the whole donated state."""
    for _ in range(8):
        x = jnp.tanh(x @ x)
    return jax.tree.map(lambda leaf: leaf * 0.999, state), x


def bandwidths(state: dict[str, jax.Array], rounds: int) -> dict[str, float]:
    """GB/s of copies from the device to the host, medians."""
    size_bytes = sum(leaf.nbytes for leaf in state.values())
    one = jnp.concatenate([leaf.ravel() for leaf in state.values()])
    device = one.devices().pop()
    kinds = {memory.kind for memory in device.addressable_memories()}
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        # jax caches the host copy of an array, so each round copies new arrays.
        fresh, many = one + 0, [leaf + 0 for leaf in state.values()]
        jax.block_until_ready((fresh, many))
        found.setdefault("one array", []).append(timed(functools.partial(np.asarray, fresh))[0])

        def all_at_once(many: list[jax.Array] = many) -> list[Any]:
            for leaf in many:
                leaf.copy_to_host_async()
            return [np.asarray(leaf) for leaf in many]

        found.setdefault("all leaves at once", []).append(timed(all_at_once)[0])
        if "pinned_host" in kinds:
            pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
            fresh = jax.block_until_ready(one + 0)
            put = functools.partial(jax.device_put, fresh, pinned)
            secs, _ = timed(lambda put=put: jax.block_until_ready(put()))
            found.setdefault("page-locked", []).append(secs)
    return {name: size_bytes / middle(secs) / 1e9 for name, secs in found.items()}


def save_during_training(
    state: dict[str, jax.Array], x: jax.Array, place: Any, folder: Path, steps: int
) -> tuple[dict[str, jax.Array], jax.Array, dict[str, float]]:
    """Measures one save and the training steps that run during it."""
    shutil.rmtree(folder, ignore_errors=True)

    def step() -> float:
        nonlocal state, x
        secs, (state, x) = timed(lambda: jax.block_until_ready(train_step(state, x)))
        return secs

    alone = [step() for _ in range(steps + 2)][2:]
    began = time.perf_counter()
    pending = ckpt.save_async(folder, state, options=ckpt.Options(snapshot=place))
    blocked_secs, beside = time.perf_counter() - began, list[float]()
    while not pending.done or not beside:
        beside.append(step())
    pending.result()
    row = {
        "blocked_secs": blocked_secs,
        "committed_secs": time.perf_counter() - began,
        "step_secs": middle(alone),
        "first_step_beside_secs": beside[0],
        "step_beside_secs": middle(beside),
        "steps_beside": len(beside),
    }
    return state, x, row


def main() -> None:
    given = options(
        __doc__,
        mib=(4096, "size of the state"),
        leaves=64,
        rounds=5,
        steps=20,
        width=(4096, "of the matrices of a step"),
    )
    shared = Path("/dev/shm")
    parent = given.directory or (shared if shared.is_dir() else None)
    device = jax.devices()[0]
    state = make_state(given.mib, given.leaves)
    x = jax.random.normal(jax.random.key(1), (given.width, given.width), jnp.bfloat16)
    size_bytes = sum(leaf.nbytes for leaf in state.values())
    print(f"{device.device_kind}, jax {jax.__version__}, {size_bytes / 1e9:.2f} GB of state")
    copies = bandwidths(state, given.rounds)
    for name, gigabytes in copies.items():
        print(f"copy to the host, {name:20} {gigabytes:8.2f} GB/s")
    with tempfile.TemporaryDirectory(dir=parent) as name:

        def save(place: str) -> dict[str, float]:
            nonlocal state, x
            folder = Path(name) / place
            state, x, row = save_during_training(state, x, place, folder, given.steps)
            return row

        rows = in_turn(PLACES, given.rounds, save, warm_ups=1)
    medians = {
        place: {key: middle(row[key] for row in found) for key in found[0]}
        for place, found in rows.items()
    }
    best = max(copies.values())
    for place, row in medians.items():
        rate = size_bytes / row["blocked_secs"] / 1e9
        print(
            f"{place:12} blocks {row['blocked_secs'] * 1e3:8.1f} ms ({rate / best:6.2f} of the best copy), "
            f"step {row['step_secs'] * 1e3:.1f} -> first {row['first_step_beside_secs'] * 1e3:.1f}, "
            f"then {row['step_beside_secs'] * 1e3:.1f} ms, committed after {row['committed_secs']:.2f} s"
        )
    print(json.dumps({"copies": copies, "saves": medians}))


if __name__ == "__main__":
    main()
