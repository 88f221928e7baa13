"""Options that both faces have, as those of ckpt: which processes take part, timeouts, modes of directories."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from typing import Any

import jax

import ckpt_core as ckpt
from ckpt_orbax._refused import not_offered
from ckpt_orbax.v1.options import AsyncOptions, MultiprocessingOptions


def refuse_processes(
    options: MultiprocessingOptions | None, shown: str = "MultiprocessingOptions({}={!r})"
) -> None:
    """Raises NotOffered if not all processes take part, led by 0; ``shown`` formats a field and its value."""
    if options is None:
        return
    if options.primary_host != 0:
        raise not_offered(
            shown.format("primary_host", options.primary_host),
            "process 0 leads",
            "for disks of each host, ckpt_core.Checkpointer(local_directory=)",
        )
    active = options.active_processes
    if active is not None and len(active) != jax.process_count():
        raise not_offered(
            shown.format("active_processes", active),
            "all processes take part in a checkpoint",
            "save with all of them",
        )


def changed(
    engine: ckpt.Options, asynchronous: AsyncOptions | None, mode: int | None = None, **changes: Any
) -> ckpt.Options:
    """ckpt's options with the timeout of Orbax's, and a mode for the directories of checkpoints and their items.

    As in Orbax the mode takes permissions away from what the umask leaves, and gives none. It is set
    when the checkpoint is complete, by process 0; a bucket has no modes.
    """
    if getattr(asynchronous, "barrier_sync_fn", None) is not None:
        raise not_offered(
            "AsyncOptions(barrier_sync_fn=)",
            "ckpt's processes agree by their own barriers, which name who is missing",
            "leave it at None",
        )
    if asynchronous is not None and asynchronous.timeout_secs != AsyncOptions.timeout_secs:
        changes["timeout_secs"] = float(asynchronous.timeout_secs)
    if mode is None:
        return dataclasses.replace(engine, **changes)

    def restrict(event: ckpt.Event) -> None:
        if event.kind == "committed" and "://" not in event.path and jax.process_index() == 0:
            path = pathlib.Path(event.path)
            with contextlib.suppress(FileNotFoundError):  # it may have been deleted by now
                for directory in (path, *(child for child in path.iterdir() if child.is_dir())):
                    os.chmod(directory, directory.stat().st_mode & mode)

    listeners = [one for one in (restrict, engine.on_event) if one is not None]
    return dataclasses.replace(engine, on_event=ckpt.events.each(*listeners), **changes)
