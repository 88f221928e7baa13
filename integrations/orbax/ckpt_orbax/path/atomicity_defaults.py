"""The names that Orbax would commit by."""

from __future__ import annotations

from typing import Any

from ckpt_orbax.path.atomicity import (
    AtomicRenameTemporaryPath,
    CommitFileTemporaryPath,
    TemporaryPath,
)
from ckpt_orbax.v0.utils import is_gcs_path


def get_default_temporary_path_class(path: Any, *_: Any, **__: Any) -> type[TemporaryPath]:
    """A value for ``temporary_path_class=``, which has no effect."""
    return CommitFileTemporaryPath if is_gcs_path(path) else AtomicRenameTemporaryPath


get_item_default_temporary_path_class = get_default_temporary_path_class

__all__ = ["get_default_temporary_path_class", "get_item_default_temporary_path_class"]
