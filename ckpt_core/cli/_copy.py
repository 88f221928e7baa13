"""``ckpt cp`` and ``gc``: what changes a directory of steps."""

from __future__ import annotations

from ckpt_core._copy import copy_checkpoint, same_save
from ckpt_core._directory import resolve
from ckpt_core._errors import CheckpointError, CheckpointNotFound
from ckpt_core._storage import backend_of
from ckpt_core.cli._steps import is_run, steps_in
from ckpt_core.cli._text import console, size


def copy(source: str, target: str, *, steps: list[int], prefix: str | None) -> int:
    """Copies a checkpoint, or steps of a run; steps that are there already are left alone.

    Args:
        source: a checkpoint, or a directory of steps.
        target: where it goes; for a directory of steps, another one.
        steps: which steps; empty for all.
        prefix: of the names of steps.
    """
    if not is_run(source):
        if steps:
            raise CheckpointNotFound(f"{source} is no directory of steps: leave --step out")
        _copy_one(source, target)
        return 0
    ours, theirs = steps_in(source, prefix), steps_in(target, prefix)
    for step in sorted({*steps}) or ours.all():
        ours.refuse_absent(step)
        path = ours.path(step)
        if not theirs.has(step):
            _copy_one(path, theirs.new_path(step))
        elif same_save(path, theirs.path(step)):
            console().print(f"{theirs.path(step)} is there already", markup=False)
        else:
            raise CheckpointError(
                f"{theirs.path(step)} is another save than {path}: delete it first, or copy to another place"
            )
    return 0


def _copy_one(source: str, target: str) -> None:
    copied_bytes = copy_checkpoint(source, target)
    console().print(f"{source} -> {target}: {size(copied_bytes)}", markup=False)


def collect_garbage(directory: str) -> int:
    """Deletes what dead writers left, and finishes what they had committed or begun to delete."""
    text, local = resolve(directory)
    removed = backend_of(local).clean(text)
    out = console()
    for name in removed:
        out.print(name, markup=False)
    out.print(f"{len(removed)} removed" if removed else "nothing to remove", markup=False)
    return 0
