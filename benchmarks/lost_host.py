"""Measures what a lost host costs: steps, and seconds until the state is back: python benchmarks/lost_host.py

    python benchmarks/lost_host.py [--mib 256] [--processes 4] [--repeats 3] [--directory .] [--memory /dev/shm]

Local processes of `jax.distributed` save a state, each step into a directory of their own in memory and every fifth one to
the shared directory, and are all killed after the last. Then they start again: with all local directories, or without that of
one process ("host lost"), or without those of two partners. `replicas` keeps the same arrays on every process, `partners` and
`two tiers` cut them into shards; `one tier` and Orbax's manager save to the shared directory only, every fifth step. Each
start is measured from the call that restores until it returns on the slowest process, with the step that came back. The
last line is the speed of copies between processes, beside plain sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVERY = 15, 5

COMMON = """
import json, os, shutil, sys, time, warnings, logging
warnings.simplefilter("ignore")
given = json.loads(sys.argv[1])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(given["address"], given["count"], given["index"])
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.experimental import multihost_utils
logging.disable(logging.WARNING)
mesh = Mesh(np.array(jax.devices()), ("x",))
sharding = NamedSharding(mesh, P() if given["way"] == "replicas" else P("x"))
side = 2048
rows = given["mib"] * 2**20 // 4 // side // 8 // given["count"] * given["count"]

def state(step):
    make = lambda index: np.full([len(range(*s.indices(n))) for s, n in zip(index, (rows, side))], step, np.float32)
    return {f"w{n}": jax.make_array_from_callback((rows, side), sharding, make) for n in range(8)}

def meet(name):
    jax._src.distributed.global_state.client.wait_at_barrier(name, 60_000)
"""

OURS = """
import ckpt_core as ckpt
options = dict(partners="host" if given["way"] == "partners" else None)
if given["way"] != "one tier":
    options["persist_policy"] = ckpt.when.every_steps(given["every"])
local = None if given["way"] == "one tier" else given["local"]
checkpointer = ckpt.Checkpointer(given["shared"], local_directory=local, options=ckpt.Options(**options),
    save_interval_steps=given["every"] if local is None else 1)
def save(step):
    return checkpointer.save(step, state(step))
def wait():
    checkpointer.wait_until_finished()
    copier = getattr(checkpointer._parts.local, "_copier", None)  # the script kills the processes: copies must be there
    if copier is not None:
        copier.finish(30)
def restore():
    found = checkpointer.restore_latest(state=state(0))
    return found.step, found["state"]
"""

ORBAX = """
import orbax.checkpoint as ocp
manager = ocp.CheckpointManager(given["shared"], options=ocp.CheckpointManagerOptions(
    save_interval_steps=given["every"], max_to_keep=2))
def save(step):
    return manager.save(step, args=ocp.args.StandardSave(state(step)))
def wait():
    manager.wait_until_finished()
def restore():
    step = manager.latest_step()
    return step, manager.restore(step, args=ocp.args.StandardRestore(state(0)))
"""

TRAIN = """
blocked = []
for step in range(given["steps"]):
    tree = state(step)
    jax.block_until_ready(tree)
    meet(f"step{step}")
    began = time.perf_counter()
    if save(step):
        blocked.append(time.perf_counter() - began)
    wait()
meet("end")
print(json.dumps(sorted(blocked)[len(blocked) // 2]), flush=True)
time.sleep(0 if given["index"] else 2)  # process 0 serves the others
os._exit(0)  # as if killed: nothing is closed
"""

RESTORE = """
like = state(0)
meet("begin")
began = time.perf_counter()
step, tree = restore()
jax.block_until_ready(tree)
secs = time.perf_counter() - began
assert all((np.asarray(shard.data) == step).all() for x in jax.tree.leaves(tree) for shard in x.addressable_shards)
meet("end")
print(json.dumps([step, secs]), flush=True)
time.sleep(0 if given["index"] else 2)
os._exit(0)
"""


def processes(code: str, given: dict[str, Any], count: int, local: str) -> list[Any]:
    """What each process of a run prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                json.dumps(
                    {
                        **given,
                        "address": address,
                        "count": count,
                        "index": n,
                        "local": f"{local}/{n}",
                    }
                ),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(count)
    ]
    try:
        told = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, told, strict=True):
        if process.returncode:
            raise RuntimeError(errors[-3000:])
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def measure(
    way: str, lost: tuple[int, ...], arguments: argparse.Namespace, folder: str
) -> tuple[float, int, float]:
    """Seconds that a save blocks, the step that came back, and seconds until it was there."""
    code = COMMON + (ORBAX if way == "Orbax" else OURS)
    local = tempfile.mkdtemp(dir=arguments.memory)
    shared = tempfile.mkdtemp(dir=folder)
    given = {"way": way, "mib": arguments.mib, "shared": shared, "every": EVERY, "steps": STEPS}
    try:
        blocked = max(processes(code + TRAIN, given, arguments.processes, local))
        for host in lost:
            shutil.rmtree(f"{local}/{host}", ignore_errors=True)
        back = processes(code + RESTORE, given, arguments.processes, local)
    finally:
        shutil.rmtree(local, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)
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


def spread(found: list[float]) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(found):.3g} ({min(found):.3g} - {max(found):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where the shared directory is")
    parser.add_argument("--memory", default="/dev/shm", help="where local directories are")
    arguments = parser.parse_args()
    cases: list[tuple[str, str, tuple[int, ...]]] = [
        ("all processes killed", way, ())
        for way in ("Orbax", "one tier", "two tiers", "replicas", "partners")
    ]
    cases += [("one host lost", way, (1,)) for way in ("two tiers", "replicas", "partners")]
    cases += [("two partners lost", "partners", (1, 2))]
    found: dict[tuple[str, str], list[tuple[float, int, float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for _ in range(arguments.repeats):
            for what, way, lost in cases:
                found.setdefault((what, way), []).append(measure(way, lost, arguments, folder))
    print("| what happened | set-up | a save blocks, ms | steps lost | back after, s |")
    print("|---|---|---:|---:|---:|")
    for (what, way), runs in found.items():
        blocked, steps, secs = zip(*runs, strict=True)
        lost = sorted({STEPS - 1 - step for step in steps})
        print(
            f"| {what} | {way} | {spread([1e3 * one for one in blocked])} "
            f"| {', '.join(map(str, lost))} | {spread(list(secs))} |"
        )
    print(f"\none plain connection on loopback: {socket_bytes_per_sec() / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
