"""Which system this is, and what only some of them have. Nothing else in the package asks for its name.

Where a call is missing, the module that wants it has a second way, and its docstring says what that costs.
"""

from __future__ import annotations

import os
import string
import sys

LINUX: bool = sys.platform.startswith("linux")
MACOS: bool = sys.platform == "darwin"
WINDOWS: bool = os.name == "nt"
"""There checkpoints are read, and written to object stores; see ``cannot_write`` in ``_directory.files``."""
ROOTS: tuple[str, ...] = (
    ("/", *(f"{letter}:/" for letter in string.ascii_letters)) if WINDOWS else ("/",)
)
"""What absolute paths begin with, as ``_directory.resolve`` gives them; URLs begin with something else."""


def _flags(*names: str) -> int:
    """Flags of ``os.open``, of those that the system has."""
    return sum(getattr(os, name, 0) for name in names)


def of_tasks() -> str:
    """The end of a message about two writers: one of several tasks of a launcher, of which jax knows only this one."""
    jax, count = sys.modules.get("jax"), 1
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        text = os.environ.get(name, "")
        count = max(count, int(text) if text.isdecimal() else 1)
    if count == 1 or (jax is not None and jax.process_count() > 1):
        return ""
    return f". This is one of {count} tasks, and jax knows of one process: as one run they call jax.distributed.initialize() first"


BINARY: int = _flags("O_CLOEXEC", "O_NOINHERIT", "O_BINARY")
"""For every file: not for child processes, and byte by byte on Windows."""
READ: int = os.O_RDONLY | BINARY | _flags("O_NOCTTY", "O_NONBLOCK")
"""To read a path that others name: opening a pipe would block until it has a writer."""
DIRECT: int = _flags("O_DIRECT") if hasattr(os, "RWF_NOWAIT") else 0
"""To read past the page cache what is not in it; 0 where the system cannot do that, or not say what is in it."""
NO_LINK: int = _flags("O_NOFOLLOW")
FOLDER: int = os.O_RDONLY | _flags("O_DIRECTORY", "O_CLOEXEC")
