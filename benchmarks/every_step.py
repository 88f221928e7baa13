"""Trains on the CPU with one core to spare, and saves at every step; prints what the saves cost.

    python benchmarks/every_step.py [--mib 100] [--batch 128] [--every 10] [--repeats 3] [--plot out.png]

The state (an MLP and Adam's moments) is saved at every step into a directory in memory, and every n-th time also to the
disk; beside it, to the disk only. Each way is a process of its own, with the same loop, and the ways take turns. XLA gets
all cores but one; with ``--all-cores``, all. Prints medians, and minimum and maximum in brackets. The step does not
donate the state, unless the name of the way says so: where a donated array is still being saved, XLA copies it first.
Orbax does not compress here, and fsyncs data files only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NONE = "no checkpoints"
_QUIET_CORES = 0.15
"""Work of other processes, in cores, beside which a run counts; the kernel's threads are among them."""
WAYS: dict[str, dict[str, bool]] = {
    NONE: {},
    "ckpt, every step": {"local": True},
    "ckpt, every step, low": {"local": True, "low": True},
    "ckpt, every step, donated": {"local": True, "donate": True},
    "ckpt, continuously": {"local": True, "continuous": True},
    "ckpt, continuously, low": {"local": True, "continuous": True, "low": True},
    "ckpt, every n-th": {"cadence": True},
    "Orbax, every n-th": {"orbax": True, "cadence": True},
    "Orbax, continuously": {"orbax": True, "continuous": True},
}

CHILD = """
import json, shutil, sys, time
import jax, jax.numpy as jnp

given = json.loads(sys.argv[1])
WARM = 4
side = max(8, int((given["mib"] * 2**20 / 4 / 3 / given["layers"]) ** 0.5))
names = [f"layer{number:03}" for number in range(given["layers"])]

def loss(params, x):
    for name in names:
        x = x + jnp.tanh(x @ params[name])
    return (x**2).mean()

def adam(p, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

def train(state, x):
    grads = jax.grad(loss)(state["params"], x)
    new = {n: adam(state["params"][n], grads[n], state["m"][n], state["v"][n]) for n in names}
    return {key: {n: new[n][i] for n in names} for i, key in enumerate(("params", "m", "v"))}

step_of = jax.jit(train, donate_argnums=(0,) if given.get("donate") else ())
params = {n: jax.random.normal(jax.random.key(i), (side, side)) / side for i, n in enumerate(names)}
state = {"params": params, "m": jax.tree.map(jnp.zeros_like, params), "v": jax.tree.map(jnp.zeros_like, params)}
x = jnp.ones((given["batch"], side))
committed = {"local": 0, "persistent": 0}
save, close, in_time = None, None, dict
folder, local, every = given["folder"], given["local_folder"], given["every"]
if given.get("orbax"):
    from orbax.checkpoint import v1 as ocp
    policies = ocp.training.save_decision_policies
    policy = policies.FixedIntervalPolicy(every) if given.get("cadence") else policies.ContinuousCheckpointingPolicy()
    context = ocp.Context()
    context.array.saving.use_compression = False
    keep = ocp.training.preservation_policies.LatestN(1)
    manager = ocp.training.Checkpointer(
        folder, context=context, save_decision_policy=policy, preservation_policy=keep
    )

    def save(step, state):
        if manager.save_async(step, state):
            committed["persistent"] += 1  # the last one perhaps not in time, see in_time

    def in_time():
        return committed | {"persistent": committed["persistent"] - manager.is_saving_in_progress()}

    close = manager.close
elif given.get("local") or given.get("cadence"):
    import ckpt_core as ckpt

    def listen(event):
        if event.kind == "committed":
            committed["local" if event.path.startswith(local) else "persistent"] += 1

    policy = ckpt.when.every_steps(every if given.get("cadence") else 1)
    if given.get("continuous"):
        policy = ckpt.when.continuously()
    more = {"background_priority": "low"} if given.get("low") else {}
    tier = {}
    if given.get("local"):
        tier["local_directory"] = local
        more["persist_policy"] = ckpt.when.every_steps(every)
        if given.get("continuous"):
            more["persist_policy"] = ckpt.when.every_secs(given["persist_secs"])
    manager = ckpt.Checkpointer(
        folder, save_policy=policy, max_to_keep=1, options=ckpt.Options(on_event=listen, **more), **tier
    )
    save, close = manager.save, manager.close
    in_time = lambda: dict(committed)
ends, blocked = [], []
for step in range(given["steps"] + WARM):
    if step == WARM:
        committed.update(local=0, persistent=0)
        start = time.perf_counter()
    state = jax.block_until_ready(step_of(state, x))
    if save is not None:
        began = time.perf_counter()
        save(step, state)
        if step >= WARM:
            blocked.append(time.perf_counter() - began)
    if step >= WARM:
        ends.append(time.perf_counter() - start)
done = in_time()
if close is not None:
    close()
print(json.dumps({"ends": ends, "blocked": blocked, "committed": done}))
"""


def one_run(way: str, given: argparse.Namespace, threads: int) -> dict[str, Any]:
    """What one process of a way prints."""
    with (
        tempfile.TemporaryDirectory(dir=given.directory) as folder,
        tempfile.TemporaryDirectory(dir=given.local_directory) as local,
    ):
        settings: dict[str, Any] = {
            **WAYS[way],
            **{name: getattr(given, name) for name in ("mib", "layers", "batch", "steps", "every")},
            "folder": f"{folder}/run",
            "local_folder": local,
            "persist_secs": given.persist_secs,
        }
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        result = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(settings)],
            env=os.environ | {"PYTHONPATH": paths, "NPROC": str(threads)},  # NPROC: threads of XLA
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.sync()
    return json.loads(result.stdout.splitlines()[-1])


def quiet_run(way: str, given: argparse.Namespace, threads: int) -> dict[str, Any]:
    """A run of a way beside which other processes used little of the cores; after some tries, the quietest."""
    found: list[dict[str, Any]] = []
    for _ in range(given.tries):
        busy, own, began = busy_secs(), os.times(), time.perf_counter()
        run = one_run(way, given, threads)
        now = os.times()
        mine = now.children_user + now.children_system - own.children_user - own.children_system
        run["others"] = (busy_secs() - busy - mine) / (time.perf_counter() - began)
        found.append(run)
        if run["others"] < _QUIET_CORES:
            break
    return min(found, key=lambda run: run["others"])


def busy_secs() -> float:
    """Seconds that the cores of this machine have worked, idle and waiting ones left out."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def spread(values: list[float], form: str = ".0f") -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} - {high:{form}})"


def print_table(runs: dict[str, list[dict[str, Any]]]) -> None:
    """One line for each way; ratios are to the run without checkpoints of the same turn."""
    print(
        "| way | step, ms | longer than without, % | goodput | blocked per save, ms | local | persistent |"
    )
    print("|---|---|---|---|---|---|---|")
    bare_secs = [step_secs(run) for run in runs[NONE]]
    for way, found in runs.items():
        medians = [statistics.median(step_secs(run)) for run in found]
        longer = [
            (median / statistics.median(bare) - 1) * 100
            for median, bare in zip(medians, bare_secs, strict=True)
        ]
        goodput = [sum(bare) / run["ends"][-1] for run, bare in zip(found, bare_secs, strict=True)]
        blocked = [statistics.median(run["blocked"]) * 1e3 for run in found if run["blocked"]]
        saved = [
            spread([run["committed"].get(tier, 0) for run in found])
            for tier in ("local", "persistent")
        ]
        cells = [
            spread([median * 1e3 for median in medians]),
            spread(longer, ".1f"),
            spread(goodput, ".2f"),
            spread(blocked, ".1f") if blocked else "",
            *saved,
        ]
        print(f"| {way} | {' | '.join(cells)} |")


def step_secs(run: dict[str, Any]) -> list[float]:
    """Seconds of each step, with the part of the save that blocks."""
    return [after - before for before, after in pairwise([0.0, *run["ends"]])]


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws the steps per second over time, relative to the median without checkpoints."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bare = statistics.median([secs for run in runs[NONE] for secs in step_secs(run)])
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for way, found in runs.items():
        run = found[-1]
        axes.plot(run["ends"], [bare / secs for secs in step_secs(run)], label=way, linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("goodput")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="What saves at every step cost a training loop.")
    parser.add_argument("--mib", type=int, default=100, help="size of the state")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128, help="more makes steps longer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=20, help="steps between saves to the disk")
    parser.add_argument(
        "--persist-secs", type=float, default=2.0, help="the same, of continuous saves"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="of each run, if the machine is busy")
    parser.add_argument("--all-cores", action="store_true", help="leave no core to the saves")
    parser.add_argument(
        "--ways", help="only those whose name contains one of these, by commas: 'low,n-th'"
    )
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--local-directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--plot", type=Path, default=None)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    threads = cores if given.all_cores else max(1, cores - 1)
    ways = [
        way
        for way in WAYS
        if way == NONE or given.ways is None or any(part in way for part in given.ways.split(","))
    ]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(given.repeats):
        for way in ways:
            runs[way].append(quiet_run(way, given, threads))
    print(
        f"{given.mib} MiB, {given.steps} steps, XLA on {threads} of {cores} cores, {given.repeats} turns"
    )
    others = [run["others"] for found in runs.values() for run in found]
    print(f"other processes used {spread(others, '.2f')} cores")
    print_table(runs)
    if given.plot is not None:
        plot(runs, given.plot)


if __name__ == "__main__":
    main()
