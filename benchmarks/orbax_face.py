"""One program on Orbax and on ckpt_orbax, in one process, in turn: python benchmarks/orbax_face.py

The states of peers.yaml but for the single leaf; ``--divide 4`` takes a quarter of their leaves. Each
round saves, saves in the background, loads, and loads into a target, with new arrays for each library,
and compares what came back bit for bit. Each library is first in every other round; the first round is
not counted, and earlier writes are synced before each measurement. Prints a Markdown table: medians,
and in brackets the fastest and the slowest. The directory must be on a real disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the working tree, uninstalled
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "integrations" / "orbax"))

import jax
import numpy as np

from ckpt_core.bench._config import ArraySpec, CheckpointConfig, load_suite
from ckpt_core.bench._data import HostData

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"Orbax": "orbax.checkpoint.experimental.v1", "ckpt_orbax": "ckpt_orbax.v1"}
MEASURES = ("save", "save_async, blocked", "save_async, in all", "load", "load, target")

Seconds = dict[tuple[str, str], list[float]]
"""Of each counted round, by measure and library."""


def states(divide: int, only: list[str] | None) -> Iterator[CheckpointConfig]:
    """The states of peers.yaml with many leaves, each with fewer of them."""
    for config in load_suite(ROOT / "benchmarks" / "peers.yaml").checkpoints:
        wanted = any(text in config.name for text in only) if only else config.name != "1 x 1 GiB"
        if wanted:
            yield dataclasses.replace(config, spec=fewer(config.spec, divide))


def fewer(spec: Any, divide: int) -> Any:
    if isinstance(spec, ArraySpec):
        return dataclasses.replace(spec, count=spec.count and max(1, spec.count // divide))
    return {name: fewer(part, divide) for name, part in spec.items()}


@contextmanager
def settled() -> Iterator[None]:
    """Syncs the disk and collects garbage before the block, and collects none inside it."""
    os.sync()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def program(ocp: Any, directory: Path, state: Any) -> Iterator[tuple[str, float]]:
    """What is measured: calls of Orbax's second API, the same on both."""
    target = jax.tree.map(ocp.arrays.to_shape_dtype_struct, state)
    with settled():
        secs, _ = timed(lambda: ocp.save(directory / "saved", state))
    yield "save", secs
    with settled():
        blocked, response = timed(lambda: ocp.save_async(directory / "later", state))
        waited, _ = timed(response.result)
    yield "save_async, blocked", blocked
    yield "save_async, in all", blocked + waited
    for measure, arguments in (("load", ()), ("load, target", (target,))):
        load = functools.partial(ocp.load, directory / "later", *arguments)
        with settled():
            secs, loaded = timed(lambda load=load: jax.block_until_ready(load()))
        assert jax.tree.structure(loaded) == jax.tree.structure(state)
        for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), "other bytes came back"
        del loaded
        yield measure, secs


def measure(config: CheckpointConfig, rounds: int, parent: Path | None) -> tuple[Seconds, str]:
    """Seconds of each counted round, and the size of the state."""
    data = HostData(config)
    found: Seconds = {}
    size = ""
    for turn in range(rounds + 1):
        names = list(LIBRARIES)
        for name in names[:: 1 if turn % 2 else -1]:
            state = data.put(None)
            leaves = jax.tree.leaves(state)
            size = f"{len(leaves):,} leaves, {sum(leaf.nbytes for leaf in leaves) / 2**20:.0f} MiB"
            scratch = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=parent))
            for what, secs in program(importlib.import_module(LIBRARIES[name]), scratch, state):
                if turn:
                    found.setdefault((what, name), []).append(secs)
            shutil.rmtree(scratch)
            print(f"{config.name}: round {turn} of {rounds}: {name}", file=sys.stderr)
    return found, size


def row(title: str, what: str, found: Seconds) -> str:
    cells = []
    for name in LIBRARIES:
        secs = found[what, name]
        cells.append(f"{statistics.median(secs):.3f} ({min(secs):.3f} - {max(secs):.3f})")
    theirs, ours = (statistics.median(found[what, name]) for name in LIBRARIES)
    return f"| {title} | {what} | {' | '.join(cells)} | {theirs / ours:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--divide", type=int, default=1, help="only 1/n of the leaves")
    parser.add_argument("--only", nargs="*", help="states whose names have one of these texts")
    parser.add_argument("--directory", type=Path, help="on a real disk")
    args = parser.parse_args()
    from absl import logging

    logging.set_verbosity(logging.FATAL)  # Orbax's warnings about each load without a target
    print("| state | | Orbax, s | ckpt_orbax, s | times as fast |\n|---|---|---|---|---|")
    for config in states(args.divide, args.only):
        found, size = measure(config, args.rounds, args.directory)
        for what in MEASURES:
            title = f"{config.name}: {size}" if what == MEASURES[0] else ""
            print(row(title, what, found), flush=True)


if __name__ == "__main__":
    main()
