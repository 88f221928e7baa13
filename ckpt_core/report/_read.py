"""Reads what a report shows: the metadata of every step and, where asked for, all bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_core._directory import Backend, StepNames, kind_at, read_run_metadata, resolve, traces
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
)
from ckpt_core._format.record import library_versions
from ckpt_core._look.statistics import leaf_statistics
from ckpt_core._results import CheckpointInfo
from ckpt_core._run.lease import OWNER_FILE
from ckpt_core._run.retention import DAMAGED, RETIRED
from ckpt_core._run.steps import Steps, refuse_one_checkpoint
from ckpt_core._saved import open_checkpoint
from ckpt_core._storage import backend_of
from ckpt_core._verify import describe_opened, verify
from ckpt_core.report._facts import ItemFacts, Report, StepFacts, written_and_linked
from ckpt_core.report._request import Request
from ckpt_core.report._table import Table

_FOLDERS = {DAMAGED: "set aside", RETIRED: "retired"}


@dataclass
class _Reading:
    """What has been read so far."""

    request: Request
    table: Table = field(default_factory=Table)
    steps: list[StepFacts] = field(default_factory=list[StepFacts])
    gone: list[int] = field(default_factory=list[int])
    notes: list[str] = field(default_factory=list[str])


def read_report(
    path: str | os.PathLike[str],
    request: Request | None = None,
    *,
    log: Callable[[str], None] = lambda _: None,
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
    reading = _Reading(request or Request())
    text, local = resolve(path)
    backend = backend_of(local)
    if _is_checkpoint(backend, text, local):
        report = _one_checkpoint(text, reading)
    else:
        report = _run(text, local, backend, reading, log)
    report = _verified(report, log) if reading.request.verify else report
    return _with_numbers(report, reading.request.stats, log)


def _is_checkpoint(backend: Backend, text: str, local: bool) -> bool:
    """Whether a path is one checkpoint: also a file or folder of safetensors."""
    try:
        refuse_one_checkpoint(backend, text, local)
    except CheckpointExists:
        return True
    return False


def _empty(text: str, is_run: bool) -> Report:
    return Report(text, is_run, time.time(), library_versions()["ckpt-core"], Table())


def _one_checkpoint(text: str, reading: _Reading) -> Report:
    found = _facts(None, text, reading, lambda: describe_opened(open_checkpoint(text)))
    return replace(
        _empty(text, False),
        table=reading.table,
        steps=(found,) if found else (),
        run_metadata=found.info.run_metadata if found and found.info else None,
    )


def _run(
    text: str, local: bool, backend: Backend, reading: _Reading, log: Callable[[str], None]
) -> Report:
    if local and kind_at(text) != "directory":
        what = "a file, not a directory" if kind_at(text, follow=False) else "no such directory"
        raise CheckpointNotFound(f"{text}: {what}")
    steps = Steps(text, local, backend, StepNames(reading.request.step_prefix))
    listing = steps.look()
    committed = sorted(listing.committed())
    if not listing.names and (weights := _weights(text)) is not None:
        return _one_checkpoint(weights, reading)
    for number, step in enumerate(committed):
        if number % 50 == 0:
            log(f"metadata of step {step} ({number + 1} of {len(committed)})")
        found = _facts(step, steps.path(step), reading, _describing(steps, step))
        if found is not None:
            reading.steps.append(found)
    return replace(
        _empty(text, True),
        table=reading.table,
        steps=tuple(reading.steps),
        beside=tuple(traces(text, OWNER_FILE, _FOLDERS)) if local else (),
        looked_beside=local,
        run_metadata=_run_metadata(backend, text, reading),
        empty=tuple(sorted(listing.names.keys() - set(committed))),
        gone=tuple(reading.gone),
        notes=tuple(reading.notes),
    )


def _describing(steps: Steps, step: int) -> Callable[[], CheckpointInfo]:
    return lambda: describe_opened(steps.open(step))


def _weights(text: str) -> str | None:
    """The path, if it is a folder of weights in another format."""
    try:
        open_checkpoint(text)
    except (CheckpointError, OSError):
        return None
    return text


def _facts(
    step: int | None, path: str, reading: _Reading, describe: Callable[[], CheckpointInfo]
) -> StepFacts | None:
    """What the metadata of a step says; None if it was deleted meanwhile."""
    try:
        info = describe()
    except CheckpointNotFound:
        if step is None:
            raise
        reading.gone.append(step)
        return None
    except CheckpointCorrupt as error:
        return StepFacts(step, path, problem=_in_words(error))
    except (
        CheckpointError,
        OSError,
    ) as error:  # a format that is newer than this ckpt, or a refusal
        return StepFacts(step, path, problem=_in_words(error), unread=True)
    structure = reading.table.add(info.items)
    items = tuple(
        ItemFacts(name, item.form, len(item.leaves), item.bytes, len(item.files))
        for name, item in info.items.items()
    )
    written, linked = written_and_linked(info.files)
    return StepFacts(
        step,
        path,
        info=replace(info, items={}, files={}),  # of 1,000 steps, these would fill the memory
        items=items,
        structure=structure,
        written_bytes=written,
        linked_bytes=linked,
    )


def _run_metadata(backend: Backend, text: str, reading: _Reading) -> Any:
    try:
        return read_run_metadata(backend, text)
    except (CheckpointError, OSError) as error:
        reading.notes.append(f"the metadata of the run cannot be read: {_in_words(error)}")
        return None


def _in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _verified(report: Report, log: Callable[[str], None]) -> Report:
    found: list[StepFacts] = []
    gone = list(report.gone)
    for step in report.steps:
        log(f"every byte of {step.path}")
        started = time.monotonic()
        try:
            checked = verify(step.path)
        except CheckpointNotFound:
            if step.step is None:
                raise
            gone.append(step.step)
            continue
        except (CheckpointError, OSError) as error:
            unread = step.unread or step.problem is None
            found.append(replace(step, problem=step.problem or _in_words(error), unread=unread))
            continue
        found.append(replace(step, verified=(checked, time.monotonic() - started)))
    return replace(report, steps=tuple(found), gone=tuple(gone))


def _with_numbers(report: Report, newest: int, log: Callable[[str], None]) -> Report:
    """With numbers about the leaves of the newest steps that can be read."""
    sound = [n for n, step in enumerate(report.steps) if not (step.is_damaged or step.unread)]
    steps, notes = list(report.steps), list(report.notes)
    for n in sound[len(sound) - newest :] if newest else []:
        step = steps[n]
        log(f"the arrays of {step.path}")
        known = _numbers_of_leaves(report.table, step)
        try:
            found = {
                known[key]: row
                for row in leaf_statistics(step.path)
                if row.count and (key := (row.item, row.path)) in known
            }
        except (CheckpointError, OSError) as error:
            notes.append(f"the arrays of {step.path} cannot be read: {_in_words(error)}")
            continue
        steps[n] = replace(step, numbers=found)
    return replace(report, steps=tuple(steps), notes=tuple(notes))


def _numbers_of_leaves(table: Table, step: StepFacts) -> dict[tuple[str, str], int]:
    """The number of each leaf of a step in the table, by item and path."""
    ranges = table.structures[step.structure] if step.structure is not None else ()
    return {
        (table.items[table.leaves[n].item], table.leaves[n].path): n
        for first, end in ranges
        for n in range(first, end)
    }
