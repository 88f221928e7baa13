"""The file of a run's lineages in the persistent directory: read, and made for a run that has none yet."""

from __future__ import annotations

import hashlib
import secrets

from ckpt_core._run.directory import RunDirectory
from ckpt_core._run.lineage import (
    LEAVING_FILE,
    RUN_FILE,
    Lineage,
    parse_leaving,
    parse_lineage,
)


def read_run(directory: RunDirectory) -> Lineage:
    """The run of a persistent directory; while steps are being removed, the one without them."""
    leaving = parse_leaving(directory.backend.read(directory.path, LEAVING_FILE), directory.path)
    data = leaving.run.encode() or directory.backend.read(directory.path, RUN_FILE)
    return parse_lineage(data)


def run_text(directory: RunDirectory, make: bool) -> str:
    """On process 0: ``read_run`` as a text for the other processes.

    Local steps are found by the run's name alone, so steps that another run left in the same local
    directory are never restored: neither those of a run whose persistent directory was deleted, nor
    those of a run from which this persistent directory was copied.

    Args:
        directory: the persistent directory.
        make: give the run a name if it has none; otherwise the result has an empty name.
    """
    run = read_run(directory)
    if make and not run.name:
        run = Lineage(f"run-{secrets.token_hex(8)}", secrets.token_hex(8))
        directory.backend.put(directory.path, RUN_FILE, run.dump())
    return run.dump().decode()


def folder_of(run: Lineage, directory: str) -> str:
    """The folder of a run in local directories: its name with a hash of the persistent directory's path.

    A copy of that directory is another run.
    """
    if not run.name:
        return "none"
    where = hashlib.sha256(directory.encode(errors="surrogateescape")).hexdigest()
    return f"{run.name}-{where[:8]}"
