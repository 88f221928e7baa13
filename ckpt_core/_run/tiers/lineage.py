"""Which steps in local directories count: the name of the run, and its lineage.

Both stand in ``.ckpt-run`` in the persistent directory. A local directory outlives the run, and may be
on a host that is away for a while. So whoever writes to the persistent directory, with local directories
or without, begins a new lineage there wherever the steps of the old one may no longer be its past.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from typing import NamedTuple

from ckpt_core._directory import Backend
from ckpt_core._errors import CheckpointError
from ckpt_core._options import Options
from ckpt_core._processes import Processes

RUN_FILE = ".ckpt-run"
"""In the persistent directory: the name of the run, and its lineage."""


class Run(NamedTuple):
    """Which steps in local directories count.

    Attributes:
        name: of the run, and of its folders in local directories; empty where it has none yet.
        lineage: changes when training goes on from elsewhere than the newest local step.
    """

    name: str
    lineage: str


def find_run(
    backend: Backend, directory: str, processes: Processes, options: Options, make: bool
) -> Run:
    """The run whose persistent directory this is, as process 0 reads or makes it.

    A local directory outlives the run. Its steps are found again by the run's name alone, so what
    another run left there is never resumed from: not one whose persistent directory was removed to
    start anew, nor one of which this directory is a copy.

    Args:
        make: give the run a name if it has none; else an empty one is given.
    """
    return _told_by_first(
        directory, processes, options, lambda: _read_or_make(backend, directory, make)
    )


def next_run(backend: Backend, directory: str, *, goes_on: bool, make: bool) -> Run:
    """The run before a save, for process 0: with a new lineage, unless training goes on in the old one.

    A host that was away keeps local steps of a past that the others have left: its steps lie there
    under the old lineage, and nobody looks for that any more.

    Args:
        make: give the run a name if it has none: somebody has local directories.
    """
    run = _read_or_make(backend, directory, make)
    return run if goes_on or not run.name else _write(backend, directory, run.name)


def _told_by_first(
    directory: str, processes: Processes, options: Options, find: Callable[[], Run]
) -> Run:
    def failed(kind: str, text: str) -> Exception:
        return CheckpointError(
            f"{directory}: process 0 cannot read or write {RUN_FILE}: {kind}: {text}"
        )

    call = "find the run of local steps"
    return Run(*processes.run_on_first(find, options.timeout_secs, call, failed))


def _read_or_make(backend: Backend, directory: str, make: bool) -> Run:
    text = (backend.read(directory, RUN_FILE) or b"").decode(errors="replace")
    found = re.fullmatch(r"(run-[0-9a-f]{16})\n([0-9a-f]{16})\n", text)
    if found is None:
        return _write(backend, directory, "") if make else Run("", "")
    return Run(_placed(found[1], directory), found[2])


def _write(backend: Backend, directory: str, placed: str) -> Run:
    """A new lineage of a run, or of a new one."""
    name = placed.rpartition("-")[0] or f"run-{secrets.token_hex(8)}"
    lineage = secrets.token_hex(8)
    backend.put(directory, RUN_FILE, f"{name}\n{lineage}\n".encode())
    return Run(_placed(name, directory), lineage)


def _placed(name: str, directory: str) -> str:
    """The name of the run together with the place of its directory: a copy is another run."""
    where = hashlib.sha256(directory.encode(errors="surrogateescape")).hexdigest()
    return f"{name}-{where[:8]}"
