"""Trains on several processes, loses one, and continues with fewer: the loss curve continues.

    python examples/multihost.py --demo          # on this machine, with four CPU processes
    python examples/multihost.py --distributed --directory /shared/run --steps 100
                                                 # a real run: start this once per host

Half of the model's layers are data-parallel (each process has a copy) and half are sharded over all
devices (as in FSDP), so both kinds of arrays are saved, and restored onto another number of
processes. To restart, run the same command with another number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt_core as ckpt

WIDTH = 64
BATCH = 64
LIMIT_SECS = 180
OPTIMIZER = optax.adam(3e-3)


def fresh_state(mesh: Mesh) -> dict[str, Any]:
    """Parameters and optimizer state, created on their shardings: the first layer is on every device, the others are cut."""

    def make() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), 3)
        scale = WIDTH**-0.5
        params = {
            "copied": jax.random.normal(keys[0], (WIDTH, WIDTH)) * scale,
            "cut": jax.random.normal(keys[1], (WIDTH, WIDTH)) * scale,
            "out": jax.random.normal(keys[2], (WIDTH, 1)) * scale,
            "bias": jnp.zeros(WIDTH),
        }
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    def place(path: Any, _: Any) -> NamedSharding:
        is_cut = getattr(path[-1], "key", None) in ("cut", "out")
        return NamedSharding(mesh, PartitionSpec("data") if is_cut else PartitionSpec())

    places = jax.tree_util.tree_map_with_path(place, jax.eval_shape(make))
    return jax.jit(make, out_shardings=places)()


def batch(step: int, mesh: Mesh) -> tuple[Any, Any]:
    """The same global batch for any number of processes; each process makes its own rows."""
    rng = np.random.default_rng(step)
    x = rng.standard_normal((BATCH, WIDTH), np.float32)
    y = np.tanh(x[:, :4].sum(1, keepdims=True))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def put(values: Any) -> Any:
        return jax.make_array_from_callback(values.shape, rows, lambda where: values[where])

    return put(x), put(y)


def update(state: dict[str, Any], x: Any, y: Any) -> tuple[dict[str, Any], Any]:
    """One step of training."""

    def loss_of(params: dict[str, Any]) -> Any:
        hidden = jnp.tanh(x @ params["copied"] + params["bias"])
        return jnp.mean((jnp.tanh(hidden @ params["cut"]) @ params["out"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer}, loss


def train(directory: Path, steps: int, die_at: int | None) -> None:
    """Trains from the newest checkpoint, or from the beginning, in this process."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    state = fresh_state(mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    step_of = jax.jit(update, out_shardings=(places, NamedSharding(mesh, PartitionSpec())))
    # Short, so that the demo notices a lost process soon; keep the default (600) on a cluster.
    options = ckpt.Options(timeout_secs=10)
    with ckpt.Checkpointer(
        directory / "steps", save_interval_steps=5, max_to_keep=2, options=options
    ) as checkpointer:
        restored = checkpointer.restore_latest(state=state)
        if restored:
            state = restored["state"]
        for step in range(restored.step + 1 if restored else 0, steps):
            state, loss = step_of(state, *batch(step, mesh))
            value = float(loss)
            if jax.process_index() == 0:
                line = {"step": step, "loss": value, "processes": jax.process_count()}
                with (directory / "losses.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if step == die_at and jax.process_index() == jax.process_count() - 1:
                checkpointer.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.save(step, state=state)


def join(arguments: argparse.Namespace) -> None:
    """Joins the other processes of the run."""
    if arguments.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            arguments.coordinator,
            num_processes=arguments.processes,
            process_id=arguments.process,
            heartbeat_timeout_seconds=10,
        )
    elif arguments.distributed:
        jax.distributed.initialize()  # jax finds the others under Slurm, Kubernetes and on TPU pods


def start(run: Path, processes: int, *arguments: str) -> list[int]:
    """Runs the training in local processes; returns their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    children: list[subprocess.Popen[bytes]] = []
    for process in range(processes):
        command = [sys.executable, __file__, "--directory", str(run), "--coordinator", address]
        command += ["--processes", str(processes), "--process", str(process), *arguments]
        with (run / f"log.{processes}.{process}").open("wb") as log:
            children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    deadline = time.monotonic() + LIMIT_SECS
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
        if any(child.poll() == -signal.SIGKILL for child in children):
            time.sleep(1)  # a job scheduler kills the remaining processes in the same way
            break
    for child in children:
        child.kill()
        child.wait()
    return [child.returncode for child in children]


def curve(run: Path) -> dict[int, tuple[float, int]]:
    """Step -> loss, and how many processes computed it."""
    path = run / "losses.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {line["step"]: (line["loss"], line["processes"]) for line in lines}


def demonstrate(directory: Path, steps: int) -> int:
    """Runs four processes without interruption; then four that lose one, and two that continue."""
    straight, lost = directory / "straight", directory / "lost"
    for run in (straight, lost):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
    length, last = ("--steps", str(steps)), steps // 2 + 2
    start(straight, 4, *length)
    ended = start(lost, 4, *length, "--die-at", str(last))
    print(f"four processes, one killed after step {last}: {ended}")
    start(lost, 2, *length)
    expected, found = curve(straight), curve(lost)
    if not len(expected) == len(found) == steps:
        print(f"a process failed: its log is below {directory}")
        return 1
    print("step  loss, four processes  loss, one lost  processes")
    for step, (loss, processes) in found.items():
        if step % 5 == 0:
            print(f"{step:4}  {expected[step][0]:20.6f}  {loss:14.6f}  {processes:9}")
    furthest = max(abs(loss - found[step][0]) / loss for step, (loss, _) in expected.items())
    print(f"largest relative difference: {furthest:.1e}")
    # Sums over two devices and over four are rounded differently.
    return 0 if furthest < 1e-3 else 1


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("demo/multihost"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--demo", action="store_true", help="play the loss of a process here")
    parser.add_argument("--distributed", action="store_true", help="join as the cluster says")
    parser.add_argument("--coordinator", help="address of process 0, where no cluster tells it")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--die-at", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    directory = arguments.directory.expanduser().resolve()
    if arguments.demo:
        return demonstrate(directory, arguments.steps)
    join(arguments)
    directory.mkdir(parents=True, exist_ok=True)
    train(directory, arguments.steps, arguments.die_at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
