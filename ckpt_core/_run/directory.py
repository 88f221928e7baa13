"""The directory of one run, as all parts of a Checkpointer see it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpt_core import _processes
from ckpt_core._directory import Backend, resolve
from ckpt_core._directory.step_names import StepNames
from ckpt_core._load.absent import refuse_file_for_steps
from ckpt_core._options import Options
from ckpt_core._processes import Processes
from ckpt_core._run.steps import Steps, refuse_one_checkpoint
from ckpt_core._storage import backend_of


@dataclass(frozen=True)
class RunDirectory:
    """A directory of steps, and what this writer knows of them.

    Attributes:
        path: absolute, or a URL.
        local: whether it is in a file system, where things can be moved.
        backend: how directories work there.
        steps: that lie in it.
        processes: of this run.
        options: of the Checkpointer.
        read_only: nothing is written or claimed.
        mine: the steps that this writer has saved; grows.
        damaged: the steps that could not be restored; grows, and those that are saved anew leave it.
    """

    path: str
    local: bool
    backend: Backend
    steps: Steps
    processes: Processes
    options: Options
    read_only: bool
    mine: set[int] = field(default_factory=set[int])
    damaged: set[int] = field(default_factory=set[int])


def open_run_directory(
    directory: str | os.PathLike[str], names: StepNames, options: Options, read_only: bool
) -> RunDirectory:
    """The directory of a run, which need not exist yet.

    Raises:
        NotADirectoryError: it is a file.
        CheckpointExists: it is one checkpoint.
    """
    path, local = resolve(directory)
    refuse_file_for_steps(path)
    backend = backend_of(local)
    refuse_one_checkpoint(backend, path, local)
    steps = Steps(path, backend, names)
    return RunDirectory(path, local, backend, steps, _processes.this_run(), options, read_only)
