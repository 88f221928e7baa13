"""Writes TensorBoard's event files with its own writer, which needs neither torch nor tensorflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.text import summary_v2 as text_summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ckpt_core.bench._results import COUNTED, CaseResult, SuiteResult
from ckpt_core.bench._rows import RATE, TIME, number

# Generated from protocol buffers, so without types.
_Event: Any = event_pb2.Event  # pyright: ignore
_Summary: Any = summary_pb2.Summary  # pyright: ignore


def write_tensorboard(output: Path, result: SuiteResult) -> Path:
    """Writes ``<output>/tensorboard`` and returns its path; each case has a run for each process."""
    root = output / "tensorboard"
    for case in result.cases:
        if case.by_operation():
            _write_hosts(root, case)
            _write_summary(root / case.name / "__summary__", case)
    with _Writer(root / "__suite__") as writer:
        writer.text("suite", _suite_card(result), 0)
    return root


class _Writer:
    """Writes the events of one directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._writer: Any = EventFileWriter(str(directory))

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._add(_Summary(value=[_Summary.Value(tag=tag, simple_value=value)]), step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        self._add(text_summary.text_pb(tag, markdown), step)

    def hparams(self, name: str, values: Mapping[str, Any]) -> None:
        plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in values.items()}
        self._add(hparams_summary.hparams_pb(plain, trial_id=name))

    def _add(self, summary: Any, step: int | None = None) -> None:
        self._writer.add_event(_Event(wall_time=time.time(), summary=summary, step=step))


def _write_hosts(root: Path, case: CaseResult) -> None:
    """Writes every value of every process; the step is the number of the value in its series."""
    runs = [run for run in case.runs if run.kind == COUNTED and run.error is None]
    hosts = max((len(run.hosts) for run in runs), default=0)
    for host in range(hosts):
        with _Writer(root / case.name / f"host_{host}") as writer:
            steps: dict[str, int] = {}
            for run in runs:
                for operation, metrics in run.hosts[host].items():
                    for metric, values in metrics.items():
                        tag = f"{operation}_{metric}"
                        for value in values:
                            writer.scalar(tag, value, steps.get(tag, 0))
                            steps[tag] = steps.get(tag, 0) + 1


def _write_summary(directory: Path, case: CaseResult) -> None:
    with _Writer(directory) as writer:
        options = {k: v for k, v in case.config["options"].items() if v is not None}
        checkpoint = case.config["checkpoint"]["name"] or "checkpoint"
        writer.hparams(case.name, {**options, "checkpoint": checkpoint})
        for operation, metrics in case.by_operation().items():
            for metric, summary in metrics.items():
                for name in ("min", "mean", "median", "max", "stddev"):
                    value = getattr(summary, name)
                    if value is not None:
                        writer.scalar(f"{operation}_{metric}_{name}", value, 0)
            writer.text(f"at_a_glance/{operation}", _card(case, operation), 0)
        writer.text("configuration", _config_card(case), 0)


def _card(case: CaseResult, operation: str) -> str:
    lines = [
        f"**{operation}** of {case.group}: {case.label}",
        "",
        "| metric | median | ± 95 % | min | max | n |",
        "|---|---|---|---|---|---|",
    ]
    for metric, s in case.by_operation()[operation].items():
        spread = "" if s.ci95 is None else number(s.ci95)
        lines.append(
            f"| {metric} | {number(s.median)} | {spread} | {number(s.min)} | {number(s.max)} "
            f"| {s.n} |"
        )
    return "\n".join(lines)


def _config_card(case: CaseResult) -> str:
    lines = [f"`{case.generator}`", "", "| option | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in case.config["options"].items()]
    lines += [f"| {name} | {value} |" for name, value in case.notes.items()]
    return "\n".join(lines)


def _suite_card(result: SuiteResult) -> str:
    lines = [
        f"# {result.suite_name}",
        "",
        "| case | operation | median s | GB/s |",
        "|---|---|---|---|",
    ]
    for case in result.cases:
        for operation, metrics in case.by_operation().items():
            if TIME in metrics:
                rate = f"{metrics[RATE].median:.2f}" if RATE in metrics else ""
                lines.append(
                    f"| {case.group}: {case.label} | {operation} "
                    f"| {number(metrics[TIME].median)} | {rate} |"
                )
        if case.skipped:
            lines.append(f"| {case.group}: {case.label} | skipped: {case.skipped} | | |")
    lines += ["", "| fact | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in result.environment.items()]
    return "\n".join(lines)
