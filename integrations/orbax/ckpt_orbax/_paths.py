"""Paths as Orbax's callers give and get them, and what lies there already."""

from __future__ import annotations

import os
import re
from typing import Any

from ckpt_orbax._refused import not_offered

_STEP = re.compile(r"(?:(.+)_)?\d+")
_SIGNS = ("ckpt.json", "_CHECKPOINT_METADATA", "_METADATA")


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


def refuse_another_series(directory: str, prefix: str | None, names: Any = None) -> None:
    """Raises NotOffered in a directory of a file system with steps whose names begin otherwise.

    To Orbax and Flax those are another series, with retention of its own. To ckpt a directory is one run.
    """
    if "://" in directory or not os.path.isdir(directory):
        return
    read = set[str]() if names is None else {one.path.name for one in names.find_all(directory)}
    for name in sorted({*os.listdir(directory)} - read):
        found = _STEP.fullmatch(name)
        if found is None or found[1] == prefix:
            continue
        if any(os.path.exists(os.path.join(directory, name, sign)) for sign in _SIGNS):
            raise not_offered(
                f"the prefix {prefix!r} beside the step {name} in {directory}",
                "a directory holds the steps of one run, whatever their names begin with",
                "a directory for each prefix",
            )
