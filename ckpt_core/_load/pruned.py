"""The structure of a pytree after ``only=`` has selected some of its leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ckpt_core._load import functions
from ckpt_core._tree import LEAF, Key, Node


def pruned(root: Node, keep: set[int]) -> Node | None:
    """The structure with only the selected leaves; None if none is left.

    Args:
        root: structure of the whole pytree.
        keep: positions of the selected leaves.
    """
    return _pruned(root, itertools.count(), keep)


def _pruned(node: Node, counter: Iterator[int], keep: set[int]) -> Node | None:
    """As ``pruned``, for a node below the root; ``counter`` gives the position of the next leaf."""
    count = len(node.children)
    if count and node.children[0] is LEAF and node.children.count(LEAF) == count:
        # all children are leaves: select them by set operations, not by a step for each leaf
        own = list(itertools.islice(counter, count))
        if keep.isdisjoint(own):
            return None
        here = sorted(keep.intersection(own))
        return _remaining(node, [(node.keys[position - own[0]], LEAF) for position in here])
    if node.kind == "leaf":
        return node if next(counter) in keep else None
    if node.kind == "expanded":
        return _pruned(node.children[0], counter, keep)
    if not node.children:
        return node if node.kind == "none" else None
    left: list[tuple[Key, Node]] = []
    for key, child in zip(node.keys, node.children, strict=True):
        if child.kind == "leaf":  # the most frequent case: spares a call
            kept = child if next(counter) in keep else None
        else:
            kept = _pruned(child, counter, keep)
        if kept is not None:
            left.append((key, kept))
    return _remaining(node, left)


def _remaining(node: Node, left: list[tuple[Key, Node]]) -> Node | None:
    """The container with the children that are left; None if none of them has a leaf."""
    if len(left) == len(node.children) and not functions.wraps_any(node):
        return replace(node, children=tuple(child for _, child in left), make=None)
    if not any(child.kind != "none" for _, child in left):
        return None
    # a sequence with gaps becomes a dict, in which the old positions are the keys
    kind = node.kind if node.kind in ("dict", "ordered") else "dict"
    return Node(kind, tuple(key for key, _ in left), tuple(child for _, child in left))
