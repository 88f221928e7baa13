"""Simulates planning, agreements and merging of thousands of processes: python benchmarks/simulate_planning.py

Runs the code of a save without the processes: the planner of `ckpt_core` with shardings over devices
that do not exist, agreements of many clients of one coordination service, the digests of the files of
many processes, and the merge of many small databases. Prints a table for each;
benchmarks/results.md draws the conclusions.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shared import free_address, header, middle, options, row, timed  # isort: skip

import numpy as np
from jax._src.lib import _jax  # the service that jax.distributed starts; it has no public name

from ckpt_core import _processes
from ckpt_core._directory import PosixBackend
from ckpt_core._save.digests import digest_all
from ckpt_core._save.plan import LeafPlanner
from ckpt_core._storage import ArrayToWrite, ArrayWriter, Location, NewDatabase, merge, new_context
from ckpt_core._tree.leaves import leaf_spec

DEVICES_PER_PROCESS = 4
DTYPE = "float32"
CHUNK_BYTES = 64 * 1024 * 1024
SAMPLED = 48

Shape = tuple[int, ...]


class FakeDevice:
    """A device that has only a process index."""

    def __init__(self, process: int) -> None:
        self.process_index = process


class FakeSharding:
    """Shards the first dimension into ``shards`` pieces, replicated over the remaining devices."""

    is_fully_addressable = False

    def __init__(self, processes: int, shards: int) -> None:
        count = processes * DEVICES_PER_PROCESS
        self._devices = [FakeDevice(number // DEVICES_PER_PROCESS) for number in range(count)]
        self._shards = shards

    def devices_indices_map(self, shape: Shape) -> dict[FakeDevice, Any]:
        """Like the method of a jax sharding."""
        step = shape[0] // self._shards
        rest = (slice(None),) * (len(shape) - 1)
        cuts = [(slice(n * step, (n + 1) * step), *rest) for n in range(self._shards)]
        return {device: cuts[n % self._shards] for n, device in enumerate(self._devices)}


def model(processes: int, layers: int) -> list[tuple[Any, Shape]]:
    """Leaves of a transformer with optimizer state: FSDP over at most 64 processes, replicated beyond;
    small leaves are replicated everywhere."""
    shards = min(processes, 64) * DEVICES_PER_PROCESS
    cut, copied = FakeSharding(processes, shards), FakeSharding(processes, 1)
    shapes = [(cut, (8192, 8192)), (cut, (8192, 2048)), (cut, (28672, 8192)), (copied, (8192,))]
    return [
        (sharding, shape) for _ in range(layers) for sharding, shape in shapes for _ in range(3)
    ]


def plan(leaves: list[tuple[Any, Shape]], process: int) -> int:
    """Plans the leaves as a save does; returns the bytes that the process writes."""
    planner = LeafPlanner(process, CHUNK_BYTES, own=False)
    return sum(
        planner.leaf(leaf_spec("jax", DTYPE, shape), (sharding, True), None).size_bytes
        for sharding, shape in leaves
    )


def planning(processes: int, layers: int) -> None:
    """One row: planning time of a process, and the balance of the written bytes."""
    leaves = model(processes, layers)
    chosen = sorted({*range(0, processes, max(1, processes // SAMPLED)), processes - 1})
    secs, sizes = zip(*(timed(lambda p=p: plan(leaves, p)) for p in chosen), strict=True)
    again_secs, _ = timed(lambda: plan(leaves, chosen[-1]))
    mean = sum(sizes) / len(sizes)
    row(processes, len(leaves), *(f"{one:.3f}" for one in (middle(secs), max(secs), again_secs)),
        f"{(max(sizes) / mean - 1) * 100:.2f}", f"{mean / 1e6:.1f}")  # fmt: skip


def agreeing(processes: int) -> None:
    """One row: an agreement of many clients, each in a thread, of one real service."""
    address = free_address()
    service = _jax.get_distributed_runtime_service(address, processes)
    clients = [
        _jax.get_distributed_runtime_client(address, n, init_timeout=60, use_compression=True)
        for n in range(processes)
    ]
    own = threading.local()
    _processes.coordination = lambda: own
    rounds, took = 3, [0.0] * processes
    start = threading.Barrier(processes)

    def run(number: int) -> None:
        own.client = clients[number]
        own.client.connect()
        here = _processes.Processes(number, processes)
        start.wait()
        began = time.monotonic()
        for turn in range(rounds):
            here.gather_decide(f"simulated/{turn}", "x" * 250, lambda values: values[0], 60)
        took[number] = time.monotonic() - began
        start.wait()
        own.client.shutdown()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del service
    secs = max(took) / rounds
    row(processes, f"{secs * 1e3:.1f}", f"{secs * 1e6 / processes:.1f}")


def merging(processes: int, arrays: int) -> None:
    """One row: process 0 merges a database from each process, with one chunk of each array."""
    with tempfile.TemporaryDirectory() as folder:
        item = NewDatabase(Location(folder, True), "", CHUNK_BYTES)
        context = new_context(durable=False)
        data = np.zeros(16, np.float32)
        spec = leaf_spec("jax", "float32", (16 * processes,))
        for process in range(processes):
            writer = ArrayWriter(item, process, processes, context, max_host_bytes=CHUNK_BYTES)
            own = ((((16 * process, 16 * process + 16),), data),)
            names = (f"layer.{array}" for array in range(arrays))
            writer.put([ArrayToWrite(name, spec, (16,), own, 64) for name in names])
            writer.finish()
        secs, _ = timed(lambda: merge(item, processes, context))
        index_bytes = sum(file.stat().st_size for file in (Path(folder) / "d").iterdir())
    shards = processes * arrays
    times = f"{secs:.3f}", f"{secs * 1e6 / processes:.1f}"
    row(processes, shards, *times, f"{index_bytes / shards:.1f}")


def digesting(processes: int) -> None:
    """One row: process 0 combines the others' lists of files, and compares sizes."""
    with tempfile.TemporaryDirectory() as folder:
        attempt = PosixBackend().begin(f"{folder}/one", overwrite=False, durable=False, token="t")
        lists: list[str] = []
        for process in range(processes):
            # index, data and checksums of one process
            names = [f"state/ocdbt.process_{process}/manifest.ocdbt"]
            names += [f"state/ocdbt.process_{process}/d/{process * 3 + n:032x}" for n in range(3)]
            names.append(f"state/checksums/process_{process}")
            for name in names:
                attempt.write(name, b"1234")
            lists.append(json.dumps([[name, 4, 2**31, 0] for name in names], separators=(",", ":")))
        secs, found = timed(lambda: digest_all(attempt, [], lists, {}, True, None))
        attempt.abort()
    sent_bytes = sum(map(len, lists)) / processes
    row(processes, len(found), f"{secs:.3f}", f"{secs * 1e6 / processes:.1f}", f"{sent_bytes:.0f}")


def main() -> None:
    """Prints the tables."""
    given = options(
        __doc__,
        directory=False,
        processes=[16, 256, 4096],
        clients=[4, 16, 64],
        layers=80,
        arrays=32,
    )
    per_process = ("seconds", "us a process")
    columns = ("leaves", "median", "max", "again", "uneven, %", "MB a process")
    print("planning, seconds of one process (again: shardings known from the save before)")
    table_of(columns, given.processes, lambda count: planning(count, given.layers))
    print("\nan agreement")
    table_of(("milliseconds", "us a process"), given.clients, agreeing)
    print("\ndigests, at process 0")
    table_of(("files", *per_process, "bytes sent by each"), given.processes, digesting)
    print("\nmerging")
    columns = ("chunks", *per_process, "bytes per chunk")
    table_of(columns, given.processes, lambda count: merging(count, given.arrays))


def table_of(columns: Iterable[str], counts: list[int], line: Callable[[int], None]) -> None:
    """A table with a row for each number of processes."""
    print()
    header("processes", *columns, words=0)
    for processes in counts:
        line(processes)


if __name__ == "__main__":
    main()
