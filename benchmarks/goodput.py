"""Simulates what a large job gains from local steps that processes give each other: python benchmarks/goodput.py

    python benchmarks/goodput.py [--hosts 8,64,512,4096,10000] [--plot goodput.png] [--days 60]

A job of N hosts trains until a failure, starts again, restores the newest step that survived, and computes again what came
after it. Failures come at random, N times as often as those of one host; some take the host's memory with them, and some of
those its partner's as well. Four set-ups take turns: `one tier` saves to the shared directory only; `two tiers` into the
memory of each host and from there to the shared directory; `replicas` and `partners` are two tiers in which the part of a
lost host comes from another host's memory. Each saves as often as loses least (`ckpt plan` has the formulas).

The costs are arguments, given in bytes per second of one host; the defaults are what was measured on one small machine
(docs/performance.md), a host of a large cluster is faster. The default rate of failures is that of the Llama 3 405B run:
419 in 54 days on about 2,000 hosts (arXiv 2407.21783, table 5), so one in 6,300 hours of a host. Prints a table of the
useful share of time with the best intervals; `--plot` draws it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the working tree, uninstalled

from ckpt_core._doctor import Tier, best_intervals

SETUPS = ("one tier", "two tiers", "replicas", "partners")


@dataclass(frozen=True)
class Costs:
    """Seconds of one host's saves and restores, and what fails.

    Attributes:
        step_secs: of a training step.
        blocking_secs: for which a save stops training.
        slowdown: share by which training is slower while a save is written.
        local_secs, shared_secs: to write into the host's memory, and to the shared directory.
        local_read_secs, shared_read_secs, peer_read_secs: to read from there, and from another host.
        copy_secs: to copy a local step to the partner.
        start_secs: from a failure until the restore begins.
        lost: share of failures that take the host's memory with them.
        both: share of those that take the partner's, or all replicas', too.
    """

    step_secs: float
    blocking_secs: float
    slowdown: float
    local_secs: float
    shared_secs: float
    local_read_secs: float
    shared_read_secs: float
    peer_read_secs: float
    copy_secs: float
    start_secs: float
    lost: float
    both: float


def tiers(setup: str, costs: Costs) -> tuple[Tier, Tier | None]:
    """The tiers of a set-up, with the share of failures that each one repairs."""
    shared = Tier("shared", 0.0, costs.shared_secs, costs.slowdown, costs.shared_read_secs)
    if setup == "one tier":
        return replace(shared, blocking_secs=costs.blocking_secs), None
    beyond = costs.lost if setup == "two tiers" else costs.lost * costs.both
    copied = costs.copy_secs if setup == "partners" else 0.0
    read_secs = costs.local_read_secs
    if setup != "two tiers":  # some restores wait for another host
        read_secs = max(read_secs, costs.lost * costs.peer_read_secs)
    local = Tier(
        "local",
        costs.blocking_secs,
        costs.local_secs + copied,
        costs.slowdown,
        read_secs,
        1 - beyond,
    )
    return local, replace(shared, share=beyond)


def simulate(
    setup: str, costs: Costs, failure_secs: float, run_secs: float, seed: int
) -> tuple[float, list[int]]:
    """The useful share of time, and after how many steps each tier takes a save."""
    fast, slow = tiers(setup, costs)
    plan = best_intervals(
        fast,
        slow,
        step_secs=costs.step_secs,
        failure_secs=failure_secs,
        start_secs=costs.start_secs,
    )
    # one step of training takes so much longer, because of the saves
    stretch = 1 + sum(
        tier.cost_secs / (one.steps * costs.step_secs)
        for tier, one in zip([fast, slow] if slow else [fast], plan, strict=True)
    )
    chance = random.Random(seed)
    now, done_steps = 0.0, 0.0
    while now < run_secs:
        until = chance.expovariate(1 / failure_secs)
        reached = done_steps + until / (costs.step_secs * stretch)
        now += until
        if now >= run_secs:
            done_steps = reached - (now - run_secs) / (costs.step_secs * stretch)
            now = run_secs
            break
        number = 1 if slow and chance.random() < slow.share else 0
        tier = slow if number and slow else fast
        # the newest step whose write had ended
        written = reached - tier.write_secs / (costs.step_secs * stretch)
        interval = plan[number].steps
        done_steps = max(0.0, math.floor(written / interval) * interval)
        now += costs.start_secs + tier.restore_secs
    return max(0.0, done_steps) * costs.step_secs / now, [one.steps for one in plan]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", default="8,32,128,512,2048,4096,10000")
    parser.add_argument("--days", type=float, default=60, help="length of the run")
    parser.add_argument("--runs", type=int, default=5, help="simulated, with other failures")
    parser.add_argument("--step-secs", type=float, default=5.0)
    parser.add_argument("--gib", type=float, default=16, help="state of one host")
    parser.add_argument("--host-hours", type=float, default=6300, help="between its failures")
    parser.add_argument("--lost", type=float, default=0.5, help="failures that take the memory")
    parser.add_argument("--both", type=float, default=0.01, help="of those, also the partner's")
    parser.add_argument("--start-secs", type=float, default=180)
    parser.add_argument("--slowdown", type=float, default=0.03, help="of steps beside a save")
    parser.add_argument("--snapshot", type=float, default=8e9, help="bytes/s to the host")
    parser.add_argument("--memory", type=float, default=1.3e9, help="bytes/s into its memory")
    parser.add_argument("--memory-read", type=float, default=4e9, help="bytes/s out of it")
    parser.add_argument("--network", type=float, default=1e9, help="bytes/s between hosts")
    parser.add_argument(
        "--shared", type=float, default=100e9, help="bytes/s of the shared directory, all hosts"
    )
    parser.add_argument("--shared-host", type=float, default=1e9, help="bytes/s, for one host")
    parser.add_argument("--plot", type=Path, help="a .png or .svg")
    arguments = parser.parse_args()
    size = arguments.gib * 2**30
    found: dict[str, list[tuple[int, float]]] = {setup: [] for setup in SETUPS}
    print("| hosts | failures a day | " + " | ".join(SETUPS) + " |")
    print("|---:|---:|" + "---:|" * len(SETUPS))
    for hosts in map(int, arguments.hosts.split(",")):
        rate = min(arguments.shared_host, arguments.shared / hosts)
        costs = Costs(
            step_secs=arguments.step_secs,
            blocking_secs=size / arguments.snapshot,
            slowdown=arguments.slowdown,
            local_secs=size / arguments.memory,
            shared_secs=size / rate,
            local_read_secs=size / arguments.memory_read,
            shared_read_secs=size / rate,
            peer_read_secs=size / arguments.network,
            copy_secs=size / arguments.network,
            start_secs=arguments.start_secs,
            lost=arguments.lost,
            both=arguments.both,
        )
        failure_secs = arguments.host_hours * 3600 / hosts
        cells: list[str] = []
        for setup in SETUPS:
            runs = [
                simulate(setup, costs, failure_secs, arguments.days * 86_400, seed)
                for seed in range(arguments.runs)
            ]
            useful = sorted(share for share, _ in runs)
            found[setup].append((hosts, useful[len(useful) // 2]))
            every = ", ".join(map(str, runs[0][1]))
            cells.append(f"{found[setup][-1][1]:.2%} ({every})")
        print(f"| {hosts:,} | {86_400 / failure_secs:.2g} | {' | '.join(cells)} |", flush=True)
    if arguments.plot:
        draw(found, arguments.plot)


def draw(found: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Useful share of time over the number of hosts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # the same drawing has the same bytes, and its text is text
    matplotlib.rcParams.update({"svg.hashsalt": "ckpt", "svg.fonttype": "none"})

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for (setup, points), style in zip(found.items(), ("o-", "s-", "^-", "d--"), strict=True):
        axes.plot(*zip(*points, strict=True), style, label=setup, markersize=5)
    axes.set(xscale="log", xlabel="hosts", ylabel="useful share of time")
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend()
    title = "Useful share of time over the number of hosts"
    metadata = {"Date": None, "Title": title} if path.suffix == ".svg" else {"Title": title}
    figure.savefig(path, dpi=120, metadata=metadata)


if __name__ == "__main__":
    main()
