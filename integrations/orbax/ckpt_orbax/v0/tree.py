"""Pytrees as flat dicts, and as nested dicts and lists; trees out of several trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax

from ckpt_orbax._plain import filled, key_name, leaves_of, one_level, orbax_form, plain
from ckpt_orbax.v1.arrays import to_shape_dtype_struct

PyTree = PyTreeOf = Any
PyTreeKey = Any
PyTreePath = tuple[Any, ...]
JsonType = Any


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
        is_leaf = is_empty_node
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    named = {tuple(map(key_name, path)): leaf for path, leaf in found}
    return named if sep is None else {sep.join(path): leaf for path, leaf in named.items()}


def is_empty_node(node: Any) -> bool:
    """Whether something is None or a container without children."""
    return not jax.tree_util.all_leaves([node]) and not jax.tree.leaves(
        node, is_leaf=lambda child: child is not node
    )


def from_flat_dict(
    flat_dict: dict[Any, Any],
    target: Any = None,
    sep: str | None = None,
    *,
    inplace: bool = False,
) -> Any:
    """The inverse of ``to_flat_dict``: nested dicts, or the structure of ``target``.

    Args:
        flat_dict: leaves by path.
        target: a pytree with these paths.
        sep: what joins the parts of a path.
        inplace: take what is used out of ``flat_dict``, which frees memory.

    Raises:
        KeyError: ``target`` has a leaf whose path is not in ``flat_dict``.
    """
    by_path = flat_dict
    if sep is not None:
        by_path = {tuple(str(path).split(sep)): leaf for path, leaf in flat_dict.items()}
    if target is not None:
        leaves = {path: by_path[tuple(map(str, path))] for path in leaves_of(target)}
        if inplace:
            for path in leaves:
                named = tuple(map(str, path))
                del flat_dict[named if sep is None else sep.join(named)]
        return filled(target, leaves)
    if inplace:
        by_path = dict(by_path)
        flat_dict.clear()
    if () in by_path:
        return by_path[()]
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


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """The values of nested dicts and lists, in the structure of ``target``.

    Args:
        serialized: of ``serialize_tree``.
        target: any pytree with these paths.
        keep_empty_nodes: take the value at an empty node, too, instead of leaving the node.

    Raises:
        KeyError, IndexError: ``target`` has a leaf that ``serialized`` lacks.
    """

    def value_at(path: Any, _: Any) -> Any:
        node = serialized
        for key in path:
            name = get_key_name(key)
            if isinstance(node, dict) and name not in node:
                name = str(name)
            node = node[name]
        return node

    is_leaf = is_empty_node if keep_empty_nodes else None
    return jax.tree_util.tree_map_with_path(value_at, target, is_leaf=is_leaf)


def get_key_name(key: Any) -> int | str:
    """The name or the position in one key of jax's paths.

    Raises:
        ValueError: it is no such key.
    """
    tree_util = jax.tree_util
    if isinstance(key, tree_util.SequenceKey):
        return key.idx
    if isinstance(key, tree_util.DictKey):
        return str(key.key)
    if isinstance(key, tree_util.GetAttrKey):
        return key.name
    if isinstance(key, tree_util.FlattenedIndexKey):
        return key.key
    raise ValueError(f"Unsupported KeyEntry: {type(key)}: {key!r}: it is no key of a path of jax")


def str_keypath(keypath: Any) -> tuple[str, ...]:
    """The names in a path of jax."""
    return tuple(str(get_key_name(key)) for key in keypath)


def get_param_names(item: Any, *, include_empty_nodes: bool = True) -> Any:
    """A tree with the path of each leaf, joined by dots, in its place."""
    is_leaf = is_empty_node if include_empty_nodes else None
    return jax.tree_util.tree_map_with_path(
        lambda path, _: ".".join(str_keypath(path)), item, is_leaf=is_leaf
    )


def is_flat_dict(tree: Any) -> bool:
    """Whether a tree is a dict of leaves."""
    return isinstance(tree, dict) and all(
        jax.tree_util.all_leaves([value]) for value in cast(dict[Any, Any], tree).values()
    )


class Diff(NamedTuple):
    """Where two trees differ: what the first has there, what the second has; None if nothing."""

    lhs: Any
    rhs: Any


def tree_difference(
    a: Any,
    b: Any,
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    leaves_equal: Callable[[Any, Any], bool] | None = None,
) -> Any:
    """A tree with a ``Diff`` wherever two trees differ; None if they do not.

    Args:
        a, b: trees of the same kind.
        is_leaf: says what is a leaf.
        leaves_equal: says whether two leaves are equal; by default if they are of one type.
    """
    of_leaf = is_leaf or (lambda node: jax.tree_util.all_leaves([node]))
    equal = leaves_equal or (lambda one, other: type(one) is type(other))
    if of_leaf(a) and of_leaf(b):
        return None if equal(a, b) else Diff(a, b)
    if type(a) is not type(b):
        return Diff(type(a), type(b))
    if isinstance(a, (list, tuple)) and len(a) != len(b) and not hasattr(a, "_fields"):
        return Diff((type(a), len(a)), (type(b), len(b)))
    ours, theirs = _children(a), _children(b)
    found: dict[Any, Any] = {}
    for key, child in ours.items():
        if key in theirs:
            diff = tree_difference(child, theirs[key], is_leaf=of_leaf, leaves_equal=equal)
        else:
            diff = Diff(child, None)
        if diff is not None:
            found[key] = diff
    found |= {key: Diff(None, child) for key, child in theirs.items() if key not in ours}
    if not found or isinstance(a, Mapping):
        return found or None
    return _with_children(a, [found.get(key) for key in ours])


def merge_trees(
    *trees: Any, overwrite: bool = False, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """One tree with the leaves of several.

    Args:
        *trees: of the same kinds of containers.
        overwrite: whether the last tree with a leaf at a path gives it, instead of an error.
        is_leaf: says what is a leaf.

    Raises:
        ValueError: two trees have a leaf at the same path, or other containers there.
    """
    of_leaf = is_leaf or (lambda node: node is None or jax.tree_util.all_leaves([node]))
    if not overwrite:
        seen: set[Any] = set()
        for tree in trees:
            paths = set(to_flat_dict(tree, is_leaf=of_leaf))
            if common := seen & paths:
                raise ValueError(
                    f"Found common key paths when overwrite is False: {sorted(common)}"
                )
            seen |= paths
    merged: Any = trees[0] if trees else {}
    for tree in trees[1:]:
        merged = _merged(merged, tree, overwrite, of_leaf)
    return merged


def _merged(old: Any, new: Any, overwrite: bool, is_leaf: Callable[[Any], bool]) -> Any:
    if type(old) is not type(new) and not overwrite:
        raise ValueError(f"Types do not match: {type(new)} and {type(old)}")
    if is_leaf(old) or is_leaf(new):
        return old if new is None else new
    ours, theirs = _children(old), _children(new)
    if isinstance(new, (list, tuple)) and len(ours) != len(theirs):
        raise ValueError(f"Sequence lengths do not match: {len(theirs)} and {len(ours)}")
    found = dict(ours)
    for key, child in theirs.items():
        found[key] = _merged(ours[key], child, overwrite, is_leaf) if key in ours else child
    return (
        found if isinstance(new, Mapping) else _with_children(new, [found[key] for key in theirs])
    )


def _children(node: Any) -> dict[Any, Any]:
    """What is in a container, by name or position."""
    if isinstance(node, Mapping):
        return dict(cast(Mapping[Any, Any], node))
    return dict(one_level(node) or ())


def _with_children(node: Any, children: list[Any]) -> Any:
    """A container like another one, with other children."""
    structure = jax.tree_util.tree_structure(node, is_leaf=lambda child: child is not node)
    return jax.tree_util.tree_unflatten(structure, children)


__all__ = [
    "JsonType",
    "PyTree",
    "PyTreeKey",
    "PyTreeOf",
    "PyTreePath",
    "deserialize_tree",
    "from_flat_dict",
    "get_param_names",
    "is_flat_dict",
    "merge_trees",
    "serialize_tree",
    "str_keypath",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tree_difference",
]
