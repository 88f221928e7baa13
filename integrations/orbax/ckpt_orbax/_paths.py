"""Paths as Orbax's callers give and get them, and what lies there already."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Any

from ckpt_orbax._refused import not_offered

_STEP = re.compile(r"(?:(.+)_)?\d+")
_SIGNS = ("ckpt.json", "_CHECKPOINT_METADATA", "_METADATA")
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""What the system says of a path at which nothing is, or can be."""


def path_type() -> Any:
    """``etils.epath.Path``, as in Orbax, or ``pathlib.Path`` without etils (for directories)."""
    try:
        from etils import epath
    except ImportError:
        import pathlib

        return pathlib.Path
    return epath.Path


def as_path(path: str | os.PathLike[str], kind: Any = None) -> Any:
    """``path`` as an object with ``/``, ``name`` and ``exists()``."""
    return (kind or path_type())(os.fspath(path))


def as_text(path: Any) -> str:
    """``path`` as ckpt takes it; a URL keeps its two slashes."""
    if not path:
        raise ValueError(f"a path is needed, got {path!r}")
    return os.fspath(path)


def kind_at(path: str) -> str:
    """What is at a path: ``"directory"``, ``"file"``, ``"other"``, or empty for nothing. Raises OSError if the system
    cannot say: what ``os.path.exists`` takes for absent may be steps, and the training would begin anew.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in ABSENT:
            return ""
        raise
    except ValueError:  # a zero byte
        return ""
    return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def exists(path: Any) -> bool:
    """Whether something is at a path or URL; raises OSError if the system cannot say."""
    text = as_text(path)
    return as_path(text).exists() if "://" in text else bool(kind_at(text))


def refuse_another_series(directory: str, prefix: str | None) -> None:
    """NotOffered in a directory with steps of another prefix: for ckpt one directory is one run."""
    if "://" in directory or kind_at(directory) != "directory":
        return
    for name in sorted(os.listdir(directory)):
        found = _STEP.fullmatch(name)
        signs = (os.path.join(directory, name, sign) for sign in _SIGNS)
        if found is not None and found[1] != prefix and any(map(kind_at, signs)):
            raise not_offered(
                f"the prefix {prefix!r} beside the step {name} in {directory}",
                "a directory holds the steps of one run, whatever their names begin with",
                "a directory for each prefix",
            )
