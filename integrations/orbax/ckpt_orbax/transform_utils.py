"""Trees out of several trees; transformations by patterns and functions are refused."""

from __future__ import annotations

from typing import Any

from ckpt_orbax.v0.leaf_args import RestoreArgs
from ckpt_orbax.v0.tree import from_flat_dict, to_flat_dict


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """The leaves of all trees; where several have one, that of the last.

    Args:
        *trees: any pytrees.
        target: a pytree of the structure that is wanted; None for nested dicts.
    """
    flat = [to_flat_dict(tree) for tree in trees]
    merged = {path: leaf for tree in flat for path, leaf in tree.items()}
    return from_flat_dict(merged, target=target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """The leaves that all trees have, with the values of the last one.

    Args:
        *trees: any pytrees.
        target: a pytree of the structure that is wanted; None for nested dicts.

    Example:
        >>> from ckpt_orbax import transform_utils
        >>> transform_utils.intersect_trees({"a": 1, "b": 2}, {"b": 3, "c": 4})
        {'b': 3}
    """
    flat = [to_flat_dict(tree) for tree in trees]
    shared = [path for path in flat[-1] if all(path in other for other in flat)]
    return from_flat_dict({path: flat[-1][path] for path in shared}, target=target)


__all__ = ["RestoreArgs", "intersect_trees", "merge_trees"]
