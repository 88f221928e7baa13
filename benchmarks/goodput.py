"""Simulates what a large job gains from local steps that processes give each other: python benchmarks/goodput.py

A job of N hosts trains until a failure, starts again, restores the newest step that survived, and computes again what came
after it. Failures come at random, N times as often as those of one host; some take the host's memory with them, and some of
those its partner's as well. Four set-ups take turns: `one tier` saves to the shared directory only; `two tiers` into the
memory of each host and from there to the shared directory; `replicas` and `partners` are two tiers in which the part of a
lost host comes from another host's memory. Each saves as often as loses least (`ckpt plan` has the formulas).

The costs are arguments, given in bytes per second of one host; the defaults are what was measured on one small machine
(benchmarks/results.md), a host of a large cluster is faster. The default rate of failures is that of the Llama 3 405B run:
419 in 54 days on about 2,000 hosts (arXiv 2407.21783, table 5), so one in 6,300 hours of a host. Prints a table of the
useful share of time with the best intervals; `--plot` draws it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from shared import header, lines_of, options, plot, row  # isort: skip

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
    secs = {"step_secs": costs.step_secs, "start_secs": costs.start_secs}
    plan = best_intervals(fast, slow, failure_secs=failure_secs, **secs)
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
    given = options(
        __doc__,
        directory=False,
        hosts="8,32,128,512,2048,4096,10000",
        days=(60.0, "length of the run"),
        runs=(5, "simulated, with other failures"),
        step_secs=5.0,
        gib=(16.0, "state of one host"),
        host_hours=(6300.0, "between its failures"),
        lost=(0.5, "failures that take the memory"),
        both=(0.01, "of those, also the partner's"),
        start_secs=180.0,
        slowdown=(0.03, "of steps beside a save"),
        snapshot=(8e9, "bytes/s to the host"),
        memory=(1.3e9, "bytes/s into its memory"),
        memory_read=(4e9, "bytes/s out of it"),
        network=(1e9, "bytes/s between hosts"),
        shared=(100e9, "bytes/s of the shared directory, all hosts"),
        shared_host=(1e9, "bytes/s of it, for one host"),
        plot=("", "a .png or .svg"),
    )
    size = given.gib * 2**30
    same = ("step_secs", "slowdown", "start_secs", "lost", "both")
    found: dict[str, list[tuple[int, float]]] = {setup: [] for setup in SETUPS}
    header("hosts", "failures a day", *SETUPS, words=0)
    for hosts in map(int, given.hosts.split(",")):
        rate = min(given.shared_host, given.shared / hosts)
        costs = Costs(
            blocking_secs=size / given.snapshot,
            local_secs=size / given.memory,
            shared_secs=size / rate,
            local_read_secs=size / given.memory_read,
            shared_read_secs=size / rate,
            peer_read_secs=size / given.network,
            copy_secs=size / given.network,
            **{name: getattr(given, name) for name in same},
        )
        failure_secs = given.host_hours * 3600 / hosts
        cells: list[str] = []
        for setup in SETUPS:
            runs = [
                simulate(setup, costs, failure_secs, given.days * 86_400, seed)
                for seed in range(given.runs)
            ]
            useful = sorted(share for share, _ in runs)
            found[setup].append((hosts, useful[len(useful) // 2]))
            every = ", ".join(map(str, runs[0][1]))
            cells.append(f"{found[setup][-1][1]:.2%} ({every})")
        row(f"{hosts:,}", f"{86_400 / failure_secs:.2g}", *cells)
    if given.plot:
        from matplotlib.ticker import PercentFormatter

        title = "Useful share of time over the number of hosts"
        with plot(given.plot, title, figsize=(7, 4.2)) as axes:
            lines_of(found, axes)
            axes.set(xscale="log", xlabel="hosts", ylabel="useful share of time")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.legend()


if __name__ == "__main__":
    main()
