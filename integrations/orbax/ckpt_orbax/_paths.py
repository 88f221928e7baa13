"""The type of the paths that Orbax's callers get: ``etils.epath.Path`` where etils is installed."""

from __future__ import annotations

import os
from typing import Any


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
    """``path`` as ckpt takes it; a URL keeps its two slashes.

    Raises:
        ValueError: there is no path.
    """
    if not path:
        raise ValueError(f"a path is needed, got {path!r}")
    return os.fspath(path)
