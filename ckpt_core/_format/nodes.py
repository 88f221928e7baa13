"""The structure of a tree as a flat list of nodes, depth first: the nesting of JSON stays small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_core._tree import LEAF, MAX_DEPTH, NONE, Node, Path

_KINDS = frozenset({"dict", "ordered", "list", "tuple", "namedtuple", "dataclass", "custom"})
_MOST_CHILDREN = 2**40


def dump_nodes(root: Node) -> list[Any]:
    """The structure as a flat list: 0 for a leaf, None for None, else kind, class, keys."""
    out: list[Any] = []
    _dump_node(root, out)
    return out


def _dump_node(node: Node, out: list[Any]) -> None:
    if node.kind == "leaf":
        out.append(0)
    elif node.kind == "none":
        out.append(None)
    elif node.kind == "expanded":
        _dump_node(node.children[0], out)
    else:
        keys = len(node.keys) if node.kind in ("list", "tuple") else node.keys
        out.append([node.kind, node.type_name, keys])
        for child in node.children:
            _dump_node(child, out)


def load_nodes(tokens: list[Any], paths: list[Path]) -> Node:
    """The structure that ``dump_nodes`` flattened; the leaves' paths are appended to ``paths``."""
    stream = iter(tokens)
    root = _load_node(next(stream, ""), stream, (), paths)
    if next(stream, paths) is not paths:
        raise ValueError("the structure has more nodes than its root holds")
    return root


def _load_node(token: Any, stream: Iterator[Any], path: Path, paths: list[Path]) -> Node:
    if token == 0:
        paths.append(path)
        return LEAF
    if token is None:
        return NONE
    if len(path) > MAX_DEPTH:
        raise ValueError(f"the structure is nested more than {MAX_DEPTH} levels deep")
    kind, type_name, keys = token
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of container {kind!r}")
    if isinstance(keys, int):
        if type(keys) is not int or not 0 <= keys < _MOST_CHILDREN:
            raise ValueError(f"impossible number of children {keys!r}")
        keys = range(keys)
    children: list[Node] = []
    entries: list[str | int] = []
    for key in keys:
        if type(key) is not str and type(key) is not int:
            raise ValueError(f"impossible key {key!r}")
        entries.append(key)
        token = next(stream, "")
        if token == 0:  # most nodes are leaves: no call for each
            paths.append((*path, key))
            children.append(LEAF)
        else:
            children.append(_load_node(token, stream, (*path, key), paths))
    return Node(kind, tuple(entries), tuple(children), str(type_name))
