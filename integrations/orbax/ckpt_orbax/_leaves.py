"""Leaves of pytrees, what Orbax takes and what a target may hold; and pytrees as Orbax stores them, with text keys.

Orbax keeps the names of nodes and not their types: a NamedTuple, a dataclass or an ``nnx.State`` becomes a dictionary, an
empty one None. Trees get this form before they are saved and as targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from ckpt_core import LeafInfo

PLACEHOLDER = ...
"""In a target: leave this leaf out."""

_CONCRETE = (jax.Array, np.ndarray, int, float, np.number, np.bool_, str)
ZEROS: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False}
"""For each kind of Python number, one that stands for any."""


@dataclass(frozen=True)
class AbstractArray:
    """Shape and dtype of a numpy array."""

    shape: tuple[int, ...] | None
    dtype: Any


def is_leaf(value: Any) -> bool:
    """Whether Orbax saves this value as a leaf."""
    return isinstance(value, _CONCRETE)


def is_abstract_leaf(value: Any) -> bool:
    """Whether this value can stand in a target."""
    if isinstance(value, type):
        return issubclass(value, (int, float, str, np.generic))
    array = hasattr(value, "shape") and hasattr(value, "dtype")
    return array or value is PLACEHOLDER or is_leaf(value)


def converted(value: Any, dtype: Any) -> Any:
    """An array in another dtype; other leaves as they are."""
    if dtype is None or not hasattr(value, "dtype") or is_key(value):
        return value
    return value if value.dtype == dtype else value.astype(dtype)


def is_key(value: Any) -> bool:
    """Whether an array or its description is of random keys."""
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def saved_dtype(leaf: LeafInfo) -> Any:
    """The dtype of a saved array or key; None without one."""
    if leaf.kind == "key":
        return jax.eval_shape(lambda: jax.random.key(0, impl=leaf.dtype)).dtype
    return np.dtype(leaf.dtype) if leaf.dtype else None


def as_sharding(given: Any) -> Any:
    """A sharding of jax, also out of the sharding of a metadata or a ``Format``."""
    convert = getattr(given, "to_jax_sharding", None)
    return given if convert is None else convert()


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Shape, dtype and sharding of an array or random key, as a target of ``load``; a number is its own target.

    Args:
        dtype, scalar_dtype: instead of the array's; a type of number, for numbers.
        support_format: accepted; a target's layout in memory is of no effect.
    """
    if isinstance(arr, (int, float, np.number)):
        return arr if scalar_dtype is None else scalar_dtype(arr)
    sharding = as_sharding(getattr(arr, "sharding", None))
    return jax.ShapeDtypeStruct(arr.shape, arr.dtype if dtype is None else dtype, sharding=sharding)


Path = tuple[str | int, ...]
"""Path of a leaf: text for a name, int for a position."""
Change = Callable[[Path, Any], Any]
"""What replaces a leaf, by path and value."""


def plain(node: Any, change: Change = lambda _, leaf: leaf, path: Path = ()) -> Any:
    """The tree with dicts, lists, tuples and None for containers; ``change`` may replace each leaf."""
    if node is None:
        return None
    kind = type(node)
    if kind is dict:
        return _named(node.items(), path, change)
    if kind in (list, tuple):
        return kind(plain(child, change, (*path, i)) for i, child in enumerate(node))
    pairs = one_level(node)
    if pairs is None:
        return change(path, node)
    if not pairs:
        return {} if isinstance(node, dict) else None
    if all(isinstance(key, _POSITIONS) for key, _ in pairs):
        return [plain(child, change, (*path, i)) for i, (_, child) in enumerate(pairs)]
    return _named(((key_name(key), child) for key, child in pairs), path, change)


def _named(pairs: Any, path: Path, change: Change) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, child in pairs:
        name = str(key)
        if name in named:
            raise ValueError(
                f"{path_text(path)}: two keys are {name!r} as text: rename one of them"
            )
        named[name] = plain(child, change, (*path, name))
    return named


def one_level(node: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) of each child of a pytree node, None among them; None for a leaf."""
    found, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda one: one is not node)
    return None if treedef == _LEAF else [(path[0], child) for path, child in found]


_LEAF = jax.tree_util.tree_structure(0)
_POSITIONS = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)


def key_name(key: Any) -> str:
    """The text of one key of jax's paths."""
    return jax.tree_util.keystr((key,), simple=True)


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
    return jax.tree.map_with_path(lambda path, _: values[tuple(map(_entry, path))], target)


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
