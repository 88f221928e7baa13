"""Compares restarts, a new process until the state is loaded and the first step is done: python benchmarks/restart.py

Every case is a new process, with its imports; the cases take turns in random order, with the files in the page cache (warm) and not
(cold: `drop_caches` where that is allowed, else `posix_fadvise`). Two floors run in the same turns: `disk` reads the files with
large parallel reads into memory that it used before, and `memory` touches as much fresh memory for the first time. What
a load cannot beat is the slower of the two. Prints tables of medians with minimum and maximum.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import MIB, fresh, middle, options, spread, table

LIBRARIES = {
    "ckpt": "ckpt",
    "safetensors": "safetensors",
    "orbax": "orbax_v1",
    "orbax uncompressed": "orbax_v1_uncompressed",
    "torch": "torch_save",
}
"""Way -> what saves its files."""
FLOORS = ("disk", "memory")


def save(folder: str, way: str, leaves: int, side: int) -> None:
    import jax.numpy as jnp
    import numpy as np

    from ckpt_core.bench.generators import SaveLoadOptions
    from ckpt_core.bench.libraries import make_library

    rng = np.random.default_rng(0)
    arrays = {f"layer{n:03}": rng.standard_normal((side, side), np.float32) for n in range(leaves)}
    library = make_library(SaveLoadOptions(library=LIBRARIES[way]))
    tree = {name: jnp.asarray(array) for name, array in arrays.items()}
    library.save(Path(folder) / way, library.prepare(tree))


def restart(began: float, folder: str, way: str, leaves: int, side: int) -> list[float]:
    """Seconds until everything is imported, of the load, and of the first step."""
    import jax
    import jax.numpy as jnp

    path = f"{folder}/{way}"
    like = {f"layer{n:03}": jax.ShapeDtypeStruct((side, side), jnp.float32) for n in range(leaves)}
    load: Callable[[], Any]
    if way == "ckpt":
        import ckpt_core as ckpt

        load = lambda: ckpt.load(path)  # noqa: E731
    elif way == "safetensors":
        from safetensors.flax import load_file

        load = lambda: load_file(path)  # noqa: E731
    elif way == "torch":
        import torch

        where = "cuda" if torch.cuda.is_available() else "cpu"
        load = lambda: torch.load(path, map_location=where)  # noqa: E731
    else:
        from orbax.checkpoint import v1 as ocp

        load = lambda: ocp.load(path, like)  # noqa: E731
    imported = time.time()
    tree = load()
    if way != "torch":
        jax.block_until_ready(tree)
    loaded = time.time()
    if way == "torch":  # no jax array is made of them: the cheapest thing that torch can do
        sum(float((x * 0.999)[0, 0]) for x in tree.values())
    else:
        step = jax.jit(lambda t: jax.tree.map(lambda x: x * 0.999, t), donate_argnums=0)
        jax.block_until_ready(step(tree))
    return [imported - began, loaded - imported, time.time() - loaded]


def floor(began: float, folder: str, way: str, leaves: int, side: int) -> list[float]:
    """The same of reading the files into used memory, or of touching fresh memory."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    imported, step = time.time(), 8 * MIB
    if way == "disk":
        buffers = [bytearray(step) for _ in range(4)]
        files = [file for file in Path(folder, "ckpt").rglob("*") if file.is_file()]
        parts = [(file, start) for file in files for start in range(0, file.stat().st_size, step)]

        def work(number: int) -> None:
            for file, start in parts[number :: len(buffers)]:
                with open(file, "rb", buffering=0) as opened:
                    os.preadv(opened.fileno(), [buffers[number]], start)

        count = len(buffers)
    else:
        memory = [np.empty((side, side), np.float32) for _ in range(leaves)]
        count = os.cpu_count() or 1

        def work(number: int) -> None:
            for part in memory[number::count]:
                part.reshape(-1)[::1024] = 0

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    return [imported - began, time.time() - imported, 0.0]


def forget(folder: str) -> str:
    """Takes the files out of the page cache; gives how."""
    from ckpt_core.bench._machine import drop_page_cache

    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        drop_page_cache(Path(folder))
        return "posix_fadvise"


def remember(top: Path) -> None:
    """Reads the files of a case, so that they are in the page cache."""
    buffer = bytearray(8 * MIB)
    for file in [top] if top.is_file() else filter(Path.is_file, top.rglob("*")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def main() -> None:
    given = options(
        __doc__,
        gib=(0.5, "size of the state"),
        leaf_mib=32.0,
        repeats=4,
        only=(",".join((*LIBRARIES, *FLOORS)), "ways, by commas"),
    )
    ways = given.only.split(",")
    side = int((given.leaf_mib * MIB / 4) ** 0.5)
    leaves = max(1, round(given.gib * 1024 / given.leaf_mib))
    order = random.Random(0)
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        for way in {"ckpt", *ways} - set(FLOORS):
            fresh(save, folder, way, leaves, side)
        for state in ("warm", "cold"):
            how, secs = state, {way: [] for way in ways}
            for _ in range(given.repeats):
                # who runs next gets memory that the last one gave back, which costs less to touch
                for way in order.sample(ways, len(ways)):
                    if state == "cold":
                        how = f"cold, by {forget(folder)}"
                    else:
                        remember(Path(folder) / ("ckpt" if way in FLOORS else way))
                    work = floor if way in FLOORS else restart
                    secs[way].append(fresh(work, time.time(), folder, way, leaves, side))
            print_table(f"{leaves} x {given.leaf_mib:g} MiB, page cache {how}", secs)


def print_table(title: str, secs: dict[str, list[list[float]]]) -> None:
    """One row a way: each phase, their sum, and the load beside the higher floor."""
    lowest = max((middle(run[1] for run in secs[way]) for way in FLOORS if way in secs), default=0)
    print(f"\n{title}\n")
    rows = {
        way: [
            *map(spread, zip(*runs, strict=True)),
            spread(map(sum, runs)),
            f"{middle(run[1] for run in runs) / lowest if lowest else 0:.2f}",
        ]
        for way, runs in secs.items()
    }
    table(("", "import", "load", "first step", "all", "load / floor"), rows)


if __name__ == "__main__":
    main()
