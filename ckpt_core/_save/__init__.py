"""Saving: flatten, plan, snapshot, write, commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_core._background.pending import PendingSave
from ckpt_core._errors import ANSWERS, at_the_call
from ckpt_core._options import Options, checked_options
from ckpt_core._save.job import (
    NOTHING,
    RecordFields,
    SaveJob,
    collect_items,
    make_job,
    metrics_of,
    save_job,
)
from ckpt_core._save.protocol import Save, prepare_save, take_snapshot
from ckpt_core._save.unchanged import Links as Links

__all__ = [
    "NOTHING",
    "Links",
    "RecordFields",
    "Save",
    "SaveJob",
    "collect_items",
    "make_job",
    "metrics_of",
    "save",
    "save_async",
    "save_job",
    "take_snapshot",
]


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
    """Writes a checkpoint at ``path``; when it returns, a power cut cannot lose the checkpoint.

    Blocks until every file is written, fsynced and renamed into place. Where several processes run,
    all must call it, with the same structure, shardings, path and options; before anything is
    written, the processes compare all that decides what is stored where. Each process writes its
    shards; metadata is taken from process 0. Python numbers, text, numpy arrays and arrays that no
    sharding places must be equal on all, unless an object with ``per_process = True`` holds them.

    Args:
        path: directory of the checkpoint. It must not exist; missing parents are created.
        state: one pytree or object, saved as the only item, ``state``.
        overwrite: if a checkpoint exists at ``path``, replace it: after a crash, ``load`` finds
            either the old or the new one, complete.
        metadata: any JSON value, stored with the checkpoint.
        options: see ``Options``.
        items: more named items, for names that are no identifiers or are argument names.
        **named: named items: models, optimizers, data iterators, pytrees.

    Raises:
        CheckpointExists: there is something at ``path``, and ``overwrite`` is False.
        UnsupportedLeaf: a value cannot be saved; the message says its path and type.
        CheckpointError: processes save different things or values, or another process failed.
        BarrierTimeout: a process did not come within ``Options.timeout_secs``.
        OSError: the system refused (disk full, no permission). Partial files are removed.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> ckpt.save("/tmp/ckpt-docs/one", {"w": jnp.ones(3)}, overwrite=True)
    """
    chosen_options = checked_options(options)
    chosen = collect_items(state, items, named)
    fields = RecordFields(state is not NOTHING, metadata)
    job = save_job(path, fields, chosen_options, overwrite=overwrite)
    try:
        prepared = prepare_save(job, chosen)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904
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
    """A ``PendingSave``: a background thread writes the checkpoint that ``save`` would write.

    Blocks only until the snapshot is taken: then the caller may donate or delete arrays and write
    to numpy arrays. (Exception: a numpy array whose memory a ``jax.Array`` shares must not be
    written to; jax forbids that at any time.) Where several processes run, all must call it.

    Takes the arguments of ``save`` and raises its errors. An error in the background thread is
    raised by ``.result()``; if nobody calls that, it is printed when the interpreter exits, and the
    exit status is 1. The interpreter does not exit before the save has ended. If the system has no thread
    for it, ``RuntimeError`` is raised here, and nothing of it is left.

    Example:
        >>> import ckpt_core as ckpt, jax.numpy as jnp
        >>> pending = ckpt.save_async("/tmp/ckpt-docs/two", {"w": jnp.ones(3)}, overwrite=True)
        >>> pending.result()
    """
    chosen_options = checked_options(options)
    chosen = collect_items(state, items, named)
    fields = RecordFields(state is not NOTHING, metadata)
    job = save_job(path, fields, chosen_options, overwrite=overwrite)
    try:
        prepared = prepare_save(job, chosen, np.copy)
    except ANSWERS as error:
        raise at_the_call(error)  # noqa: B904
    pending = None
    try:
        low = job.options.background_priority == "low"
        pending = PendingSave(job.target, prepared.run, "ckpt-save", low=low)
        pending.start()
        return pending
    except BaseException:
        if pending is not None:  # interpreter exit would wait for a thread that never started
            pending.abandon()
        prepared.undo()  # does nothing if the background thread has begun to write
        raise
