"""Whether there is a checkpoint at a path."""

from __future__ import annotations

from typing import Any

from ckpt_orbax._paths import as_path, as_text, exists
from ckpt_orbax.v1._describe import is_orbax_checkpoint

OCDBT_MANIFEST_FILE = "manifest.ocdbt"
PYTREE_METADATA_FILE = "_METADATA"


def is_ocdbt_checkpoint(path: Any) -> bool:
    """Whether a directory is an OCDBT store, as the directory of an item is."""
    return exists(as_path(as_text(path)) / OCDBT_MANIFEST_FILE)


def is_pytree_checkpoint(path: Any) -> bool:
    """Whether a directory is that of a pytree."""
    return exists(as_path(as_text(path)) / PYTREE_METADATA_FILE)


__all__ = [
    "OCDBT_MANIFEST_FILE",
    "PYTREE_METADATA_FILE",
    "is_ocdbt_checkpoint",
    "is_orbax_checkpoint",
    "is_pytree_checkpoint",
]
