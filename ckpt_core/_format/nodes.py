"""The structure of a tree as a flat list of nodes, depth first: the nesting of JSON stays small."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from ckpt_core._tree import LEAF, MAX_DEPTH, NONE, Node, Path

_KINDS = frozenset({"dict", "ordered", "list", "tuple", "namedtuple", "dataclass", "custom"})
_MOST_CHILDREN = 2**40
_KEY_TYPES = frozenset({str, int})


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
    try:
        root, stop = _load_node(tokens, 0, (), paths)
    except IndexError:
        raise ValueError("the structure has fewer nodes than its root holds") from None
    if stop != len(tokens):
        raise ValueError("the structure has more nodes than its root holds")
    return root


def _load_node(tokens: list[Any], at: int, path: Path, paths: list[Path]) -> tuple[Node, int]:
    """The node that begins at a position, and the position after its last child."""
    token = tokens[at]
    if token == 0:
        paths.append(path)
        return LEAF, at + 1
    if token is None:
        return NONE, at + 1
    if len(path) > MAX_DEPTH:
        raise ValueError(f"the structure is nested more than {MAX_DEPTH} levels deep")
    kind, type_name, keys = token
    entries = _entries(kind, keys)
    at += 1
    count = len(entries)
    # most containers hold leaves only, thousands of them at times: nothing is done for each
    all_there = at + count <= len(tokens) and tokens[at : at + 1] == [0]
    if all_there and tokens[at : at + count].count(0) == count:
        paths += zip(*map(repeat, path), entries, strict=False)
        return Node(kind, tuple(entries), (LEAF,) * count, str(type_name)), at + count
    children: list[Node] = []
    for key in entries:
        if tokens[at] == 0:
            paths.append((*path, key))
            children.append(LEAF)
            at += 1
        else:
            child, at = _load_node(tokens, at, (*path, key), paths)
            children.append(child)
    return Node(kind, tuple(entries), tuple(children), str(type_name)), at


def _entries(kind: str, keys: Any) -> Sequence[str | int]:
    """The keys of a container, found possible; of a list no more than said, as it may not be true."""
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of container {kind!r}")
    if isinstance(keys, int):
        if type(keys) is not int or not 0 <= keys < _MOST_CHILDREN:
            raise ValueError(f"impossible number of children {keys!r}")
        return range(keys)
    entries = tuple(keys)
    if not _KEY_TYPES.issuperset(map(type, entries)):
        wrong = next(key for key in entries if type(key) not in _KEY_TYPES)
        raise ValueError(f"impossible key {wrong!r}")
    return entries
