"""Reads what a report shows: the metadata of every step and, where asked for, all bytes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckpt_core._directory import Backend, StepNames, read_run_metadata, resolve, traces
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._format.record import library_versions
from ckpt_core._look.leaves import leaf_statistics
from ckpt_core._results import CheckpointInfo
from ckpt_core._run.lease import OWNER_FILE
from ckpt_core._run.retention import DAMAGED, RETIRED
from ckpt_core._run.steps import Steps, refuse_no_directory, refuse_one_checkpoint
from ckpt_core._saved import open_checkpoint
from ckpt_core._storage import backend_of
from ckpt_core._verify import describe_opened, verify
from ckpt_core.report._facts import Report, StepFacts, Table, Verified, as_text, columns_of

_FOLDERS = {DAMAGED: "set aside", RETIRED: "retired"}


@dataclass(frozen=True)
class Request:
    """What a report reads beside the metadata."""

    verify: bool = False  # every byte of every step
    stats: int = 0  # of so many of the newest steps the arrays, for numbers about their leaves
    step_prefix: str | None = None  # of the names of the steps, as given to the Checkpointer


Log = Callable[[str], None]


def read_report(
    path: str | os.PathLike[str], request: Request | None = None, *, log: Log = lambda _: None
) -> Report:
    """Everything that a report of a run, or of one checkpoint, shows.

    A step that is damaged is in the report, with the reason; one that is deleted meanwhile is named.

    Args:
        path: a directory of steps, or a checkpoint; of ckpt or Orbax, on disk or in a bucket.
        request: what to read beside the metadata.
        log: is called with a line about what is being read.

    Raises:
        CheckpointNotFound: there is nothing at ``path``.
    """
    request = request or Request()
    text, local = resolve(path)
    backend = backend_of(local)
    empty = Report(text, True, time.time(), library_versions()["ckpt-core"], Table())
    try:
        refuse_one_checkpoint(backend, text, local)
        report = _run(empty, local, backend, request.step_prefix, log)
    except FileExistsError:
        report = _one_checkpoint(empty)
    report = _verified(report, log) if request.verify else report
    return _with_numbers(report, request.stats, log)


def _one_checkpoint(empty: Report) -> Report:
    """Also a file or folder of safetensors."""
    info, step = _facts(None, empty.path, empty.table, partial(open_checkpoint, empty.path))
    metadata = as_text(info.run_metadata) if info is not None else None
    return replace(empty, is_run=False, steps=(step,), run_metadata=metadata)


def _run(empty: Report, local: bool, backend: Backend, prefix: str | None, log: Log) -> Report:
    text = empty.path
    refuse_no_directory(text, local)
    steps = Steps(text, local, backend, StepNames(prefix))
    listing = steps.look()
    if not listing.names:  # perhaps a folder of weights in another format
        with contextlib.suppress(CheckpointError, OSError):
            open_checkpoint(text)
            return _one_checkpoint(empty)
    committed, found, gone = listing.committed(), list[StepFacts](), list[int]()
    for number, step in enumerate(committed):
        if number % 50 == 0:
            log(f"metadata of step {step} ({number + 1} of {len(committed)})")
        try:
            opened = partial(steps.open, step)
            found.append(_facts(step, steps.path(step), empty.table, opened)[1])
        except CheckpointNotFound:
            gone.append(step)
    metadata, notes = None, ()
    try:
        metadata = as_text(read_run_metadata(backend, text))
    except (CheckpointError, OSError) as error:
        notes = (f"the metadata of the run cannot be read: {error}",)
    return replace(
        empty,
        steps=tuple(found),
        beside=tuple(traces(text, OWNER_FILE, _FOLDERS)) if local else (),
        looked_beside=local,
        run_metadata=metadata,
        without_checkpoint=tuple(sorted(listing.names.keys() - set(committed))),
        deleted_meanwhile=tuple(gone),
        notes=notes,
    )


def _facts(
    step: int | None, path: str, table: Table, opened: Callable[[], Any]
) -> tuple[CheckpointInfo | None, StepFacts]:
    """What the metadata of a step says; raises CheckpointNotFound if it was deleted meanwhile."""
    try:
        info = describe_opened(opened())
    except CheckpointNotFound:
        raise
    except (CheckpointError, OSError) as error:
        unread = not isinstance(error, CheckpointCorrupt)
        return None, StepFacts(step, path, problem=str(error), unread=unread)
    return info, StepFacts.of(step, path, info, table.add(info.items))


def _verified(report: Report, log: Log) -> Report:
    found: list[StepFacts] = []
    gone = list(report.deleted_meanwhile)
    for step in report.steps:
        log(f"every byte of {step.path}")
        started = time.monotonic()
        try:
            checked = verify(step.path)
            verified = Verified.of(checked, time.monotonic() - started)
            found.append(replace(step, verified=verified))
        except CheckpointNotFound:
            if step.step is None:
                raise
            gone.append(step.step)
        except (CheckpointError, OSError) as error:
            unread = step.unread or step.problem is None
            found.append(replace(step, problem=step.problem or str(error), unread=unread))
    return replace(report, steps=tuple(found), deleted_meanwhile=tuple(gone))


def _with_numbers(report: Report, newest: int, log: Log) -> Report:
    """With numbers about the leaves of the newest steps that can be read."""
    sound = [step for step in report.steps if step.state not in ("damaged", "not readable")]
    statistics, notes = list(report.statistics), list(report.notes)
    for step in sound[-newest:] if newest else []:
        log(f"the arrays of {step.path}")
        numbers = dict(report.table.numbers_in(step.structure))
        try:
            rows = {numbers.get((row.item, row.path)): row for row in leaf_statistics(step.path)}
        except (CheckpointError, OSError) as error:
            notes.append(f"the arrays of {step.path} cannot be read: {error}")
            continue
        known = {leaf: row for leaf, row in rows.items() if leaf is not None and row.count}
        statistics.append(columns_of(step.step, known))
    return replace(report, statistics=tuple(statistics), notes=tuple(notes))
