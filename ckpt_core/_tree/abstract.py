"""Leaves of a target that only describe an array: known by their attributes, of any class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_core._lazy import jax
from ckpt_core._tree.flatten import Path


def as_abstract(leaf: Any) -> Any:
    """A ``jax.ShapeDtypeStruct`` for an object with ``shape`` and ``dtype``, with its sharding if that is jax's; else the leaf."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return leaf
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or isinstance(leaf, type):
        return leaf
    try:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.Sharding):
            sharding = None
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
    except (TypeError, ValueError):
        return leaf


class Placeholders:
    """The places of a target that hold ``...``: what was saved there is left out."""

    def __init__(self, paths: Sequence[Path], leaves: Sequence[Any]) -> None:
        found = [path for path, leaf in zip(paths, leaves, strict=True) if leaf is ...]
        self.paths = found
        self._texts = {tuple(map(str, path)) for path in found}
        self._lengths = {len(path) for path in found}

    def cover(self, path: Path) -> bool:
        """Whether a path is one of the places, or below one."""
        text = tuple(map(str, path))
        return any(text[:length] in self._texts for length in self._lengths)
