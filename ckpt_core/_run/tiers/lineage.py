"""Run name and lineage: they decide which steps in local directories may be restored.

Both are stored in ``.ckpt-run`` in the persistent directory. A local directory outlives the run and
may be on a host that is offline for a while, so its steps may belong to a history that training has
left. A writer of the persistent directory, with or without local directories, therefore begins a
new lineage whenever it continues from anything else than the newest local step.
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
"""File in the persistent directory with the run name and the lineage, one per line."""


class Run(NamedTuple):
    """Identifies the local steps that may be restored.

    Attributes:
        name: name of the run, and of its folder in local directories; empty if it has none yet.
        lineage: 16 hex digits; changes when training continues from another step than the newest
            local one.
    """

    name: str
    lineage: str


def find_run(
    backend: Backend, directory: str, processes: Processes, options: Options, make: bool
) -> Run:
    """The run of a persistent directory, as process 0 reads or creates it; all must call it.

    Local steps are found by the run's name alone, so steps that another run left in the same local
    directory are never restored: neither those of a run whose persistent directory was deleted, nor
    those of a run from which this persistent directory was copied.

    Args:
        backend: reads and writes the directory.
        directory: the persistent directory.
        processes: the processes of this run.
        options: for the time limit.
        make: give the run a name if it has none; otherwise the result has an empty name.
    """
    return _told_by_first(
        directory, processes, options, lambda: _read_or_make(backend, directory, make)
    )


def next_run(backend: Backend, directory: str, *, goes_on: bool, make: bool) -> Run:
    """On process 0, before a save: the run, with a new lineage unless ``goes_on``.

    A host that was offline may still hold local steps of a history that training has left; they
    carry the old lineage, so no restore considers them.

    Args:
        backend: reads and writes the directory.
        directory: the persistent directory.
        goes_on: training continues from the newest local step: keep the lineage.
        make: give the run a name if it has none, because this writer has local directories.
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
    """Writes a new lineage; a new run name too if ``placed`` (see ``_placed``) is empty."""
    name = placed.rpartition("-")[0] or f"run-{secrets.token_hex(8)}"
    lineage = secrets.token_hex(8)
    backend.put(directory, RUN_FILE, f"{name}\n{lineage}\n".encode())
    return Run(_placed(name, directory), lineage)


def _placed(name: str, directory: str) -> str:
    """The run name with a hash of its directory's path: a copied directory is another run."""
    where = hashlib.sha256(directory.encode(errors="surrogateescape")).hexdigest()
    return f"{name}-{where[:8]}"
