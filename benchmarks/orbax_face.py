"""One program on Orbax and on ckpt_orbax, in one process, in turn: python benchmarks/orbax_face.py

The states of peers.yaml but for the single leaf; ``--divide 4`` takes a quarter of their leaves. Each
round saves, saves in the background, loads, and loads into a target, with new arrays for each library,
and compares what came back bit for bit. Each library is first in every other round; the first round is
not counted, and earlier writes are synced before each measurement. Prints a Markdown table: medians,
and in brackets the fastest and the slowest. The directory must be on a real disk.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared import ROOT, header, middle, options, row, spread, timed  # isort: skip

import jax
import numpy as np

from ckpt_core.bench import settle
from ckpt_core.bench._config import ArraySpec, CheckpointConfig, load_suite
from ckpt_core.bench._data import HostData

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


def program(ocp: Any, directory: Path, state: Any) -> Iterator[tuple[str, float]]:
    """What is measured: calls of Orbax's second API, the same on both."""
    target = jax.tree.map(ocp.arrays.to_shape_dtype_struct, state)
    with settle():
        secs, _ = timed(lambda: ocp.save(directory / "saved", state))
    yield "save", secs
    with settle():
        blocked, response = timed(lambda: ocp.save_async(directory / "later", state))
        waited, _ = timed(response.result)
    yield "save_async, blocked", blocked
    yield "save_async, in all", blocked + waited
    for measure, arguments in (("load", ()), ("load, target", (target,))):
        load = functools.partial(ocp.load, directory / "later", *arguments)
        with settle():
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


def main() -> None:
    given = options(
        __doc__,
        rounds=(5, "counted rounds"),
        divide=(1, "only 1/n of the leaves"),
        only=("", "states whose names have one of these texts, by semicolons"),
    )
    from absl import logging

    logging.set_verbosity(logging.FATAL)  # Orbax's warnings about each load without a target
    header("state", "", "Orbax, s", "ckpt_orbax, s", "times as fast", words=2)
    for config in states(given.divide, list(filter(None, given.only.split(";")))):
        found, size = measure(config, given.rounds, given.directory)
        for what in MEASURES:
            title = f"{config.name}: {size}" if what == MEASURES[0] else ""
            secs = [found[what, name] for name in LIBRARIES]
            theirs, ours = map(middle, secs)
            row(title, what, *(spread(one, ".3f") for one in secs), f"{theirs / ours:.1f}")


if __name__ == "__main__":
    main()
