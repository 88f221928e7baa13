"""Saving: flatten, plan, snapshot, write, commit."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_core._background.pending import PendingSave
from ckpt_core._directory import is_file_name
from ckpt_core._format.orbax_write import COMMIT_FILE, RESERVED_FOLDERS
from ckpt_core._format.record import RECORD_FILE
from ckpt_core._options import Options, checked_options
from ckpt_core._save.dedup_links import Links as Links
from ckpt_core._save.job import RecordFields, SaveJob, save_job
from ckpt_core._save.protocol import PreparedSave, prepare_save

__all__ = [
    "NOTHING",
    "Links",
    "PreparedSave",
    "RecordFields",
    "SaveJob",
    "collect_items",
    "prepare_save",
    "save",
    "save_async",
    "save_job",
]


_ARGUMENTS = ("overwrite", "metadata", "options", "items", "metrics", "force")


class _Nothing:
    """Stands for a state that was not passed, as None is a state."""

    def __repr__(self) -> str:
        return "..."  # what help() shows of the argument


NOTHING = _Nothing()


def save(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """A durable checkpoint at ``path``; returns when a power cut can no longer lose it.

    Blocks until everything is written, verified to be on disk and renamed into place. Where
    several processes run, all must call it, with the same structure, shardings and options (those that
    matter on disk are compared first); numbers, text, numpy arrays and metadata are those of process 0.

    Args:
        path: of the checkpoint's directory; must not exist. Parents are made.
        state: one pytree or object, stored as one item named ``state``.
        overwrite: replace a checkpoint that is there, in one step.
        metadata: JSON of your own, kept with the checkpoint.
        options: see ``Options``.
        items: further named items, for names that are not identifiers or are argument names.
        **named: named items: models, optimizers, data iterators, pytrees.

    Raises:
        CheckpointExists: something is at ``path``.
        UnsupportedLeaf: a value that cannot be saved, named by path and type.
        OSError: the system refused (disk full, permission); nothing is left behind.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
    """
    chosen = collect_items(state, items, named)
    fields = RecordFields(state is not NOTHING, metadata)
    job = save_job(path, fields, checked_options(options), overwrite=overwrite)
    prepared = prepare_save(job, chosen)
    try:
        prepared.run()
    except BaseException:
        prepared.undo()
        raise


def save_async(
    path: str | os.PathLike[str],
    state: Any = NOTHING,
    /,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: Options | None = None,
    items: Mapping[str, Any] | None = None,
    **named: Any,
) -> PendingSave:
    """A save in the background; returns when the state is safe from what the caller does next.

    Arrays may be donated and numpy arrays changed right after (but none whose memory a ``jax.Array``
    was made of without a copy, which jax forbids at any time). Arguments and errors are those of
    ``save``; what fails later is raised by ``.result()``, or printed at exit with exit code 1.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> pending = ckpt.save_async("/tmp/ckpt-docs/two", {"w": jnp.ones(3)}, overwrite=True)
        >>> pending.result()
    """
    chosen = collect_items(state, items, named)
    fields = RecordFields(state is not NOTHING, metadata)
    job = save_job(path, fields, checked_options(options), overwrite=overwrite, copy=np.copy)
    prepared = prepare_save(job, chosen)
    try:
        pending = PendingSave(job.target, prepared.run, "ckpt-save")
        pending.start()
        return pending
    except BaseException:
        prepared.undo()  # nothing, if it goes on
        raise


def collect_items(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The items by name that a call's arguments ask for.

    Raises:
        TypeError: a state together with items, none of both, or a name that looks like a
            misspelt argument.
    """
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"items {', '.join(twice)} were passed twice: by name and in items=")
    chosen = {**(items or {}), **named}
    if not isinstance(state, _Nothing):
        if chosen:
            raise TypeError(
                f"pass one state, or named items ({', '.join(chosen)}), not both: "
                "give the state a name too"
            )
        return {"state": state}
    if not chosen:
        raise TypeError("nothing to save: pass a state, or named items such as model=model")
    for name in named:
        close = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.8)
        if close:
            raise TypeError(
                f"{name!r} looks like the argument {close[0]!r}: to save an item of this name, "
                f"pass items={{{name!r}: ...}}"
            )
    for name in chosen:
        _check_item_name(name)
    return chosen


def _check_item_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"item names must be text, got {name!r}")
    bad = not is_file_name(name) or name.startswith("_") or ".orbax-checkpoint-tmp" in name
    taken = {*RESERVED_FOLDERS, RECORD_FILE, COMMIT_FILE}
    if bad or name in taken:
        raise ValueError(
            f"{name!r} cannot be the name of an item: use letters, digits, '-', '_' and '.', not "
            f"beginning with '.' or '_', and none of {', '.join(sorted(taken))}"
        )
