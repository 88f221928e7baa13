"""The directory of one run, as all parts of a Checkpointer see it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckpt_core import _processes
from ckpt_core._directory import Backend, resolve
from ckpt_core._directory.step_names import StepNames
from ckpt_core._load.opening import refuse_file_for_steps
from ckpt_core._options import Options
from ckpt_core._processes import Processes
from ckpt_core._run.steps import Steps, refuse_one_checkpoint
from ckpt_core._storage import backend_of


@dataclass(frozen=True)
class RunDirectory:
    """A directory of steps.

    Attributes:
        path: absolute path, or URL.
        local: True in a file system, which can rename; False in an object store.
        backend: directory operations of that storage.
        steps: the steps in the directory.
        processes: the processes of this run.
        options: options of the Checkpointer.
        read_only: nothing is written or claimed.
    """

    path: str
    local: bool
    backend: Backend
    steps: Steps
    processes: Processes
    options: Options
    read_only: bool


def open_run_directory(
    directory: str | os.PathLike[str], names: StepNames, options: Options, read_only: bool
) -> RunDirectory:
    """The directory of a run, which need not exist yet.

    Raises:
        NotADirectoryError: the path is a file.
        CheckpointExists: the path is a single checkpoint, not a directory of steps.
    """
    path, local = resolve(directory)
    refuse_file_for_steps(path)
    backend = backend_of(local, options)
    refuse_one_checkpoint(backend, path, local)
    steps = Steps(path, backend, names, options)
    return RunDirectory(path, local, backend, steps, _processes.this_run(), options, read_only)
