"""Checks that a training function gives the same results with and without interruptions."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ckpt_core.testing._prints import Prints, first_difference, leaves_only, prints_from, prints_of

By = Literal["exception", "SIGKILL", "SIGTERM"]
"""How a run is interrupted."""

Train = Callable[[Path, "Report"], Any]
"""A training function; its arguments are the directory for checkpoints and the ``Report``."""

Write = Callable[[dict[str, Any]], None]
"""Sends a part of the answer of a new process, as JSON."""


class Interrupted(BaseException):
    """Raised by ``report`` to interrupt training; a BaseException, so ``except Exception`` misses it."""


@dataclass(frozen=True)
class _Life:
    """What a run reported: prints by step in order, and the prints of its return value if it ended."""

    reports: dict[int, Prints]
    final: Prints | None = None

    @property
    def steps(self) -> list[int]:
        return list(self.reports)


@dataclass(eq=False)
class Report:
    """Called by a training function once per step: ``report(step, loss=loss, model=model)``.

    Values may be anything that a checkpoint can hold: numbers, arrays, pytrees, live objects. They
    are digested during the call.
    """

    _stop_at: int | None
    _stop: Callable[[], None]
    _write: Write
    _steps: set[int] = field(default_factory=set[int])
    stopped: bool = False

    def __call__(self, step: int, /, **values: Any) -> None:
        step = int(step)
        if step in self._steps:
            raise ValueError(f"step {step} was reported before: call report once a step")
        self._steps.add(step)
        self._write({"step": step, "prints": prints_of(values)})
        if self._stop_at is not None and step >= self._stop_at and not self.stopped:
            self.stopped = True
            self._stop()


@dataclass(frozen=True)
class ExactResume:
    """What ``assert_exact_resume`` compared.

    Attributes:
        steps: the steps of the uninterrupted run.
        interrupted_at: the last step that each interrupted run reported.
        resumed_from: the first step that each resumed run reported.
        leaves: the number of compared values, over all steps of all runs.
    """

    steps: tuple[int, ...]
    interrupted_at: tuple[int, ...]
    resumed_from: tuple[int, ...]
    leaves: int


def assert_exact_resume(
    train: Train,
    *,
    interrupt_at: int | Iterable[int] | None = None,
    by: By = "exception",
    directory: str | os.PathLike[str] | None = None,
    timeout_secs: float = 600,
) -> ExactResume:
    """Returns if training that is interrupted and started again equals training that is not.

    ``train(directory, report)`` is called once without interruption. Then it is called with
    another directory, interrupted, and called again, like a job that is rescheduled. It must keep
    its checkpoints in ``directory``, and call ``report(step, loss=loss, ...)`` once per step with
    the values to compare: losses, batches, the model. Its return value is compared, too. All
    comparisons are bit for bit.

    Args:
        train: the training function. A ``functools.partial`` may set its other arguments.
        interrupt_at: the step, or the increasing steps, at whose report to interrupt. By default
            in the middle, and again halfway from there to the end.
        by: ``"exception"`` raises from ``report``, in this process; ``"SIGKILL"`` runs every run
            in a new process and kills it; ``"SIGTERM"`` sends that signal, and the training may
            end by itself (``checkpointer.should_stop``). New processes import ``train``, so it must
            be at the top of a module; settings of ``jax.config`` are passed as environment variables.
        directory: where to run; by default a temporary directory, which is removed.
        timeout_secs: the time limit of each new process.

    Raises:
        AssertionError: a value differs (the first step and leaf are named), a resumed run skipped
            steps, or it began at the start, so that no resume was tested.
        TypeError: ``train`` cannot be sent to a new process.
        ValueError: the directory was used before, or ``interrupt_at`` names steps that do not exist.

    Example:
        >>> import ckpt_core as ckpt
        >>> def train(directory, report):
        ...     value = 1.0
        ...     with ckpt.Checkpointer(directory) as checkpointer:
        ...         restored = checkpointer.restore_latest(value=value)
        ...         if restored:
        ...             value = restored["value"]
        ...         for step in range(restored.step + 1 if restored else 0, 6):
        ...             value = value * 1.5
        ...             report(step, value=value)
        ...             checkpointer.save(step, value=value)
        >>> assert_exact_resume(train).resumed_from
        (3, 4)
    """
    if by not in ("exception", "SIGKILL", "SIGTERM"):
        raise ValueError(f"by must be 'exception', 'SIGKILL' or 'SIGTERM', got {by!r}")
    with (
        tempfile.TemporaryDirectory(prefix="ckpt-exact-resume-")
        if directory is None
        else nullcontext(os.fspath(directory))
    ) as place:
        if any((Path(place) / name).exists() for name in ("straight", "interrupted")):
            raise ValueError(
                f"directory={place!r} holds runs already: every check begins in an empty one"
            )

        def run(name: str, stop_at: int | None) -> _Life:
            return _run(train, Path(place) / name, stop_at, by, timeout_secs)

        straight = run("straight", None)
        stops = _stops(interrupt_at, straight.steps)
        lives = [run("interrupted", stop) for stop in stops]
        lives.append(run("interrupted", None))
        if not any(map(leaves_only, straight.reports.values())):
            raise AssertionError("no step reported a value to compare: report(step, loss=loss)")
    return _compare(straight, lives, stops)


def _stops(interrupt_at: int | Iterable[int] | None, steps: Sequence[int]) -> list[int]:
    """The steps to stop at, checked against the reported steps."""
    if len(steps) < 3:
        raise AssertionError(
            f"train reported {len(steps)} steps: at least 3 are needed to interrupt it between them. "
            "Call report(step, loss=loss) once a step"
        )
    if interrupt_at is None:
        middle = len(steps) // 2
        return sorted({steps[middle], steps[(middle + len(steps) - 1) // 2]})
    stops = [interrupt_at] if isinstance(interrupt_at, int) else list(interrupt_at)
    if not stops or stops != sorted(set(stops)) or not set(stops) <= set(steps):
        raise ValueError(
            f"interrupt_at={interrupt_at!r} must be increasing steps of the training, which are "
            f"{steps[0]} to {steps[-1]}"
        )
    return stops


def _compare(straight: _Life, lives: Sequence[_Life], stops: Sequence[int]) -> ExactResume:
    for number, (life, stop) in enumerate(zip(lives, [*stops, None], strict=True)):
        before = lives[number - 1] if number else None
        _check_steps(straight, life, before, stop)
        _check_values(straight, life, before)
    final = lives[-1].final or {}
    difference = first_difference(straight.final or {}, final)
    if difference is not None:
        raise AssertionError(f"all steps agree, and what train returned differs at {difference}")
    reports = [prints for life in lives for prints in life.reports.values()]
    return ExactResume(
        tuple(straight.steps),
        tuple(life.steps[-1] for life in lives[:-1]),
        tuple(life.steps[0] for life in lives[1:] if life.steps),
        sum(map(len, reports)) + len(final),
    )


def _check_steps(straight: _Life, life: _Life, before: _Life | None, stop: int | None) -> None:
    """Checks that the steps of a run continue those of the run before it, up to its interruption."""
    steps, which = straight.steps, _which(life, before)
    if not life.steps:
        if before is not None and before.steps[-1] == steps[-1]:
            return  # the run before was interrupted after the last step had been saved
        raise AssertionError(f"{which} reported no step")
    first = steps.index(life.steps[0]) if life.steps[0] in steps else 0
    expected = steps[first : first + len(life.steps)]
    if life.steps != expected:
        raise AssertionError(
            f"{which} went through the steps {life.steps}, the uninterrupted run through {expected}"
        )
    if before is None and first:
        raise AssertionError(
            f"a run in an empty directory began at step {life.steps[0]}, the one before at {steps[0]}: "
            "train keeps something outside of its directory"
        )
    if before is not None:
        stopped_at = before.steps[-1]
        interrupted, next_ = f"interrupted at step {stopped_at}, train", steps.index(stopped_at) + 1
        if not first:
            raise AssertionError(
                f"{interrupted} began again at step {steps[0]}: nothing had been saved by then, or it was not restored, so "
                "no resume was tested. Interrupt later (interrupt_at=), or save more often"
            )
        if first > next_:
            raise AssertionError(
                f"{interrupted} went on at step {steps[first]}: step {steps[next_]} was skipped"
            )
    last = life.steps[-1]
    if stop is not None and stop < steps[-1] == last:
        raise AssertionError(
            f"{which} was asked to stop at step {stop} and went on to its end: is SIGTERM listened to "
            "(checkpointer.should_stop)?"
        )
    if stop is None and last != steps[-1]:
        raise AssertionError(f"{which} ended at step {last}, the uninterrupted run at {steps[-1]}")


def _check_values(straight: _Life, life: _Life, before: _Life | None) -> None:
    for step, prints in life.reports.items():
        difference = first_difference(straight.reports[step], prints)
        if difference is None:
            continue
        text = (
            f"step {step} differs at {difference}, and nothing was interrupted before it: two runs "
            "from the start differ, so no resume can be exact. Is everything seeded?"
        )
        if before is not None:
            text = f"{_which(life, before)} differs at step {step}, {difference}. Steps before {step} agree"
        raise AssertionError(text)


def _which(life: _Life, before: _Life | None) -> str:
    if before is None:
        return "the run that was to be interrupted"
    where = f" from step {life.steps[0]}" if life.steps else ""
    return f"the run that was interrupted at step {before.steps[-1]} and resumed{where}"


def _run(train: Train, directory: Path, stop_at: int | None, by: By, timeout_secs: float) -> _Life:
    """A run to its end, or to an interruption at the report of the step ``stop_at``; by a signal in a new interpreter."""
    directory.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    if by == "exception":
        with suppress(Interrupted):
            _train(entries.append, train, str(directory), stop_at, by)
    else:
        sent = (portable(train), str(directory), stop_at, by)
        status, entries = run_apart("train", _train, sent, timeout_secs)
        if status != 0 and (stop_at is None or status != -signal.Signals[by]):
            raise RuntimeError(f"the process of train ended with status {status}")
    reports = {one["step"]: prints_from(one["prints"]) for one in entries if "step" in one}
    final = next((prints_from(one["final"]) for one in entries if "final" in one), None)
    if stop_at is None or not any(step >= stop_at for step in reports):
        return _Life(reports, final)
    if final is not None and by == "exception":
        raise AssertionError(
            f"train went on after report raised Interrupted at step {stop_at}: it must not be caught"
        )
    return _Life(reports)  # what it returned after a SIGTERM is not of the last step


def _train(write: Write, train: Train, directory: str, stop_at: int | None, by: By) -> None:
    """Trains in this process, and writes what is reported and returned."""

    def stop() -> None:
        if by == "exception":
            raise Interrupted(f"interrupted at step {stop_at} by assert_exact_resume")
        if by == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            os.killpg(0, signal.SIGKILL)

    result = train(Path(directory), Report(stop_at, stop, write))
    write({"final": prints_of(result)})


def run_apart(
    name: str, work: Callable[..., None], arguments: tuple[Any, ...], timeout_secs: float
) -> tuple[int | None, list[dict[str, Any]]]:
    """The exit status of ``work(write, *arguments)`` in a new interpreter, and what it wrote before it ended or was killed; after
    ``timeout_secs`` its process group is killed, and an error there is a RuntimeError here.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-testing-") as directory:
        log = Path(directory) / "log.jsonl"
        log.touch()
        # spawn, because JAX and TensorStore do not survive a fork
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_work_apart, args=(str(log), work, arguments))
        process.start()
        process.join(timeout_secs)
        if process.is_alive():
            assert process.pid is not None
            # it has not made its process group yet, or has ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            text = f"{name} was not done after {timeout_secs:g} s in a process of its own"
            raise TimeoutError(text)
        entries: list[dict[str, Any]] = list(map(json.loads, log.read_text().splitlines()))
    if entries and "error" in entries[-1]:
        raise RuntimeError(f"{name} failed in a process of its own:\n{entries[-1]['error']}")
    return process.exitcode, entries


def _work_apart(log: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Runs in the new interpreter."""
    os.setsid()
    # One write per line, so that a killed process leaves complete lines.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(entry: dict[str, Any]) -> None:
        os.write(file, (json.dumps(entry) + "\n").encode())

    try:
        work(write, *arguments)
    except BaseException:
        write({"error": traceback.format_exc()})
        raise


def portable(value: Any) -> Any:
    """The value, or a substitute for it, that can be sent to a new process; TypeError if there is none."""
    try:
        pickle.dumps(value)
        return value
    except Exception as error:
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        if getattr(sys.modules.get(module), name, None) is value:
            return partial(_call, module, name)  # a decorated function, such as a jitted one
        raise TypeError(
            f"{value!r} cannot be taken to a new process: it must be a function at the top of a "
            f"module (or a functools.partial of one), not a lambda or a local function. {error}"
        ) from error


def _call(module: str, name: str, /, *arguments: Any, **options: Any) -> Any:
    """Calls a function by its name, which the new process imports."""
    return getattr(importlib.import_module(module), name)(*arguments, **options)
