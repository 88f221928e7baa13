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


def shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """The first layer is replicated on all devices, the others are sharded over them."""
    cut, whole = PartitionSpec("data"), PartitionSpec()
    specs = {"copied": whole, "cut": cut, "out": cut, "bias": whole}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def fresh_state(mesh: Mesh) -> dict[str, Any]:
    """Parameters and optimizer state, created on their shardings."""

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

    by_name, everywhere = shardings(mesh), NamedSharding(mesh, PartitionSpec())

    def where(path: Any, leaf: Any) -> NamedSharding:
        name = getattr(path[-1], "key", None)
        return by_name[name] if name in by_name and leaf.ndim else everywhere

    places = jax.tree_util.tree_map_with_path(where, jax.eval_shape(make))
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


def start(directory: Path, processes: int, *arguments: str) -> list[int]:
    """Runs the training in local processes; returns their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    children: list[subprocess.Popen[bytes]] = []
    try:
        for process in range(processes):
            command = [sys.executable, __file__, "--directory", str(directory)]
            command += ["--coordinator", address, "--processes", str(processes)]
            with (directory / f"log.{processes}.{process}").open("wb") as log:
                children.append(
                    subprocess.Popen(
                        [*command, "--process", str(process), *arguments],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + LIMIT_SECS
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.1)
            if any(child.poll() == -signal.SIGKILL for child in children):
                # A job scheduler kills the remaining processes in the same way.
                time.sleep(1)
                break
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [child.returncode for child in children]


def demonstrate(directory: Path, steps: int) -> int:
    """Runs four processes without interruption; then four that lose one, and two that continue."""
    curves: dict[str, dict[int, tuple[float, int]]] = {}
    for name in ("straight", "lost"):
        run = directory / name
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        if name == "lost":
            ended = start(run, 4, "--steps", str(steps), "--die-at", str(steps // 2 + 2))
            print(f"four processes, one killed after step {steps // 2 + 2}: {ended}")
            ended = start(run, 2, "--steps", str(steps))
        else:
            ended = start(run, 4, "--steps", str(steps))
        if any(ended):
            print(f"a process failed: {ended}; its log is in {run}")
            return 1
        lines = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
        curves[name] = {line["step"]: (line["loss"], line["processes"]) for line in lines}
    print("step  loss, four processes  loss, one lost  processes")
    furthest = 0.0
    for step, (loss, _) in sorted(curves["straight"].items()):
        other, processes = curves["lost"][step]
        furthest = max(furthest, abs(other - loss) / loss)
        if step % 5 == 0 or processes != curves["lost"].get(step - 1, (0, processes))[1]:
            print(f"{step:4}  {loss:20.6f}  {other:14.6f}  {processes:9}")
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
