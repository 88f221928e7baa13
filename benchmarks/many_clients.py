"""Opens local directories and saves into them with hundreds of real clients of jax's coordination service.

    python benchmarks/many_clients.py --processes 64 256

Each process is a fork with a client, a server and a directory of its own; the state is a few numbers, so what is
timed is how they agree. All share the cores of one machine: a job has a host for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from shared import free_address, header, middle, options, row  # isort: skip

import jax
import numpy as np
import tensorstore  # noqa: F401  # shared by the forks, which import ckpt_core themselves: it does not survive a fork

LINEAGE = "a" * 16
SAVES = 3
LIMIT_SECS = 300.0


def work(root: Path, index: int, count: int, partners: bool) -> dict[str, list[float]]:
    """What one process does; gives the seconds that each call took."""
    import ckpt_core as ckpt
    from ckpt_core._directory import StepNames
    from ckpt_core._processes import Processes, next_tag
    from ckpt_core._run.lineage import Lineage
    from ckpt_core._run.steps import open_run_directory
    from ckpt_core._run.tiers import LocalTier, StepToSave
    from ckpt_core._save import RecordFields, take

    how = {"partners": "host"} if partners else {}
    settings = ckpt.Options(timeout_secs=LIMIT_SECS, durable=False, **how)
    lineage = Lineage("run", LINEAGE)
    processes = Processes(index, count)
    secs: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def timed(what: str) -> Generator[None]:
        processes.gather_decide(next_tag(), "", lambda _: "", LIMIT_SECS)  # all begin together
        began = time.perf_counter()
        yield
        secs.setdefault(what, []).append(time.perf_counter() - began)

    for _ in range(SAVES):
        with timed("agreement"):
            processes.gather_alike(next_tag(), "x" * 400, "", lambda _: "", LIMIT_SECS)
        with timed("agreement, all differ"):
            processes.gather_alike(next_tag(), f"{index}" * 80, "", lambda _: "", LIMIT_SECS)
    run = open_run_directory(root / "persistent", StepNames(), settings, False)
    run = dataclasses.replace(run, processes=processes)
    with timed("opening"):
        tier = LocalTier(str(root / f"local.{index}"), lineage, run)
    for step in range(SAVES):
        items = {"state": {"w": np.full(16, step)}}
        what = StepToSave(step, items, RecordFields(True), f"{LINEAGE}{step:016x}")
        with timed("local save"):
            snapshot, write = tier.prepare(what)
            take(items, [snapshot])
            write()
    tier.close(0)
    with timed("opening again"):
        again = LocalTier(str(root / f"local.{index}"), lineage, run)
    assert SAVES - 1 in again.complete, again.complete
    again.close(0)
    return secs


def forked(call: Callable[[], Any], report: Path) -> int:
    """Runs a call in a fork, which writes what it gives, or its error; the process's id."""
    if pid := os.fork():
        return pid
    try:
        report.write_text(json.dumps(call()))
    except BaseException:
        report.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def measured(count: int, partners: bool) -> dict[str, list[float]]:
    """The seconds of each call of all processes."""
    root = Path(tempfile.mkdtemp(prefix="ckpt-clients-", dir=_memory()))
    (root / "persistent").mkdir()
    address = free_address()

    def process(index: int) -> dict[str, list[float]]:
        jax.distributed.initialize(
            address, num_processes=count, process_id=index, initialization_timeout=int(LIMIT_SECS)
        )
        secs = work(root, index, count, partners)
        (root / f"{index}.ended").touch()
        while index == 0 and len([*root.glob("*.ended")]) < count:  # it holds the service
            time.sleep(0.05)
        return secs

    try:
        pids = [forked(lambda index=n: process(index), root / f"{n}.json") for n in range(count)]
        for pid in pids:
            os.waitpid(pid, 0)
        if errors := sorted(root.glob("*.error")):
            raise SystemExit(f"{len(errors)} of {count} failed:\n{errors[0].read_text()}")
        all_secs: dict[str, list[float]] = {}
        for n in range(count):
            for what, secs in json.loads((root / f"{n}.json").read_text()).items():
                all_secs.setdefault(what, []).extend(secs)
        return all_secs
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> None:
    given = options(
        __doc__,
        directory=False,
        processes=[16, 64, 256],
        partners=(False, "with copies on the next process"),
    )
    header("processes", "call", "median, s", "slowest, s", words=2)
    for count in given.processes:
        for what, secs in measured(count, given.partners).items():
            row(count, what, f"{middle(secs):.3f}", f"{max(secs):.3f}")


if __name__ == "__main__":
    main()
