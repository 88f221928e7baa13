"""Measures what a lost host costs, steps, and seconds until the state is back: python benchmarks/lost_host.py

Local processes of `jax.distributed` save a state, each step into a directory of their own in memory and every fifth one to
the shared directory, and are all killed after the last. Then they start again: with all local directories, or without that of
one process ("host lost"), or without those of two partners. `replicas` keeps the same arrays on every process, `partners` and
`two tiers` cut them into shards; `one tier` and Orbax's manager save to the shared directory only, every fifth step. Each
start is measured from the call that restores until it returns on the slowest process, with the step that came back. The
last line is the speed of copies between processes, beside plain sockets.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

from shared import (
    MIB,
    free_address,
    header,
    in_turn,
    middle,
    options,
    result_of,
    row,
    spread,
    start,
    timed,
)

STEPS, EVERY, SIDE = 15, 5, 2048


class Job:
    """One process: its mesh, and how it saves and restores."""

    def __init__(self, given: dict[str, Any], index: int, address: str) -> None:
        import logging

        import jax

        self.given, self.index = SimpleNamespace(**given), index
        self._jax = jax
        jax.distributed.initialize(address, self.given.count, index)
        logging.disable(logging.WARNING)
        mesh = jax.sharding.Mesh(jax.devices(), ("x",))
        spec = [None if self.given.way == "replicas" else "x"]
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        (self._orbax if self.given.way == "Orbax" else self._ours)()

    def state(self, step: int) -> dict[str, Any]:
        import numpy as np

        count = self.given.count
        shape = (self.given.mib * MIB // 4 // SIDE // 8 // count * count, SIDE)

        def make(index: Any) -> Any:
            sizes = [len(range(*one.indices(n))) for one, n in zip(index, shape, strict=True)]
            return np.full(sizes, step, np.float32)

        arrays = self._jax.make_array_from_callback
        return {f"w{n}": arrays(shape, self._sharding, make) for n in range(8)}

    def meet(self, name: str) -> None:
        self._jax._src.distributed.global_state.client.wait_at_barrier(name, 60_000)

    def _ours(self) -> None:
        import ckpt_core as ckpt

        given, one_tier = self.given, self.given.way == "one tier"
        tiered: dict[str, Any] = (
            {} if one_tier else {"persist_policy": ckpt.when.every_steps(EVERY)}
        )
        partners = "host" if given.way == "partners" else None
        checkpointer = ckpt.Checkpointer(
            given.shared,
            local_directory=None if one_tier else f"{given.local}/{self.index}",
            options=ckpt.Options(partners=partners, **tiered),
            save_interval_steps=EVERY if one_tier else 1,
        )

        def wait() -> None:
            checkpointer.wait_until_finished()
            # this script kills the processes: copies must be there
            if not one_tier:
                checkpointer._run._local._copier.finish(30)

        def restore() -> tuple[int, Any]:
            found = checkpointer.restore_latest(state=self.state(0))
            return found.step, found["state"]

        self.wait, self.restore = wait, restore
        self.save = lambda step: checkpointer.save(step, self.state(step))

    def _orbax(self) -> None:
        import orbax.checkpoint as ocp

        settings = ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2)
        manager = ocp.CheckpointManager(self.given.shared, options=settings)

        def restore() -> tuple[int, Any]:
            step = manager.latest_step()
            return step, manager.restore(step, args=ocp.args.StandardRestore(self.state(0)))

        self.wait, self.restore = manager.wait_until_finished, restore
        self.save = lambda step: manager.save(step, args=ocp.args.StandardSave(self.state(step)))

    def end(self, found: Any) -> None:
        """Ends the process as if it was killed: nothing is closed."""
        self.meet("end")
        print(json.dumps(found), flush=True)
        time.sleep(0 if self.index else 2)  # process 0 serves the others
        os._exit(0)


def train(given: dict[str, Any], index: int, address: str) -> None:
    """Gives the median of the seconds that a save blocks."""
    job, blocked = Job(given, index, address), []
    for step in range(STEPS):
        job.meet(f"step{step}")
        secs, began = timed(lambda step=step: job.save(step))
        if began:
            blocked.append(secs)
        job.wait()
    job.end(middle(blocked))


def restore(given: dict[str, Any], index: int, address: str) -> None:
    """Gives the step that came back, and after how many seconds."""
    import jax
    import numpy as np

    job = Job(given, index, address)
    job.meet("begin")
    secs, (step, tree) = timed(lambda: jax.block_until_ready(job.restore()))
    shards = (shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards)
    assert all((np.asarray(shard.data) == step).all() for shard in shards)
    job.end([step, secs])


def run(work: Any, given: dict[str, Any]) -> list[Any]:
    """What each process of a run gives."""
    address = free_address()
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    started = [start(work, given, index, address, **flags) for index in range(given["count"])]
    try:
        return [result_of(process) for process in started]
    finally:
        for process in started:
            process.kill()


def measure(way: str, lost: tuple[int, ...], options: Any, folder: str) -> tuple[float, int, float]:
    """Seconds that a save blocks, the step that came back, and seconds until it was there."""
    with (
        tempfile.TemporaryDirectory(dir=options.memory) as local,
        tempfile.TemporaryDirectory(dir=folder) as shared,
    ):
        given = {"way": way, "mib": options.mib, "count": options.processes}
        given |= {"shared": shared, "local": local}
        blocked = max(run(train, given))
        for host in lost:
            shutil.rmtree(f"{local}/{host}", ignore_errors=True)
        back = run(restore, given)
    return blocked, back[0][0], max(secs for _, secs in back)


def socket_bytes_per_sec(size_bytes: int = 2**28) -> float:
    """How fast one plain connection on loopback moves bytes."""
    block = bytes(2**22)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            connection, _ = server.accept()
            with connection:
                for _ in range(size_bytes // len(block)):
                    connection.sendall(block)

        thread = threading.Thread(target=send)
        thread.start()
        buffer, left, began = bytearray(2**22), size_bytes, time.perf_counter()
        with socket.create_connection(server.getsockname()) as connection:
            while left > 0:
                left -= connection.recv_into(buffer)
        thread.join()
    return size_bytes / (time.perf_counter() - began)


def main() -> None:
    given = options(
        __doc__,
        mib=(256, "size of the state"),
        processes=4,
        repeats=3,
        memory=("/dev/shm", "where local directories are"),
    )
    killed = ("Orbax", "one tier", "two tiers", "replicas", "partners")
    cases: list[tuple[str, str, tuple[int, ...]]] = [
        *(("all processes killed", way, ()) for way in killed),
        *(("one host lost", way, (1,)) for way in killed[2:]),
        ("two partners lost", "partners", (1, 2)),
    ]
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        found = in_turn(cases, given.repeats, lambda case: measure(*case[1:], given, folder))
    header("what happened", "set-up", "a save blocks, ms", "steps lost", "back after, s", words=2)
    for case, runs in found.items():
        blocked, steps, secs = zip(*runs, strict=True)
        lost = ", ".join(map(str, sorted({STEPS - 1 - step for step in steps})))
        row(*case[:2], spread(blocked, ".3g", 1e3), lost, spread(secs, ".3g"))
    print(f"\none plain connection on loopback: {socket_bytes_per_sec() / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
