"""``ckpt plan``; it imports what measures when it runs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from ckpt_core.cli._arguments import Json, Mib, bytes_option
from ckpt_core.cli._text import console, counted, escape, print_json, say, size


def plan(
    state_bytes: Annotated[int, bytes_option("Of each host: a number, or as 16GB, 1.5GiB.")],
    step_secs: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Of one training step.")],
    mtbf_hours: Annotated[
        float,
        typer.Option(
            "--mtbf", min=1e-3, max=1e6, help="Mean hours between failures of the whole job."
        ),
    ],
    directory: Annotated[
        str, typer.Argument(help="Where checkpoints will be: a directory or URL.")
    ] = ".",
    local: Annotated[
        str | None, typer.Option(help="The fast directory before it, if there is one.")
    ] = None,
    lost_hosts: Annotated[
        float,
        typer.Option(
            min=0.001, max=0.999, help="Share of failures that take the fast directory with them."
        ),
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
    from ckpt_core._doctor import Tier, best_intervals, copy_bytes_per_sec, probe

    probe_bytes, failure_secs = mib * 2**20, mtbf_hours * 3600
    copies = host_rate or copy_bytes_per_sec(probe_bytes)
    places = [directory] if local is None else [local, directory]
    shares = [1.0] if local is None else [1 - lost_hosts, lost_hosts]
    measured = [probe(*resolve(place), probe_bytes) for place in places]
    tiers = [
        Tier(
            name=place,
            # what the fast directory has is uploaded from there, without stopping training again
            blocking_secs=0.0 if n else state_bytes / copies,
            write_secs=state_bytes / measured[n].write_bytes_per_sec,
            slowdown=slowdown,
            restore_secs=state_bytes / measured[n].read_bytes_per_sec,
            share=shares[n],
        )
        for n, place in enumerate(places)
    ]
    found = best_intervals(
        tiers, step_secs=step_secs, failure_secs=failure_secs, start_secs=start_secs
    )
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
        "tiers": [
            asdict(one)
            | {"lost": one.lost, "write_bytes_per_sec": speed.write_bytes_per_sec}
            | {"read_bytes_per_sec": speed.read_bytes_per_sec}
            for one, speed in zip(found, measured, strict=True)
        ],
        "useful": max(0.0, 1 - sum(one.lost for one in found)),
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts, "as given" if host_rate else "a copy in memory, measured")
    return 0


def _print(facts: dict[str, Any], host_rate: str) -> None:
    say(
        f"{size(facts['state_bytes'])} of state, {facts['step_secs']:g} s a step, a failure every "
        f"{_time(facts['failure_secs'])}; to the host at {size(facts['host_bytes_per_sec'])}/s ({host_rate})"
    )
    names = ("directory", "write", "read", "save every", "saving", "redone", "restoring")
    table = Table(*names, box=None)
    for one in facts["tiers"]:
        rates = (f"{size(one[f'{name}_bytes_per_sec'])}/s" for name in ("write", "read"))
        every = f"{counted(one['steps'], 'step', 'steps')} ({_time(one['secs'])})"
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
