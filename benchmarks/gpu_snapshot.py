"""Measures saves of a state on an accelerator beside training, and beside peers: python benchmarks/gpu_snapshot.py

On a CPU it runs, but the figures mean nothing. Restores: `python benchmarks/restart.py`.

Every way in turn saves the state while training steps run that donate it. How long the call blocks, how much longer the next
step and the median of the others take than the steps right before the save, and after how long the save is committed. A card
that has rested is faster for seconds: others go before these, and the next step after a call that blocks is too short. The
first save of a way is given by itself: it compiles, and jax takes page-locked memory from the system.

Saves go to a RAM disk if there is one, because the copy is measured, not the disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import MIB, fresh, header, in_turn, middle, options, row, spread, timed

OURS = {
    "ckpt, host": "host",
    "ckpt, device": "device",
    "ckpt, pinned_host": "pinned_host",
}
"""Way -> ``Options(snapshot=)``."""
CONTROL = "nothing"
"""No save: the noise of the columns of steps."""
LIBRARIES = {"orbax": "orbax_v1", "orbax uncompressed": "orbax_v1_uncompressed"}
ROOM = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""Of the device's memory jax may take as much: the largest state stands there three times."""


def make_state(mib: int, leaves: int) -> dict[str, Any]:
    """Float32 leaves of equal size on the first device."""
    import jax

    rows = max(1, mib * MIB // leaves // 4096)
    make = jax.jit(lambda key: jax.random.normal(key, (rows, 1024)))
    keys = jax.random.split(jax.random.key(0), leaves)
    return {f"w{n}": make(key) for n, key in enumerate(keys)}


def size_of(state: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in state.values())


class Training:
    """Steps of matrix products, each of about ``step_secs``, which update the whole donated state."""

    def __init__(self, state: dict[str, Any], width: int, step_secs: float) -> None:
        import jax
        import jax.numpy as jnp

        self.state = state
        self._x = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16)
        self._count = 1

        def step(state: dict[str, Any], x: Any, count: int) -> Any:
            x = jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(x @ x), x)
            return jax.tree.map(lambda leaf: leaf * 0.999, state), x, jnp.float32(x[0, 0])

        # a loop whose length is no constant asks the host before each product, and waits for copies
        self._step = jax.jit(step, static_argnums=2, donate_argnums=(0, 1))
        for _ in range(3):
            self.step()  # which compiles it
            self._count = max(1, round(self._count * step_secs / self.step()))
        self.step()

    def step(self) -> float:
        """Seconds of one step, until what it computed has been read."""

        def work() -> None:
            self.state, self._x, loss = self._step(self.state, self._x, self._count)
            float(loss)

        secs, _ = timed(work)
        return secs


def starter(way: str, folder: Path) -> Callable[[dict[str, Any]], Callable[[], Any]]:
    """A function that starts a save, which gives one that waits for its end."""
    import ckpt_core as ckpt
    from ckpt_core.bench.generators import SaveLoadOptions
    from ckpt_core.bench.libraries import make_library

    if way == CONTROL:
        return lambda state: lambda: None
    if way in OURS:
        chosen = ckpt.Options(snapshot=OURS[way])
        return lambda state: ckpt.save_async(folder, state, options=chosen).result
    library = make_library(SaveLoadOptions(library=LIBRARIES[way]))
    return lambda state: library.start_save(folder, state)


def saves(
    top: str,
    mib: int,
    leaves: int,
    rounds: int,
    steps: int,
    width: int,
    step_secs: float,
    lead_secs: float,
    ways: list[str],
) -> dict[str, Any]:
    """Measures saves of each way in turn."""
    import jax

    training = Training(make_state(mib, leaves), width, step_secs)
    alone: list[float] = []

    def save(way: str) -> dict[str, float]:
        rested = time.perf_counter()  # while the last checkpoint was removed
        while time.perf_counter() - rested < lead_secs:
            training.step()
        before = [training.step() for _ in range(steps)]
        alone.extend(before)
        folder = Path(top) / "saved"
        start = starter(way, folder)
        began = time.perf_counter()
        wait = start(training.state)
        blocked_secs = time.perf_counter() - began
        waiter = threading.Thread(target=wait)
        waiter.start()
        beside = [training.step()]
        while waiter.is_alive():
            beside.append(training.step())
        waiter.join()
        committed_secs = time.perf_counter() - began
        shutil.rmtree(folder, ignore_errors=way == CONTROL)
        return {
            "blocked": blocked_secs,
            "next step": beside[0] - middle(before),
            "later steps": middle(beside[1:] or beside) - middle(before),
            "committed": committed_secs,
        }

    found = in_turn(ways, rounds + 1, save)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}",
        "bytes": size_of(training.state),
        "alone": alone,
        "ways": found,
        "peak": memory.get("peak_bytes_in_use", 0),
    }


def print_saves(mib: int, found: dict[str, Any]) -> None:
    alone, peak = spread(found["alone"], ".1f", 1e3), found["peak"] / found["bytes"]
    print(
        f"\n{mib} MiB on {found['device']}: a step takes {alone} ms alone; peak of memory {peak:.2f} states\n"
    )
    columns = "blocks", "the first time", "next step", "first time", "later steps", "committed, s"
    header("ms", *columns)
    for way, (first, *others) in found["ways"].items():
        blocked, following, later, committed = zip(*(one.values() for one in others), strict=True)
        cells = spread(blocked, ".1f", 1e3), f"{first['blocked'] * 1e3:.0f}"
        cells = *cells, spread(following, "+.1f", 1e3), f"{first['next step'] * 1e3:+.0f}"
        row(way, *cells, spread(later, "+.1f", 1e3), spread(committed))


def main() -> None:
    given = options(
        __doc__,
        mib=([512, 8192], "sizes of the state"),
        leaves=64,
        rounds=5,
        steps=(3, "alone, right before each save"),
        width=(8192, "of the matrices of a step"),
        step_secs=0.5,
        lead_secs=(3.0, "of steps before those that are compared with a save"),
        savers=([CONTROL, *OURS, *LIBRARIES], "what saves"),
    )
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else given.directory) as top:
        for mib in given.mib:
            loop = given.steps, given.width, given.step_secs, given.lead_secs, given.savers
            print_saves(mib, fresh(saves, top, mib, given.leaves, given.rounds, *loop, **ROOM))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
