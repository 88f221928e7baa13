"""Pytrees as flat dicts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ckpt_orbax._leaves import filled, key_name, leaves_of, one_level


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """The leaves of a pytree by path: tuples of text, or with ``sep`` texts that are joined by it.

    Args:
        keep_empty_nodes: whether None and empty containers are leaves.
        is_leaf: says what is a leaf; instead of ``keep_empty_nodes``.

    Example:
        >>> import ckpt_orbax as ocp
        >>> ocp.tree.to_flat_dict({"foo": 1, "bar": {"a": 2, "b": {}}}, sep="/")
        {'bar/a': 2, 'foo': 1}
    """
    if is_leaf is None and keep_empty_nodes:
        found = jax.tree.leaves_with_path(tree, is_leaf=lambda node: one_level(node) == [])
    else:
        found = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    named = {tuple(map(key_name, path)): leaf for path, leaf in found}
    return named if sep is None else {sep.join(path): leaf for path, leaf in named.items()}


def from_flat_dict(flat_dict: dict[Any, Any], target: Any = None, sep: str | None = None) -> Any:
    """The inverse of ``to_flat_dict``: nested dicts, or the structure of ``target``, a pytree with these paths.

    Raises:
        KeyError: ``target`` has a leaf whose path is not in ``flat_dict``.
    """
    by_path = flat_dict
    if sep is not None:
        by_path = {tuple(str(path).split(sep)): leaf for path, leaf in flat_dict.items()}
    if target is not None:
        leaves = {path: by_path[tuple(map(str, path))] for path in leaves_of(target)}
        return filled(target, leaves)
    if () in by_path:
        return by_path[()]
    nested: dict[str, Any] = {}
    for path, leaf in by_path.items():
        inside = nested
        for part in path[:-1]:
            inside = inside.setdefault(part, {})
        inside[path[-1]] = leaf
    return nested


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """The leaves that all trees have, with the values of the last one, in the structure of ``target`` or nested dicts.

    Example:
        >>> from ckpt_orbax import transform_utils
        >>> transform_utils.intersect_trees({"a": 1, "b": 2}, {"b": 3, "c": 4})
        {'b': 3}
    """
    flat = [to_flat_dict(tree) for tree in trees]
    shared = [path for path in flat[-1] if all(path in other for other in flat)]
    return from_flat_dict({path: flat[-1][path] for path in shared}, target=target)
