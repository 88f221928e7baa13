"""Tree structures as flat lists of nodes in depth-first order, so that the JSON is not nested."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from ckpt_core._tree import (
    LEAF,
    MAX_DEPTH,
    NONE,
    Key,
    Node,
    Path,
    checked_static,
    is_plain_tuple,
    leaf_below,
)

_KINDS = frozenset(
    {"dict", "ordered", "list", "tuple", "namedtuple", "dataclass", "custom", "code"}
)
_MOST_CHILDREN = 2**40
_KEY_TYPES = frozenset({str, int})


def dump_nodes(root: Node) -> list[Any]:
    """The structure as a flat list: 0 for a leaf, None for None, else ``[kind, class, keys]``.

    Lists and tuples have their length instead of keys. A leaf wrapped in ``Below`` is its key; any
    other node wrapped so follows after ``["below", key, 1]``.

    Example:
        >>> from ckpt_core._format.treedef import dump_nodes
        >>> from ckpt_core._tree import flatten
        >>> dump_nodes(flatten({"w": 1.5, "layers": [2, None]}).root)
        [['dict', '', ('w', 'layers')], 0, ['list', '', 2], 0, None]
    """
    out: list[Any] = []
    _dump_node(root, out)
    return out


def dump_statics(root: Node) -> list[Any]:
    """The static fields of nodes: entries ``[index of the node in the flat list, JSON value]``."""
    found: list[Any] = []
    _dump_statics(root, 0, found)
    return found


def _dump_statics(node: Node, at: int, found: list[Any]) -> int:
    """Appends those of a node and all nodes below it; returns the index after the last node."""
    if node.kind == "expanded":
        return _dump_statics(node.children[0], at + (1 if node.type_name else 0), found)
    if node.static:
        found.append([at, json.loads(node.static)])
    count = len(node.children)
    if count and node.children.count(node.children[0]) == count and node.children[0].kind == "leaf":
        return at + 1 + count
    at += 1
    for child in node.children:
        at = at + 1 if child is LEAF else _dump_statics(child, at, found)
    return at


def _dump_node(node: Node, out: list[Any]) -> None:
    if node.kind == "leaf":
        out.append(node.type_name or 0)
    elif node.kind == "none":
        out.append(None)
    elif node.kind == "expanded":
        if node.type_name:
            out.append(["below", node.type_name, 1])
        _dump_node(node.children[0], out)
    else:
        keys = len(node.keys) if node.kind in ("list", "tuple") else node.keys
        out.append([node.kind, node.type_name, keys])
        for child in node.children:
            _dump_node(child, out)


def load_nodes(tokens: list[Any], paths: list[Path], statics: Sequence[Any] = ()) -> Node:
    """The structure that ``dump_nodes`` wrote; appends the paths of its leaves to ``paths``.

    Raises:
        ValueError, TypeError: ``dump_nodes`` never writes these tokens.
    """
    known = {at: checked_static(static) for at, static in statics}
    for at in known:
        if type(at) is not int or not 0 <= at < len(tokens) or not _is_custom(tokens[at]):
            raise ValueError(f"static fields of {at!r}, which is no registered class")
    try:
        root, stop = _load_node(tokens, 0, (), paths, known, {})
    except IndexError:
        raise ValueError("the structure has fewer nodes than its root holds") from None
    if stop != len(tokens):
        raise ValueError("the structure has more nodes than its root holds")
    return root


def _is_custom(token: Any) -> bool:
    return isinstance(token, list) and token[:1] == ["custom"]


def _load_node(
    tokens: list[Any],
    at: int,
    path: Path,
    paths: list[Path],
    statics: Mapping[int, str],
    known: dict[Any, Node],
) -> tuple[Node, int]:
    """The node that begins at index ``at``, and the index after its last child.

    ``known`` gets the nodes that hold only leaves: those of a model's layers are equal, and become one.
    """
    token = tokens[at]
    if token == 0 or type(token) is str:
        paths.append(path)
        return (leaf_below(token) if token else LEAF), at + 1
    if token is None:
        return NONE, at + 1
    if len(path) > MAX_DEPTH:
        raise ValueError(f"the structure is nested more than {MAX_DEPTH} levels deep")
    kind, type_name, keys = token
    if kind == "below":
        child, at = _load_node(tokens, at + 1, path, paths, statics, known)
        return Node("expanded", (), (child,), str(type_name)), at
    entries = _entries(kind, keys)
    static = statics.get(at, "") if statics else ""
    at += 1
    count = len(entries)
    # Most containers have only leaves, sometimes thousands: handle those without a Python loop.
    first = tokens[at] if count and at + count <= len(tokens) else None
    is_leaf = first == 0 or type(first) is str
    if is_leaf and tokens[at : at + count].count(first) == count:
        paths += zip(*map(repeat, path), entries, strict=False)
        same = kind, str(type_name), tuple(entries), static, first
        node = known.get(same)
        if node is None:
            children = (leaf_below(first) if first else LEAF,) * count
            node = known[same] = Node(kind, same[2], children, same[1], None, static)
        return node, at + count
    below: list[Node] = []
    for key in entries:
        if tokens[at] == 0:
            paths.append((*path, key))
            below.append(LEAF)
            at += 1
        else:
            child, at = _load_node(tokens, at, (*path, key), paths, statics, known)
            below.append(child)
    return Node(kind, tuple(entries), tuple(below), str(type_name), None, static), at


def _entries(kind: str, keys: Any) -> Sequence[Key]:
    """The keys of a container, validated; a lazy range for sequences, whose length may be false."""
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of container {kind!r}")
    if kind == "code" and keys:
        raise ValueError("a function has no children")
    if isinstance(keys, int):
        if type(keys) is not int or not 0 <= keys < _MOST_CHILDREN:
            raise ValueError(f"impossible number of children {keys!r}")
        return range(keys)
    entries: tuple[Key, ...] = tuple(keys)
    if list in map(type, entries):  # JSON has no tuples
        entries = tuple(map(_key, entries))
    if not _KEY_TYPES.issuperset(map(type, entries)):
        wrong = [key for key in entries if type(key) not in _KEY_TYPES and not is_plain_tuple(key)]
        if wrong:
            raise ValueError(f"impossible key {wrong[0]!r}")
    return entries


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, list) else value
