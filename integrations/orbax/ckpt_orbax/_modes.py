"""``FileOptions.path_permission_mode``: what others may do with the directories of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib

import jax

import ckpt_core as ckpt


def with_mode(options: ckpt.Options, mode: int | None) -> ckpt.Options:
    """Options by which the directory of each checkpoint, and those of its items, get a mode.

    As in Orbax the mode takes permissions away from what the umask leaves, and gives none. It is set
    when the checkpoint is complete, by process 0; a bucket has no modes.
    """
    if mode is None:
        return options

    def restrict(event: ckpt.Event) -> None:
        if event.kind == "committed" and "://" not in event.path and jax.process_index() == 0:
            path = pathlib.Path(event.path)
            with contextlib.suppress(FileNotFoundError):  # it may have been deleted by now
                for directory in (path, *(child for child in path.iterdir() if child.is_dir())):
                    os.chmod(directory, directory.stat().st_mode & mode)

    listeners = [one for one in (restrict, options.on_event) if one is not None]
    return dataclasses.replace(options, on_event=ckpt.events.each(*listeners))
