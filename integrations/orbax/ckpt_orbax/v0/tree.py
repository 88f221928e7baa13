"""Pytrees as flat dicts, and as nested dicts and lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax

from ckpt_orbax._plain import filled, leaves_of, orbax_form, plain


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """The leaves of a pytree by path: tuples of text, or with ``sep`` texts.

    Args:
        tree: any pytree.
        sep: what joins the parts of a path.
        keep_empty_nodes: whether None and empty containers are leaves.
        is_leaf: says what is a leaf; instead of ``keep_empty_nodes``.

    Example:
        >>> import ckpt_orbax as ocp
        >>> ocp.tree.to_flat_dict({"foo": 1, "bar": {"a": 2, "b": {}}}, sep="/")
        {'bar/a': 2, 'foo': 1}
    """
    if is_leaf is None and keep_empty_nodes:
        is_leaf = _is_empty
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    named = {tuple(map(_part, path)): leaf for path, leaf in found}
    return named if sep is None else {sep.join(path): leaf for path, leaf in named.items()}


def _is_empty(node: Any) -> bool:
    return not jax.tree_util.all_leaves([node]) and not jax.tree.leaves(
        node, is_leaf=lambda child: child is not node
    )


def _part(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def from_flat_dict(flat_dict: dict[Any, Any], target: Any = None, sep: str | None = None) -> Any:
    """The inverse of ``to_flat_dict``: nested dicts, or the structure of ``target``.

    Args:
        flat_dict: leaves by path.
        target: a pytree with these paths.
        sep: what joins the parts of a path.

    Raises:
        KeyError: ``target`` has a leaf whose path is not in ``flat_dict``.
    """
    by_path = flat_dict
    if sep is not None:
        by_path = {tuple(str(path).split(sep)): leaf for path, leaf in flat_dict.items()}
    if target is not None:
        leaves = leaves_of(target)
        return filled(target, {path: by_path[tuple(map(str, path))] for path in leaves})
    nested: dict[str, Any] = {}
    for path, leaf in by_path.items():
        inside = nested
        for part in path[:-1]:
            inside = inside.setdefault(part, {})
        inside[path[-1]] = leaf
    return nested


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """A pytree as nested dicts and lists, as it is stored.

    Args:
        tree: any pytree.
        keep_empty_nodes: whether None and empty containers stay.
    """
    stored = orbax_form(plain(tree))
    return stored if keep_empty_nodes else _without_empty(stored)


def _without_empty(node: Any) -> Any:
    if isinstance(node, dict):
        pairs = cast(dict[str, Any], node).items()
        return {key: _without_empty(child) for key, child in pairs if jax.tree.leaves(child)}
    if isinstance(node, list):
        return [_without_empty(child) for child in cast(list[Any], node)]
    return node


__all__ = ["from_flat_dict", "serialize_tree", "to_flat_dict"]
