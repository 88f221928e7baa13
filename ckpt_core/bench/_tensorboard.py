"""The results of a run as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt_core._event_file import EventFile
from ckpt_core.bench._results import CaseResult, SuiteResult, collected
from ckpt_core.bench._tables import document, markdown_table, number


def write_tensorboard(output: Path, result: SuiteResult) -> Path:
    """Writes ``<output>/tensorboard`` and returns its path; each case has a run for each process."""
    root = output / "tensorboard"
    with closing(EventFile(root / "__suite__")) as file:
        _text(file, "suite", document(result))
    for case in result.cases:
        if case.counted:
            _write_hosts(root, case)
            _write_summary(root / case.name / "__summary__", case)
    return root


def _text(file: EventFile, tag: str, *parts: str) -> None:
    from tensorboard.plugins.text import summary_v2

    file.summary(summary_v2.text_pb(tag, "\n\n".join(parts)))


def _write_hosts(root: Path, case: CaseResult) -> None:
    """Writes every value of every process; the step is the number of the value in its series."""
    for host in range(max(len(run.hosts) for run in case.counted)):
        with closing(EventFile(root / case.name / f"host_{host}")) as file:
            for operation, metrics in collected(run.hosts[host] for run in case.counted).items():
                for metric, values in metrics.items():
                    for step, value in enumerate(chain(*values)):
                        file.scalar(f"{operation}_{metric}", value, step)


def _write_summary(directory: Path, case: CaseResult) -> None:
    from tensorboard.plugins.hparams import summary_v2

    options: Mapping[str, Any] = case.config["options"]
    checkpoint = case.config["checkpoint"]["name"] or "checkpoint"
    chosen = {k: v for k, v in options.items() if v is not None} | {"checkpoint": checkpoint}
    plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in chosen.items()}
    with closing(EventFile(directory)) as file:
        file.summary(summary_v2.hparams_pb(plain, trial_id=case.name))
        for operation, metrics in case.by_operation().items():
            rows: list[tuple[str, ...]] = []
            for metric, s in metrics.items():
                for name in ("min", "mean", "median", "max", "stddev"):
                    if (value := getattr(s, name)) is not None:
                        file.scalar(f"{operation}_{metric}_{name}", value, 0)
                spread = "" if s.ci95 is None else number(s.ci95)
                rows.append(
                    (metric, number(s.median), spread, number(s.min), number(s.max), str(s.n))
                )
            names = ("metric", "median", "± 95 %", "min", "max", "n")
            title = f"**{operation}** of {case.title}"
            _text(file, f"at_a_glance/{operation}", title, markdown_table(names, rows))
        facts = [*options.items(), *case.notes.items()]
        table = markdown_table(("option", "value"), facts)
        _text(file, "configuration", f"`{case.generator}`", table)
