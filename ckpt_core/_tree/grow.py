"""Puts one tree together from parts that have different leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpt_core._tree.flatten import Key, Node, Path

_DICTS = ("dict", "ordered")


class GrownTree:
    """A tree that grows by parts; dictionaries at the same path are joined, everything else comes whole."""

    def __init__(self) -> None:
        self._top: _Part | None = None

    def clash(self, root: Node) -> Path | None:
        """The first path at which a part has what is there already, or another container; None: it fits."""
        return None if self._top is None else _clash(self._top, root, ())

    def add(self, root: Node, leaves: Sequence[Any]) -> None:
        """Adds a part that ``clash`` says fits; ``leaves`` are in the order of its structure."""
        left = iter(leaves)
        if self._top is None:
            self._top = _Part(root, left)
        else:
            self._top.join(root, left)

    def whole(self) -> tuple[Node, list[Any]]:
        """The structure of all parts together, and all leaves in its order."""
        assert self._top is not None
        leaves: list[Any] = []
        return self._top.whole(leaves), leaves


class _Part:
    """A node of the grown tree; takes its own leaves from ``left``."""

    __slots__ = ("children", "leaves", "node")

    def __init__(self, node: Node, left: Iterator[Any]) -> None:
        self.node = node
        self.leaves: list[Any] = []
        self.children: dict[Key, _Part] = {}
        if node.kind in _DICTS:
            self.join(node, left)
        else:
            self.leaves += itertools.islice(left, _leaf_count(node))

    def join(self, node: Node, left: Iterator[Any]) -> None:
        for key, child in zip(node.keys, node.children, strict=True):
            here = self.children.get(key)
            if here is None:
                self.children[key] = _Part(child, left)
            else:
                here.join(child, left)

    def whole(self, leaves: list[Any]) -> Node:
        leaves += self.leaves
        if self.node.kind not in _DICTS:
            return self.node
        children = tuple(child.whole(leaves) for child in self.children.values())
        return replace(self.node, keys=tuple(self.children), children=children)


def _clash(part: _Part, node: Node, path: Path) -> Path | None:
    alike = (part.node.kind, part.node.type_name) == (node.kind, node.type_name)
    if node.kind not in _DICTS or not alike:
        return path
    for key, child in zip(node.keys, node.children, strict=True):
        here = part.children.get(key)
        found = None if here is None else _clash(here, child, (*path, key))
        if found is not None:
            return found
    return None


def _leaf_count(node: Node) -> int:
    return 1 if node.kind == "leaf" else sum(map(_leaf_count, node.children))
