"""What differs between two trees beside their leaves: containers, types of keys, static fields."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ckpt_core._tree import Node, Path, format_path


@dataclass(frozen=True)
class NodeDifference:
    """A place of a tree that is another container on either side, or stands under another key; ``item`` is its name in A."""

    item: str
    path: str
    a: str
    b: str


def differing_nodes(
    item: str, a: Node, b: Node, below: Collection[Path] | None
) -> list[NodeDifference]:
    """Where two trees differ in more than which leaves they have, in the order of A, on the way to the leaves ``below`` (None: everywhere)."""
    nodes_a, nodes_b = (
        {format_path(path): text for path, text in _described(root, ())} for root in (a, b)
    )
    prefixes = (path[:length] for path in below or () for length in range(len(path) + 1))
    wanted = set(map(format_path, prefixes))
    return [
        NodeDifference(item, path, nodes_a.get(path, "nothing"), nodes_b.get(path, "nothing"))
        for path in dict.fromkeys([*nodes_a, *nodes_b])
        if below is None or path in wanted
        if nodes_a.get(path) != nodes_b.get(path) and not _is_leaf(path, nodes_a, nodes_b)
    ]


_LEAF, _CONSTANT = "a leaf", "static "


def _is_leaf(path: str, a: dict[str, str], b: dict[str, str]) -> bool:
    """Whether one side has a leaf there and the other has nothing, as the lists of leaves say; or a value that earlier versions did not record."""
    return (path in a) != (path in b) and (a.get(path) or b[path]).startswith((_LEAF, _CONSTANT))


def _described(node: Node, path: Path) -> Iterator[tuple[Path, str]]:
    """Path and description of a node and all below it."""
    while node.kind == "expanded":
        (node,) = node.children
    under = " under an int" if path and type(path[-1]) is int else ""
    if node.kind == "leaf":
        yield path, _LEAF + under
        return
    name = node.type_name.rpartition(":")[2] if node.kind not in ("list", "tuple") else ""
    empty = "" if node.children or node.kind in ("none", "code") else "empty "
    kind = "None" if node.kind == "none" else node.kind
    static = json.loads(node.static) if node.static else {}
    fields = [f" {key}={json.dumps(value)}" for key, value in static.get("fields", {}).items()]
    fields += [f" function={static['function']}"] if "function" in static else []
    yield path, f"{empty}{kind}{' ' + name if name else ''}{''.join(fields)}{under}"
    for name, value in static.get("constants", {}).items():
        yield (*path, *name.split("/")), _CONSTANT + json.dumps(value)
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _described(child, (*path, key))
