"""Pytrees as Orbax stores them: nested dictionaries and lists, with text keys and named leaves.

Orbax keeps the names of a tree's nodes and not their types: a NamedTuple, a dataclass or an ``nnx.State`` becomes a
dictionary, an empty one None. Trees get this form before they are saved and as targets, as Orbax's own do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax

Path = tuple[str | int, ...]
"""Path of a leaf: text for a name, int for a position."""


def plain(tree: Any, change: Callable[[Path, Any], Any] | None = None) -> Any:
    """The tree with dicts, lists, tuples and None for containers; ``change`` may replace each leaf, by path and value."""
    return _plain(tree, (), change or (lambda _, leaf: leaf))


def _plain(node: Any, path: Path, change: Callable[[Path, Any], Any]) -> Any:
    if node is None:
        return None
    kind = type(node)
    if kind is dict:
        return _named(((key, value) for key, value in node.items()), path, change)
    if kind in (list, tuple):
        children = (_plain(child, (*path, i), change) for i, child in enumerate(node))
        return list(children) if kind is list else tuple(children)
    pairs = one_level(node)
    if pairs is None:
        return change(path, node)
    if not pairs:
        return kind() if kind in (dict, list, tuple) else ({} if isinstance(node, dict) else None)
    if all(isinstance(key, _POSITIONS) for key, _ in pairs):
        return [_plain(child, (*path, i), change) for i, (_, child) in enumerate(pairs)]
    return _named(((key_name(key), child) for key, child in pairs), path, change)


def _named(pairs: Any, path: Path, change: Callable[[Path, Any], Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, child in pairs:
        name = str(key)
        if name in named:
            raise ValueError(
                f"{path_text(path)}: two keys are {name!r} as text: rename one of them"
            )
        named[name] = _plain(child, (*path, name), change)
    return named


def one_level(node: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) of each child of a pytree node, None among them; None for a leaf."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return None if structure == _LEAF else [(path[0], child) for path, child in found]


_LEAF = jax.tree_util.tree_structure(0)
_POSITIONS = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)


def key_name(key: Any) -> str:
    """The text of one key of jax's paths."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def orbax_form(tree: Any) -> Any:
    """A loaded tree as Orbax returns it without a target: tuples are lists, int keys are text."""
    return _lists(plain(tree))


def _lists(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _lists(child) for key, child in cast(dict[str, Any], node).items()}
    if isinstance(node, (list, tuple)) and node:
        return [_lists(child) for child in cast(list[Any], node)]
    return node


def leaves_of(tree: Any) -> dict[Path, Any]:
    """The leaves of a plain tree by path."""
    found: dict[Path, Any] = {}
    plain(tree, found.setdefault)
    return found


def filled(target: Any, values: dict[Path, Any]) -> Any:
    """``target``, an arbitrary pytree, with each leaf replaced by the value at its path."""
    found, structure = jax.tree_util.tree_flatten_with_path(target)
    order = [tuple(_entry(key) for key in path) for path, _ in found]
    return jax.tree_util.tree_unflatten(structure, [values[path] for path in order])


def _entry(key: Any) -> str | int:
    if isinstance(key, _POSITIONS):
        return int(key_name(key))
    return key_name(key)


def path_text(path: Path) -> str:
    """A path as ckpt writes it: entries joined with "/", which is "~1" inside an entry."""
    if not path:
        return "(root)"
    return "/".join(str(entry).replace("~", "~0").replace("/", "~1") for entry in path)


def is_empty(tree: Any) -> bool:
    """Whether the tree is a container without anything inside."""
    return not jax.tree.leaves(tree, is_leaf=lambda node: node is None)
