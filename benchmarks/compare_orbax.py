"""Compares ckpt with Orbax v1 on the same state, in one process: python benchmarks/compare_orbax.py

Two states: many small leaves and a few large ones. Every round runs each library once, in turn,
so that a slow minute of the machine affects all of them; the table shows the median, and then
the fastest and slowest round. ckpt fsyncs every file and directory and records checksums when it
saves, and verifies them when it loads; Orbax fsyncs data files only, and neither records nor verifies
checksums. The floor is the time for the same bytes without any checkpoint: one file, written and
fsynced, then read.

To keep the figures comparable: the first round is not counted; earlier writes are synced before each
measurement; old checkpoints are deleted between measurements; each measurement waits for its arrays
before and after; all loads read from the page cache; the libraries take turns in being first. The
process keeps the memory that it frees (a setting of malloc, for all libraries): a virtual machine that
returns memory to its host needs up to 10 us for every page it touches again, which would be most of
the measured time. For the same reason a file of that size is written and deleted before each save.
The directory must be on a real disk: on a RAM disk fsync costs nothing.

`--check` exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the working tree, uninstalled

import jax
import numpy as np
from absl import logging as absl_logging
from orbax.checkpoint import v1 as ocp

import ckpt_core as ckpt

MIB = 1024 * 1024
CKPT, ORBAX, ORBAX_RAW, FLOOR = "ckpt", "Orbax v1", "Orbax v1, uncompressed", "floor"


@dataclass(frozen=True)
class Workload:
    """One state; `leaves` arrays of `shape`, float32, normally distributed."""

    name: str
    leaves: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return 4 * self.leaves * int(np.prod(self.shape))

    def state(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        names = [f"layer_{i // 10}" for i in range(0, self.leaves, 10)]
        tree: dict[str, Any] = {name: {} for name in names}
        for i in range(self.leaves):
            values = rng.standard_normal(self.shape, dtype=np.float32)
            tree[f"layer_{i // 10}"][f"w{i % 10}"] = jax.device_put(values)
        return jax.block_until_ready(tree)


@dataclass(frozen=True)
class Target:
    """`contestant` takes at least `factor` times as long as ckpt."""

    workload: str
    measure: str
    contestant: str
    factor: float


MANY = Workload("5,000 leaves of 16x16", 5000, (16, 16))
LARGE = Workload("16 leaves of 32 MiB", 16, (2048, 4096))
TARGETS = (
    Target(MANY.name, "save", ORBAX, 30),
    Target(MANY.name, "load", ORBAX, 10),
    Target(LARGE.name, "save", ORBAX_RAW, 1),
    Target(LARGE.name, "load", ORBAX, 3),
)


class Contestant:
    """One way to save and load; the path does not exist before a save."""

    def save(self, path: Path, state: Any) -> None:
        raise NotImplementedError

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        """Starts a save in the background and returns what waits for it."""
        raise NotImplementedError

    def load(self, path: Path) -> Any:
        raise NotImplementedError


class Ckpt(Contestant):
    """This library with its defaults."""

    def save(self, path: Path, state: Any) -> None:
        ckpt.save(path, state)

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        return ckpt.save_async(path, state).result

    def load(self, path: Path) -> Any:
        return ckpt.load(path)


class Orbax(Contestant):
    """Orbax v1 with its defaults, or without compression."""

    def __init__(self, *, compression: bool = True) -> None:
        self._compression = compression

    def save(self, path: Path, state: Any) -> None:
        with self._context():
            ocp.save(path, state)

    def start_save(self, path: Path, state: Any) -> Callable[[], object]:
        with self._context():
            return ocp.save_async(path, state).result

    def load(self, path: Path) -> Any:
        with self._context():
            return ocp.load(path)

    def _context(self) -> ocp.Context:
        context = ocp.Context()
        context.array.saving.use_compression = self._compression
        return context


class Floor(Contestant):
    """All bytes into one file, fsynced, and back into numpy."""

    def save(self, path: Path, state: Any) -> None:
        views = [memoryview(np.asarray(leaf)).cast("B") for leaf in jax.tree.leaves(state)]
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for start in range(0, len(views), 1000):  # below the limit of one writev
                _write_all(fd, views[start : start + 1000])
            os.fsync(fd)
        finally:
            os.close(fd)

    def load(self, path: Path) -> Any:
        return np.fromfile(path, np.uint8)


def _write_all(fd: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


@dataclass
class Timings:
    """Seconds of each counted round, by (measure, contestant)."""

    secs: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, measure: str, contestant: str, secs: float) -> None:
        self.secs.setdefault((measure, contestant), []).append(secs)

    def median(self, measure: str, contestant: str) -> float | None:
        found = self.secs.get((measure, contestant))
        return statistics.median(found) if found else None


@contextmanager
def _settled() -> Iterator[None]:
    """Syncs the disk and collects garbage before the block; no garbage collection inside it."""
    os.sync()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def _check_equal(state: Any, loaded: Any) -> None:
    """Ends the program if the loaded state differs from the saved one; not measured."""
    for saved, found in zip(jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True):
        if not isinstance(found, jax.Array) or not np.array_equal(saved, found):
            raise SystemExit("a loaded array is not the one that was saved")


def measure(workload: Workload, directory: Path, rounds: int) -> Timings:
    """Runs every contestant once per round; the first round warms up and is dropped."""
    contestants: dict[str, Contestant] = {
        CKPT: Ckpt(),
        ORBAX: Orbax(),
        ORBAX_RAW: Orbax(compression=False),
        FLOOR: Floor(),
    }
    timings, warm_up = Timings(), Timings()
    for number in range(rounds + 1):
        into = timings if number else warm_up
        # New arrays, because an array that was saved before may have cached its host copy.
        state = workload.state()
        names = list(contestants)
        turn = number % len(names)  # each library comes first in some round
        for name in names[turn:] + names[:turn]:
            _one_round(name, contestants[name], state, directory / "checkpoint", into)
            print(f"  round {number} of {rounds}: {name}", file=sys.stderr)
    return timings


def _warm_free_memory(path: Path, size_bytes: int) -> None:
    """Writes and deletes a file of this size, so that the kernel has free pages for the save."""
    block = memoryview(bytes(MIB))
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // MIB):
            file.write(block)
    path.unlink()


def _one_round(name: str, contestant: Contestant, state: Any, path: Path, into: Timings) -> None:
    size_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    _warm_free_memory(path, size_bytes)
    with _settled():
        secs, _ = _timed(lambda: contestant.save(path, state))
        into.add("save", name, secs)
    with _settled():
        secs, loaded = _timed(lambda: jax.block_until_ready(contestant.load(path)))
        into.add("load", name, secs)
    if not isinstance(contestant, Floor):
        _check_equal(state, loaded)
    del loaded
    _delete(path)
    if isinstance(contestant, Floor):
        return
    _warm_free_memory(path, size_bytes)
    with _settled():
        secs, wait = _timed(lambda: contestant.start_save(path, state))
        into.add("async blocks", name, secs)
        secs_more, _ = _timed(wait)
        into.add("async in all", name, secs + secs_more)
    _delete(path)


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def print_table(workload: Workload, timings: Timings) -> None:
    """One line for each measure and contestant."""
    print(f"\n{workload.name}, float32, {workload.size_bytes / MIB:.0f} MiB")
    print(f"  {'':13} {'':23} {'median s':>9} {'min - max':>17} {'GB/s':>6} {'to ckpt':>8}")
    order = (CKPT, ORBAX, ORBAX_RAW, FLOOR)
    for what, name in sorted(timings.secs, key=lambda key: (key[0], order.index(key[1]))):
        secs = timings.secs[what, name]
        middle, ours = statistics.median(secs), timings.median(what, CKPT)
        ratio = f"{middle / ours:7.2f}x" if ours and name != CKPT else ""
        speed = "" if what == "async blocks" else f"{workload.size_bytes / middle / 1e9:6.2f}"
        spread = f"{min(secs):.4f} - {max(secs):.4f}"
        print(f"  {what:13} {name:23} {middle:9.4f} {spread:>17} {speed:>6} {ratio:>8}")


def missed(targets: tuple[Target, ...], results: dict[str, Timings]) -> list[str]:
    """Prints every target and the measured factor; returns the missed ones."""
    failures = []
    print("\ntargets")
    for target in targets:
        timings = results.get(target.workload)
        if timings is None:
            continue
        ours = timings.median(target.measure, CKPT)
        theirs = timings.median(target.measure, target.contestant)
        assert ours is not None
        assert theirs is not None
        good = theirs / ours >= target.factor
        line = (
            f"{target.measure} {target.workload}: {theirs / ours:.1f}x of {target.contestant}, "
            f"wanted {target.factor:g}x"
        )
        print(f"  {'met   ' if good else 'MISSED'}  {line}")
        if not good:
            failures.append(line)
    return failures


def _file_system(directory: Path) -> str:
    done = subprocess.run(
        ["stat", "-f", "-c", "%T", str(directory)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_ARENA_MAX": "1"}


def _keep_memory() -> None:
    """Restarts this program with a malloc that keeps freed memory: libc reads this only at start."""
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="on a real disk (default: here)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (default 3)")
    parser.add_argument("--only", choices=["many", "large"], help="one of the two states")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    args = parser.parse_args()
    _keep_memory()

    absl_logging.set_verbosity(absl_logging.ERROR)
    workloads = {"many": MANY, "large": LARGE}
    if args.only:
        workloads = {args.only: workloads[args.only]}
    parent = args.directory or Path.cwd()
    parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Timings] = {}
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=parent) as scratch:
        kind = _file_system(Path(scratch))
        print(
            f"{os.cpu_count()} CPUs, jax {jax.__version__} on {jax.default_backend()}, "
            f"file system {kind}, {args.rounds} rounds"
        )
        if kind in ("tmpfs", "ramfs"):
            print("warning: a RAM disk: saves look faster than they are, floor included")
        for workload in workloads.values():
            results[workload.name] = measure(workload, Path(scratch), args.rounds)
    for workload in workloads.values():
        print_table(workload, results[workload.name])
    failures = missed(TARGETS, results)
    sys.exit(1 if failures and args.check else 0)


if __name__ == "__main__":
    main()
