"""Turns trees into names and host arrays, for libraries that store flat mappings."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ckpt_core.bench._core import Skipped


def names_of(tree: Any) -> list[str]:
    """A name for every leaf, in order."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def numpy_leaves(tree: Any) -> list[np.ndarray[Any, Any]]:
    """Every leaf as an array on the host.

    Raises:
        Skipped: a leaf is not an array, or other processes hold a part of it.
    """
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if not hasattr(leaf, "dtype"):
            raise Skipped(f"saves arrays only, not a {type(leaf).__name__}")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise Skipped("saves arrays of one process only")
    return [np.asarray(leaf) for leaf in leaves]
