"""Runs a training function, in this process or a new one, and records what it reports."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckpt_core.testing._prints import Prints, prints_from, prints_of
from ckpt_core.testing._processes import portable, run_apart

By = Literal["exception", "SIGKILL", "SIGTERM"]
"""How a run is interrupted."""

Train = Callable[[Path, "Report"], Any]
"""A training function; its arguments are the directory for checkpoints and the ``Report``."""


class Interrupted(BaseException):
    """Raised by ``report`` to interrupt training; a BaseException, so ``except Exception`` misses it."""


@dataclass
class Run:
    """What a run reported: prints by step in order, and the prints of its return value if it ended."""

    reports: dict[int, Prints] = field(default_factory=dict[int, Prints])
    final: Prints | None = None

    @property
    def steps(self) -> list[int]:
        return list(self.reports)


class Report:
    """Called by a training function once per step: ``report(step, loss=loss, model=model)``.

    Values may be anything that a checkpoint can hold: numbers, arrays, pytrees, live objects. They
    are digested during the call.
    """

    def __init__(
        self,
        stop_at: int | None,
        stop: Callable[[], None],
        write: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.run = Run()
        self.stopped = False
        self._stop_at = stop_at
        self._stop = stop
        self._write = write

    def __call__(self, step: int, /, **values: Any) -> None:
        step = int(step)
        if step in self.run.reports:
            raise ValueError(f"step {step} was reported before: call report once a step")
        self.run.reports[step] = prints_of(values)
        if self._write is not None:
            self._write({"step": step, "prints": self.run.reports[step]})
        if self._stop_at is not None and step >= self._stop_at and not self.stopped:
            self.stopped = True
            self._stop()


def run_here(train: Train, directory: Path, stop_at: int | None) -> Run:
    """Runs to the end, or to the report of the step ``stop_at``, which raises Interrupted."""

    def stop() -> None:
        raise Interrupted(f"interrupted at step {stop_at} by assert_exact_resume")

    report = Report(stop_at, stop)
    try:
        result = train(directory, report)
    except Interrupted:
        return report.run
    if report.stopped:
        raise AssertionError(
            f"train went on after report raised Interrupted at step {stop_at}: it must not be caught"
        )
    report.run.final = prints_of(result)
    return report.run


def run_in_process(
    train: Train, directory: Path, stop_at: int | None, by: By, timeout_secs: float
) -> Run:
    """The run of ``train`` in a new interpreter, which a signal interrupts at the step ``stop_at``. An error of ``train``
    is a RuntimeError here.
    """
    log = directory.with_suffix(f".{len(list(directory.parent.iterdir()))}.jsonl")
    sent = (portable(train), str(directory), str(log), stop_at, by)
    status = run_apart(_child, sent, "train", timeout_secs)
    run, error = _read(log)
    if error is not None:
        raise RuntimeError(f"train failed in a process of its own:\n{error}")
    if status != 0 and (stop_at is None or status != -signal.Signals[by]):
        raise RuntimeError(f"the process of train ended with status {status}")
    if by == "SIGTERM" and stop_at is not None and any(step >= stop_at for step in run.steps):
        run.final = None  # it ended early because of SIGTERM, so its result is not the final one
    return run


def _read(log: Path) -> tuple[Run, str | None]:
    """The run that a child's log tells of, and its traceback if it failed."""
    run = Run()
    for line in log.read_text().splitlines() if log.exists() else []:
        entry = json.loads(line)
        if "error" in entry:
            return run, entry["error"]
        if "final" in entry:
            run.final = prints_from(entry["final"])
        else:
            run.reports[entry["step"]] = prints_from(entry["prints"])
    return run, None


def _child(train: Train, directory: str, log: str, stop_at: int | None, by: By) -> None:
    """Runs in the child: trains, and writes a line for each report at once."""
    os.setsid()
    # One write per line, so that a killed process leaves complete lines.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(entry: dict[str, Any]) -> None:
        os.write(file, (json.dumps(entry) + "\n").encode())

    def stop() -> None:
        if by == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            os.killpg(0, signal.SIGKILL)

    report = Report(stop_at, stop, write)
    try:
        result = train(Path(directory), report)
        write({"final": prints_of(result)})
    except BaseException:
        write({"error": traceback.format_exc()})
        raise
