"""The structure of a tree of which a part was selected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ckpt_core._load import functions
from ckpt_core._tree import LEAF, Key, Node


def pruned(root: Node, keep: set[int]) -> Node | None:
    """The structure without the leaves that were not selected; None where nothing is left.

    Args:
        root: of the whole tree.
        keep: positions of the selected leaves.
    """
    return _pruned(root, itertools.count(), keep)


def _pruned(node: Node, counter: Iterator[int], keep: set[int]) -> Node | None:
    """The structure without the leaves that were not selected; None where nothing is left."""
    count = len(node.children)
    if count and node.children[0] is LEAF and node.children.count(LEAF) == count:
        # nothing is done for each leaf
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
        if child.kind == "leaf":  # most nodes are: no call for each
            kept = child if next(counter) in keep else None
        else:
            kept = _pruned(child, counter, keep)
        if kept is not None:
            left.append((key, kept))
    return _remaining(node, left)


def _remaining(node: Node, left: list[tuple[Key, Node]]) -> Node | None:
    """A container of what is left of its children."""
    if len(left) == len(node.children) and not functions.wraps_any(node):
        return replace(node, children=tuple(child for _, child in left), make=None)
    if not any(child.kind != "none" for _, child in left):
        return None
    # a tuple with holes is none: what is left of it is named by position
    kind = node.kind if node.kind in ("dict", "ordered") else "dict"
    return Node(kind, tuple(key for key, _ in left), tuple(child for _, child in left))
