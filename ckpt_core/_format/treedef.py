"""Tree structures as flat lists of nodes in depth-first order, so that the JSON is not nested."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, cast

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
_TEXT_ONLY = frozenset({str})
_INTS = frozenset({int, bool})
_MOST_CONTAINERS = 2**20
_MOST_LEAVES = 1_500_000
_MOST_PATH_KEYS = 2**25
"""Limit of the keys in the paths of all leaves together: a million leaves 32 levels deep."""
_MOST_PATH_LETTERS = 2**27
"""Limit of the text of these paths, in bytes of memory."""
_MOST_ALIKE = 256


def dump_tree(root: Node) -> tuple[list[Any], list[Any]]:
    """The structure as a flat list of nodes, as in docs/format.md; and the static parts: a list of ``[index in it, JSON value]``."""
    nodes, statics = list[Any](), list[Any]()
    _dump_node(root, nodes, statics)
    return nodes, statics


def _dump_node(node: Node, out: list[Any], statics: list[Any]) -> None:
    if node.kind == "leaf":
        out.append(node.type_name or 0)
    elif node.kind == "none":
        out.append(None)
    elif node.kind == "expanded":
        if node.type_name:
            out.append(["below", node.type_name, 1])
        _dump_node(node.children[0], out, statics)
    else:
        if node.static:
            statics.append([len(out), json.loads(node.static)])
        keys = len(node.keys) if node.kind in ("list", "tuple") else node.keys
        out.append([node.kind, node.type_name, keys])
        for child in node.children:
            if child is LEAF:
                out.append(0)
            else:
                _dump_node(child, out, statics)


class TreeBounds:
    """What the trees of one record may still take, counted before it is made: of few bytes there, each leaf's path repeats all
    keys above it.
    """

    leaves = _MOST_LEAVES
    containers = _MOST_CONTAINERS
    keys = _MOST_PATH_KEYS  # in the paths of all leaves
    letters = _MOST_PATH_LETTERS  # in these keys

    def take(
        self, *, leaves: int = 0, containers: int = 0, keys: int = 0, letters: int = 0
    ) -> None:
        """Raises ValueError if less than so many are left."""
        self.leaves -= leaves
        self.containers -= containers
        self.keys -= keys
        self.letters -= letters
        if self.leaves < 0:
            raise ValueError(f"more than {_MOST_LEAVES} leaves")
        if self.containers < 0:
            raise ValueError(f"more than {_MOST_CONTAINERS} containers")
        if self.keys < 0 or self.letters < 0:
            raise ValueError(
                f"the paths of its leaves have more than {_MOST_PATH_KEYS} keys or {_MOST_PATH_LETTERS} letters"
            )


def load_nodes(
    tokens: list[Any], leaf_count: int, bounds: TreeBounds, statics: Sequence[Any] = ()
) -> tuple[Node, list[Path]]:
    """What ``dump_tree`` wrote, and the paths of its leaves. ValueError or TypeError if it did not, or ``leaf_count`` is another."""
    leaves = tokens.count(0) + list(map(type, tokens)).count(str)
    if leaves > leaf_count:
        raise ValueError(f"{leaves} leaves in the structure, {leaf_count} described")
    bounds.take(containers=len(tokens) - leaves - tokens.count(None))
    told: dict[int, dict[str, Any]] = {}
    for at, static in statics:
        token = tokens[at] if type(at) is int and 0 <= at < len(tokens) else None
        only_compared = static.keys() <= {"constants"}
        if not isinstance(token, list) or (token[:1] != ["custom"] and not only_compared):
            raise ValueError(f"static fields of {at!r}, which is no registered class")
        told[at] = told.get(at, {}) | static  # in version 1, two entries may be of one node
    texts = {
        at: json.dumps(static) if _is_of_ints(static) else checked_static(static)
        for at, static in told.items()
    }
    loading = _Loading(tokens, texts, bounds)
    try:
        root, stop = loading.node(0, (), 0)
    except IndexError:
        raise ValueError("the structure has fewer nodes than its root holds") from None
    if stop != len(tokens):
        raise ValueError("the structure has more nodes than its root holds")
    if leaves < leaf_count:
        raise ValueError(f"{leaves} leaves in the structure, {leaf_count} described")
    if loading.odd_keys:
        _refuse_alike(loading.paths)
    return root, loading.paths


def _is_of_ints(static: dict[str, Any]) -> bool:
    """Whether there are only whole numbers to compare, of which models have thousands."""
    numbers = static.get("constants")
    only = len(static) == 1 and type(numbers) is dict
    return only and _INTS.issuperset(map(type, cast("dict[str, Any]", numbers).values()))


@dataclass
class _Loading:
    """One call of ``load_nodes``; ``known`` are nodes of leaves alone: the equal ones of a model's layers become one."""

    tokens: list[Any]
    statics: Mapping[int, str]
    bounds: TreeBounds
    paths: list[Path] = field(default_factory=list[Path])
    known: dict[Any, Node] = field(default_factory=dict[Any, Node])
    odd_keys: bool = False  # a container has other keys than text and positions

    def node(self, at: int, path: Path, letters: int) -> tuple[Node, int]:
        """The node at index ``at``, and the index after its last child; ``letters`` counts those of the keys in ``path``."""
        tokens, paths, bounds = self.tokens, self.paths, self.bounds
        token = tokens[at]
        if token == 0 or type(token) is str:
            bounds.take(keys=len(path), letters=letters)
            paths.append(path)
            return (leaf_below(token) if token else LEAF), at + 1
        if token is None:
            return NONE, at + 1
        if len(path) > MAX_DEPTH:
            raise ValueError(f"the structure is nested more than {MAX_DEPTH} levels deep")
        kind, type_name, keys = token
        if kind == "below":
            child, at = self.node(at + 1, path, letters)
            return Node("expanded", (), (child,), str(type_name)), at
        entries = _entries(kind, keys)
        count = len(entries)
        if type(entries) is range:
            text = 8 * count
        elif _TEXT_ONLY.issuperset(map(type, entries)):
            joined = "".join(cast("Sequence[str]", entries))
            text = count + len(joined) * (1 if joined.isascii() else 4)
        else:
            text, self.odd_keys = sum(map(letters_of, entries)), True
        static = self.statics.get(at, "") if self.statics else ""
        at += 1
        # Most containers have only leaves, sometimes thousands: handle those without a Python loop.
        first = tokens[at] if count and at + count <= len(tokens) else None
        is_leaf = first == 0 or type(first) is str
        if is_leaf and tokens[at : at + count].count(first) == count:
            bounds.take(keys=count * (len(path) + 1), letters=count * letters + text)
            paths += zip(*map(repeat, path), entries, strict=False)
            same = kind, str(type_name), tuple(entries), static, first
            node = self.known.get(same)
            if node is None:
                children = (leaf_below(first) if first else LEAF,) * count
                node = self.known[same] = Node(kind, same[2], children, same[1], None, static)
            return node, at + count
        below: list[Node] = []
        for key in entries:
            child, at = self.node(at, (*path, key), letters + letters_of(key))
            below.append(child)
        return Node(kind, tuple(entries), tuple(below), str(type_name), None, static), at


def letters_of(key: Any) -> int:
    """How much text a key is, in bytes: Python holds a letter beyond ASCII in up to four."""
    if type(key) is str:
        return 1 + len(key) * (1 if key.isascii() else 4)
    return 8 if type(key) is int and -(2**31) < key < 2**31 else len(str(key))


def _refuse_alike(keys: Sequence[Any]) -> None:
    """Raises ValueError for many keys of one hash, with which a dict takes quadratic time; text cannot be made so."""
    alike = max(Counter(map(hash, keys)).values(), default=0)
    if alike > _MOST_ALIKE and len(set(map(str, keys))) > _MOST_ALIKE:
        raise ValueError(f"{alike} keys with the same hash")


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
    if not isinstance(keys, list):
        raise ValueError(f"impossible keys of children {keys!r}")
    entries: tuple[Key, ...] = tuple(cast("list[Key]", keys))
    if list in map(type, entries):  # JSON has no tuples
        entries = tuple(_key(entry, MAX_DEPTH) for entry in entries)
    if not _KEY_TYPES.issuperset(map(type, entries)):
        wrong = [key for key in entries if type(key) not in _KEY_TYPES and not is_plain_tuple(key)]
        if wrong:
            raise ValueError(f"impossible key {wrong[0]!r}")
    if not _TEXT_ONLY.issuperset(map(type, entries)):
        _refuse_alike(entries)
    return entries


def _key(value: Any, depth: int) -> Any:
    if not isinstance(value, list):
        return value
    if depth < 0:
        raise ValueError(f"a key nested more than {MAX_DEPTH} levels deep")
    return tuple(_key(part, depth - 1) for part in value)
