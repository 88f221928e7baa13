"""Pytrees."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

Leaf = jax.Array | np.ndarray | int | float | np.number | str
AbstractLeaf = Any
PyTree = Any
PyTreeKey = Any
PyTreeKeyPath = tuple[Any, ...]
JsonType = Any


class PyTreeOf:
    """For annotations: ``PyTreeOf[Leaf]`` is any pytree."""

    def __class_getitem__(cls, _: Any) -> Any:
        return Any


def merge(*trees: Any, overwrite: bool = False, is_leaf: Any = None) -> Any:
    """One tree of dicts with the leaves of all.

    Args:
        *trees: nested dicts.
        overwrite: whether a later tree's leaf replaces an earlier one's.
        is_leaf: says of a dict that it is a leaf.

    Raises:
        ValueError: two trees have a leaf at one place, without ``overwrite``.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> ocp.tree.merge({"a": {"x": 1}}, {"a": {"y": 2}})
        {'a': {'x': 1, 'y': 2}}
    """
    merged: Any = {}
    for tree in trees:
        merged = _merged(merged, tree, overwrite, is_leaf or (lambda _: False), "")
    return merged


def _merged(into: Any, tree: Any, overwrite: bool, is_leaf: Any, place: str) -> Any:
    if not isinstance(into, dict) or not isinstance(tree, dict) or is_leaf(into) or is_leaf(tree):
        if not overwrite:
            raise ValueError(
                f"{place or 'the root'}: two trees have a value here; overwrite=True takes the later"
            )
        return tree
    merged = dict(cast(dict[Any, Any], into))
    for key, child in cast(dict[Any, Any], tree).items():
        if key in merged:
            child = _merged(merged[key], child, overwrite, is_leaf, f"{place}/{key}")
        merged[key] = child
    return merged


__all__ = [
    "AbstractLeaf",
    "JsonType",
    "Leaf",
    "PyTree",
    "PyTreeKey",
    "PyTreeKeyPath",
    "PyTreeOf",
    "merge",
]
