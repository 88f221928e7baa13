"""Trains on the CPU with one core to spare, and saves at every step; prints what the saves cost: python benchmarks/every_step.py

The state (an MLP and Adam's moments) is saved at every step into a directory in memory, and every n-th time also to the
disk; beside it, to the disk only. Each way is a process of its own, with the same loop, and the ways take turns. XLA gets
all cores but one; with ``--all-cores``, all. Prints medians, and minimum and maximum in brackets. The step does not
donate the state, unless the name of the way says so: where a donated array is still being saved, XLA copies it first.
Orbax does not compress here, and fsyncs data files only.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from shared import MIB, fresh, header, in_turn, middle, options, row, spread

NONE = "no checkpoints"
FLOOR = "a bare write, every step"
"""One thread writes the state's bytes into a file in memory, which replaces the one before: no save into files takes less."""
_QUIET_CORES = 0.15
"""Work of other processes, in cores, beside which a run counts; the kernel's threads are among them."""
WAYS = {
    NONE: "",
    FLOOR: "write",
    "ckpt, every step": "local",
    "ckpt, every step, low": "local low",
    "ckpt, every step, donated": "local donate",
    "ckpt, continuously": "local continuous",
    "ckpt, continuously, low": "local continuous low",
    "ckpt, every n-th": "cadence",
    "Orbax, every n-th": "orbax cadence",
    "Orbax, continuously": "orbax continuous",
}
WARM = 4  # steps that are not measured

Saver = tuple[Callable[[int, Any], Any], Callable[[], dict[str, int]], Callable[[], None]]
"""Saves a step, counts the saves that were committed, closes."""


def ours(way: set[str], given: Any, committed: dict[str, int]) -> Saver:
    import ckpt_core as ckpt

    def listen(event: Any) -> None:
        if event.kind == "committed":
            committed["local" if event.path.startswith(given.local) else "persistent"] += 1

    when, continuous = ckpt.when, "continuous" in way
    policy = when.every_steps(given.every if "cadence" in way else 1)
    tier, more = {}, {"background_priority": "low"} if "low" in way else {}
    if "local" in way:
        secs, steps = when.every_secs(given.persist_secs), when.every_steps(given.every)
        more |= {"persist_policy": secs if continuous else steps}
        tier = {"local_directory": given.local}
    manager = ckpt.Checkpointer(
        given.folder,
        save_policy=when.continuously() if continuous else policy,
        max_to_keep=1,
        options=ckpt.Options(on_event=listen, **more),
        **tier,
    )
    return manager.save, lambda: dict(committed), manager.close


def orbax(way: set[str], given: Any, committed: dict[str, int]) -> Saver:
    from orbax.checkpoint import v1 as ocp

    policies = ocp.training.save_decision_policies
    cadence = policies.FixedIntervalPolicy(given.every)
    context = ocp.Context()
    context.array.saving.use_compression = False
    always = policies.ContinuousCheckpointingPolicy()
    manager = ocp.training.Checkpointer(
        given.folder,
        context=context,
        save_decision_policy=cadence if "cadence" in way else always,
        preservation_policy=ocp.training.preservation_policies.LatestN(1),
    )

    def save(step: int, state: Any) -> None:
        committed["persistent"] += bool(manager.save_async(step, state))

    def in_time() -> dict[str, int]:  # the last one perhaps was not
        done = committed["persistent"] - manager.is_saving_in_progress()
        return committed | {"persistent": done}

    return save, in_time, manager.close


def bare(given: Any, committed: dict[str, int]) -> Saver:
    from concurrent.futures import Future, ThreadPoolExecutor

    import jax
    import numpy as np

    pool, last = ThreadPoolExecutor(1), [Future[None]()]
    last[0].set_result(None)

    def write(state: Any) -> None:
        name, new = f"{given.local}/state", f"{given.local}/new"
        with open(new, "wb", buffering=0) as file:
            for leaf in jax.tree.leaves(state):
                file.write(np.asarray(leaf))
        os.replace(new, name)
        committed["local"] += 1

    def save(step: int, state: Any) -> None:
        last[0].result()
        last[0] = pool.submit(write, state)

    return save, lambda: dict(committed), pool.shutdown


def train(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """When each step ended, how long each save blocked, and how many were committed in time."""
    import jax
    import jax.numpy as jnp

    given, way = SimpleNamespace(**settings), set(WAYS[name].split())
    side = max(8, int((given.mib * MIB / 4 / 3 / given.layers) ** 0.5))
    names = [f"layer{number:03}" for number in range(given.layers)]

    def loss(params: Any, x: Any) -> Any:
        for name in names:
            x = x + jnp.tanh(x @ params[name])
        return (x**2).mean()

    def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    def update(state: Any, x: Any) -> Any:
        grads = jax.grad(loss)(state["params"], x)
        new = {n: adam(state["params"][n], grads[n], state["m"][n], state["v"][n]) for n in names}
        return {key: {n: new[n][i] for n in names} for i, key in enumerate(("params", "m", "v"))}

    step_of = jax.jit(update, donate_argnums=(0,) if "donate" in way else ())
    keys = enumerate(names)
    params = {n: jax.random.normal(jax.random.key(i), (side, side)) / side for i, n in keys}
    zeros = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    state = dict(zip(("params", "m", "v"), (params, *zeros), strict=True))
    x, committed = jnp.ones((given.batch, side)), {"local": 0, "persistent": 0}
    saver: Saver | None = None
    if "write" in way:
        saver = bare(given, committed)
    elif way:
        saver = (orbax if "orbax" in way else ours)(way, given, committed)
    ends, blocked, start = [], [], 0.0
    for step in range(given.steps + WARM):
        if step == WARM:
            committed.update(local=0, persistent=0)
            start = time.perf_counter()
        state = jax.block_until_ready(step_of(state, x))
        began = time.perf_counter()
        if saver is not None:
            saver[0](step, state)
        if step >= WARM:
            blocked.append(time.perf_counter() - began)
            ends.append(time.perf_counter() - start)
    done = committed
    if saver is not None:
        done = saver[1]()
        saver[2]()
    return {"ends": ends, "blocked": blocked if saver else [], "committed": done}


def one_run(way: str, given: Any, threads: int) -> dict[str, Any]:
    """What one process of a way gives."""
    names = ("mib", "layers", "batch", "steps", "every", "persist_secs")
    with (
        tempfile.TemporaryDirectory(dir=given.directory) as folder,
        tempfile.TemporaryDirectory(dir=given.local_directory) as local,
    ):
        settings = {name: getattr(given, name) for name in names}
        settings |= {"folder": f"{folder}/run", "local": local}
        found = fresh(train, way, settings, NPROC=str(threads))  # NPROC: threads of XLA
        os.sync()
    return found


def quiet_run(way: str, given: Any, threads: int) -> dict[str, Any]:
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


def step_secs(run: dict[str, Any]) -> list[float]:
    """Seconds of each step, with the part of the save that blocks."""
    return [after - before for before, after in pairwise([0.0, *run["ends"]])]


def print_table(runs: dict[str, list[dict[str, Any]]]) -> None:
    """One line for each way; ratios are to the run without checkpoints of the same turn."""
    columns = ("step, ms", "longer than without, %", "goodput", "blocked per save, ms")
    header("way", *columns, "local", "persistent")
    bare_secs = [step_secs(run) for run in runs[NONE]]
    for way, found in runs.items():
        medians = [middle(step_secs(run)) for run in found]
        pairs = list(zip(medians, found, bare_secs, strict=True))
        blocked = [middle(run["blocked"]) for run in found if run["blocked"]]
        saved = ([run["committed"][tier] for run in found] for tier in ("local", "persistent"))
        row(
            way,
            spread(medians, ".0f", 1e3),
            spread([(median / middle(bare) - 1) * 100 for median, _, bare in pairs], ".1f"),
            spread([sum(bare) / run["ends"][-1] for _, run, bare in pairs]),
            spread(blocked, ".1f", 1e3) if blocked else "",
            *(spread(counts, ".0f") for counts in saved),
        )


def main() -> None:
    given = options(
        __doc__,
        mib=(100, "size of the state"),
        layers=8,
        batch=(128, "more makes steps longer"),
        steps=40,
        every=(20, "steps between saves to the disk"),
        persist_secs=(2.0, "the same, of continuous saves"),
        repeats=3,
        tries=(3, "of each run, if the machine is busy"),
        all_cores=(False, "leave no core to the saves"),
        ways=("", "only those whose name contains one of these, by commas: 'low,n-th'"),
        local_directory="/dev/shm",
    )
    cores = len(os.sched_getaffinity(0))
    threads = cores if given.all_cores else max(1, cores - 1)
    wanted = given.ways.split(",")
    ways = [way for way in WAYS if way == NONE or any(part in way for part in wanted)]
    runs = in_turn(ways, given.repeats, lambda way: quiet_run(way, given, threads))
    print(
        f"{given.mib} MiB, {given.steps} steps, XLA on {threads} of {cores} cores, {given.repeats} turns"
    )
    others = [run["others"] for found in runs.values() for run in found]
    print(f"other processes used {spread(others)} cores")
    print_table(runs)


if __name__ == "__main__":
    main()
