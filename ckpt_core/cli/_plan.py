"""``ckpt plan``: the interval between saves that loses least time, from what saves cost and how often machines fail.

Young's optimum (1974) is sqrt(2 * cost * time between failures). An asynchronous save stops training for a moment, then slows
it while it is written; a failure redoes half of an interval *and* one write on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from ckpt_core._words import counted, size
from ckpt_core.cli._shared import Json, Mib, Root, bytes_option, console, escape, print_json, say


def plan(
    state_bytes: Annotated[int, bytes_option("Of each host: a number, or as 16GB, 1.5GiB.")],
    step_secs: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Of one training step.")],
    mtbf_hours: Annotated[
        float, typer.Option("--mtbf", min=1e-3, max=1e6, help="Mean hours between job failures.")
    ],
    directory: Root = ".",
    local: Annotated[str | None, typer.Option(help="A fast directory before it.")] = None,
    lost_hosts: Annotated[
        float, typer.Option(min=1e-3, max=0.999, help="Share of failures that lose that directory.")
    ] = 0.5,
    start_secs: Annotated[
        float, typer.Option(min=0, max=1e6, help="From a failure to the restore.")
    ] = 120.0,
    slowdown: Annotated[
        float, typer.Option(min=0, max=1, help="Share by which steps are slower during a save.")
    ] = 0.03,
    host_rate: Annotated[
        int | None, bytes_option("Bytes per second from the devices; else a copy is timed.")
    ] = None,
    mib: Mib = 64,
    as_json: Json = False,
) -> int:
    """How often to save: measures this machine, and prints the interval that loses least time."""
    from ckpt_core._directory import resolve
    from ckpt_core._doctor import copy_bytes_per_sec, probe

    probe_bytes, failure_secs = mib * 2**20, mtbf_hours * 3600
    copies = host_rate or copy_bytes_per_sec(probe_bytes)
    shares = {directory: 1.0} if local is None else {local: 1 - lost_hosts, directory: lost_hosts}
    tiers: list[_Tier] = []
    for place, share in shares.items():
        speed = probe(*resolve(place), probe_bytes)
        rates = {name: getattr(speed, name) for name in _RATES}
        write_secs, read_secs = (state_bytes / rate for rate in rates.values())
        # what the fast directory has is uploaded from there, without stopping training again
        blocking_secs = 0.0 if tiers else state_bytes / copies
        cost_secs, restore_secs = blocking_secs + slowdown * write_secs, start_secs + read_secs
        secs = (blocking_secs, write_secs, cost_secs, restore_secs)
        tiers.append(_Tier(place, rates, *secs, share / failure_secs))
    found = min(_intervals(tiers, step_secs), key=lambda one: sum(tier["lost"] for tier in one))
    facts = {
        "directory": directory,
        "local": local,
        "state_bytes": state_bytes,
        "step_secs": step_secs,
        "failure_secs": failure_secs,
        "lost_hosts": lost_hosts,
        "start_secs": start_secs,
        "slowdown": slowdown,
        "probe_bytes": probe_bytes,
        "host_bytes_per_sec": copies,
        "tiers": found,
        "useful": max(0.0, 1 - sum(one["lost"] for one in found)),
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts, "as given" if host_rate else "a copy in memory, measured")
    return 0


_RATES = ("write_bytes_per_sec", "read_bytes_per_sec")


class _Tier(NamedTuple):
    """One place for checkpoints."""

    name: str
    rates: dict[str, float]
    blocking_secs: float  # a save stops training for this long
    write_secs: float  # from then on, until the step is committed
    cost_secs: float  # training time that one save takes away
    restore_secs: float  # from a failure to the end of the restore
    failures_per_sec: float  # those that restore from this place

    def lost(self, steps: int, secs: float) -> dict[str, Any]:
        """What saving every so many steps, or seconds, loses, as shares of all time."""
        lost = {
            "saving": self.cost_secs / secs,
            "redone": self.failures_per_sec * (secs / 2 + self.write_secs),
            "restoring": self.failures_per_sec * self.restore_secs,
        }
        facts = {"name": self.name, "steps": steps, "secs": secs, **lost}
        return {**facts, "lost": sum(lost.values()), **self.rates}


def _intervals(tiers: list[_Tier], step_secs: float) -> Iterator[list[dict[str, Any]]]:
    """What is lost near Young's optimum, if the second of two tiers takes every n-th save."""
    # n in steps of 5 %: between two of them the loss changes by less than a thousandth
    for n in sorted({round(1.05**power) for power in range(190)}) if len(tiers) > 1 else [1]:
        pairs = list(zip(tiers, (1, n), strict=False))
        cost_secs = sum(tier.cost_secs / n for tier, n in pairs)
        redone_per_sec = sum(tier.failures_per_sec * n for tier, n in pairs)
        near = math.sqrt(2 * cost_secs / redone_per_sec) / step_secs
        # one save is written at a time: with a shorter interval training would wait for the last one
        busy_secs = max((tier.blocking_secs + tier.write_secs) / n for tier, n in pairs)
        least = max(1, math.ceil(busy_secs / step_secs))
        for steps in {max(least, math.floor(near)), max(least, math.ceil(near))}:
            yield [tier.lost(steps * n, steps * n * step_secs) for tier, n in pairs]


def _print(facts: dict[str, Any], host_rate: str) -> None:
    say(
        f"{size(facts['state_bytes'])} of state, {facts['step_secs']:g} s a step, a failure every "
        f"{_time(facts['failure_secs'])}; to the host at {size(facts['host_bytes_per_sec'])}/s ({host_rate})"
    )
    names = ("directory", "write", "read", "save every", "saving", "redone", "restoring")
    table = Table(*names, box=None)
    for one in facts["tiers"]:
        rates = (f"{size(one[name])}/s" for name in _RATES)
        every = f"{counted(one['steps'], 'step')} ({_time(one['secs'])})"
        lost = (f"{one[name]:.2%}" for name in ("saving", "redone", "restoring"))
        table.add_row(escape(one["name"]), *rates, every, *lost)
    console().print(table)
    say(f"useful time: {facts['useful']:.2%}")
    every, *slow = (one["steps"] for one in facts["tiers"])
    more = f"save_interval_steps={every}"
    if slow:
        policy = f"ckpt.when.every_steps({slow[0]})"
        more = f"local_directory={facts['local']!r}, {more}, options=ckpt.Options(persist_policy={policy})"
    say(f"Checkpointer({facts['directory']!r}, {more})")


def _time(secs: float) -> str:
    """``1.5 s``, ``12 min``, ``3.2 h``, ``5 d``: two digits that matter."""
    for unit, long_secs in (("d", 86_400), ("h", 3600), ("min", 60)):
        if secs >= 2 * long_secs:
            return f"{secs / long_secs:.3g} {unit}"
    return f"{secs:.{max(0, 1 - math.floor(math.log10(secs)))}f} s"
