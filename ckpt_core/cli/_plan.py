"""``ckpt plan``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ckpt_core._directory import resolve
from ckpt_core._directory.probe import probe_directory
from ckpt_core._doctor import Interval, Tier, best_intervals, copy_bytes_per_sec, probe_store
from ckpt_core._platform import ROOTS
from ckpt_core._storage import Location
from ckpt_core.cli._text import console, counted, escape, print_json, size


@dataclass(frozen=True)
class Question:
    """What the user said."""

    directory: str
    local: str | None  # a fast directory before it
    state_bytes: int  # that each host saves
    step_secs: float
    failure_secs: float  # mean time between failures of the whole job
    lost_hosts: float  # share of failures that take the fast directory with them
    start_secs: float  # from a failure until the restore begins
    slowdown: float  # of training while a save is written, 0 to 1
    host_bytes_per_sec: float | None  # from the devices; None to measure a copy in memory
    probe_bytes: int  # how much is written and read to measure


def plan(question: Question, *, as_json: bool) -> int:
    """Measures, and prints how often to save."""
    copies = question.host_bytes_per_sec or copy_bytes_per_sec(question.probe_bytes)
    blocking_secs = question.state_bytes / copies
    places = (
        [question.directory] if question.local is None else [question.local, question.directory]
    )
    rates = [_rates(place, question.probe_bytes) for place in places]
    shares = [1.0] if len(places) == 1 else [1 - question.lost_hosts, question.lost_hosts]
    tiers = [
        Tier(
            name=place,
            # what the fast directory has is uploaded from there, without stopping training again
            blocking_secs=blocking_secs if place is places[0] else 0.0,
            write_secs=question.state_bytes / write,
            slowdown=question.slowdown,
            restore_secs=question.state_bytes / read,
            share=share,
        )
        for place, (write, read), share in zip(places, rates, shares, strict=True)
    ]
    found = best_intervals(
        tiers[0],
        tiers[1] if len(tiers) > 1 else None,
        step_secs=question.step_secs,
        failure_secs=question.failure_secs,
        start_secs=question.start_secs,
    )
    if as_json:
        print_json(_facts(question, copies, rates, found))
    else:
        _print(question, copies, rates, found)
    return 0


def _rates(place: str, probe_bytes: int) -> tuple[float, float]:
    path, local = resolve(place)
    if path.startswith(ROOTS):
        disk = probe_directory(path, probe_bytes)
        return disk.write_bytes_per_sec, disk.read_bytes_per_sec
    store = probe_store(Location(path, local), probe_bytes)
    return store.write_bytes_per_sec, store.read_bytes_per_sec


def _facts(
    question: Question, copies: float, rates: list[tuple[float, float]], found: list[Interval]
) -> dict[str, Any]:
    tiers = [
        {**asdict(one), "lost": one.lost, "write_bytes_per_sec": write, "read_bytes_per_sec": read}
        for one, (write, read) in zip(found, rates, strict=True)
    ]
    return {
        **asdict(question),
        "host_bytes_per_sec": copies,
        "tiers": tiers,
        "useful": max(0.0, 1 - sum(one.lost for one in found)),
    }


def _print(
    question: Question, copies: float, rates: list[tuple[float, float]], found: list[Interval]
) -> None:
    out = console()
    said = "as given" if question.host_bytes_per_sec else "a copy in memory, measured"
    out.print(
        f"{size(question.state_bytes)} of state, {question.step_secs:g} s a step, a failure every "
        f"{_time(question.failure_secs)}; to the host at {size(copies)}/s ({said})",
        markup=False,
        soft_wrap=True,
    )
    table = Table(
        "directory", "write", "read", "save every", "saving", "redone", "restoring", box=None
    )
    for one, (write, read) in zip(found, rates, strict=True):
        every = f"{counted(one.steps, 'step', 'steps')} ({_time(one.secs)})"
        lost = (f"{share:.2%}" for share in (one.saving, one.redone, one.restoring))
        table.add_row(escape(one.name), f"{size(write)}/s", f"{size(read)}/s", every, *lost)
    out.print(table)
    useful = max(0.0, 1 - sum(one.lost for one in found))
    out.print(f"useful time: {useful:.2%}", markup=False)
    for line in _code(question, found):
        out.print(line, markup=False, soft_wrap=True)


def _code(question: Question, found: list[Interval]) -> list[str]:
    if question.local is None:
        return [f"Checkpointer({question.directory!r}, save_interval_steps={found[0].steps})"]
    policy = f"ckpt.when.every_steps({found[1].steps})"
    return [
        f"Checkpointer({question.directory!r}, local_directory={question.local!r}, "
        f"save_interval_steps={found[0].steps}, options=ckpt.Options(persist_policy={policy}))"
    ]


def _time(secs: float) -> str:
    """``1.5 s``, ``12 min``, ``3.2 h``, ``5 d``: two digits that matter."""
    for unit, long_secs in (("d", 86_400), ("h", 3600), ("min", 60)):
        if secs >= 2 * long_secs:
            return f"{secs / long_secs:.3g} {unit}"
    return (
        f"{secs:.{max(0, 1 - math.floor(math.log10(secs)))}f} s" if secs < 10 else f"{secs:.0f} s"
    )
