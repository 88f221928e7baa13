"""Puts one tree together from parts that have different leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpt_core._tree.flatten import Key, Node, Path

_DICTS = ("dict", "ordered")


class GrownTree:
    """A tree that grows by parts; dictionaries at the same path are joined, everything else comes whole."""

    def __init__(self) -> None:
        # at the path of each dictionary and of each node that came whole: the keys of the one, the leaves of the other
        self._nodes: dict[Path, tuple[Node, dict[Key, None], list[Any]]] = {}

    def clash(self, root: Node) -> Path | None:
        """The first path at which a part has what is there already, or another container; None: it fits."""
        for path, node, _ in _nodes(root, ()):
            there = self._nodes[path][0] if path in self._nodes else node
            alike = (there.kind, there.type_name) == (node.kind, node.type_name)
            if path in self._nodes and (node.kind not in _DICTS or not alike):
                return path
        return None

    def add(self, root: Node, leaves: Sequence[Any]) -> None:
        """Adds a part that ``clash`` says fits; ``leaves`` are in the order of its structure."""
        for path, node, own in _nodes(root, leaves):
            self._nodes.setdefault(path, (node, {}, own))
            if path:
                self._nodes[path[:-1]][1][path[-1]] = None

    def whole(self) -> tuple[Node, list[Any]]:
        """The structure of all parts together, and all leaves in its order."""
        leaves: list[Any] = []
        return self._whole((), leaves), leaves

    def _whole(self, path: Path, leaves: list[Any]) -> Node:
        node, keys, own = self._nodes[path]
        leaves += own
        if node.kind not in _DICTS:
            return node
        children = tuple(self._whole((*path, key), leaves) for key in keys)
        return replace(node, keys=tuple(keys), children=children)


def _nodes(root: Node, leaves: Iterable[Any]) -> Iterator[tuple[Path, Node, list[Any]]]:
    """Path and node of each dictionary, and of each other node in one, with its leaves; parents first."""
    left = iter(leaves)
    waiting: list[tuple[Path, Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        is_dict = node.kind in _DICTS
        yield path, node, [] if is_dict else [*itertools.islice(left, _leaf_count(node))]
        if is_dict:
            inside = zip(node.keys, node.children, strict=True)
            waiting += [((*path, key), child) for key, child in inside][::-1]


def _leaf_count(node: Node) -> int:
    return 1 if node.kind == "leaf" else sum(map(_leaf_count, node.children))
