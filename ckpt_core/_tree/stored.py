"""The paths under which leaves are stored: those in Orbax's own trees of the same objects."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core._tree.flatten import LEAF, Node, Path


def stored_paths(root: Node, paths: Sequence[Path]) -> Sequence[Path]:
    """For each leaf, its path in Orbax's trees: with the keys that our paths omit (``Below``).

    Args:
        root: the structure.
        paths: paths of its leaves, in order; returned unchanged if no leaf has an omitted key.

    Example:
        >>> from ckpt_core._tree import Below, flatten, stored_paths
        >>> flat = flatten({"kernel": Below("value", 1.5), "step": 3})
        >>> flat.paths, stored_paths(flat.root, flat.paths)
        ([('kernel',), ('step',)], [('kernel', 'value'), ('step',)])
    """
    if not _any_below(root):
        return paths
    found: list[Path] = []
    _collect(root, (), found)
    return found


def _any_below(node: Node) -> bool:
    if node.kind in ("leaf", "expanded") and node.type_name:
        return True
    different = {id(child): child for child in node.children}  # equal layers may be one node
    different.pop(id(LEAF), None)
    return any(map(_any_below, different.values()))


def _collect(node: Node, path: Path, found: list[Path]) -> None:
    if node.kind == "leaf":
        found.append((*path, node.type_name) if node.type_name else path)
    elif node.kind == "expanded":
        _collect(node.children[0], (*path, node.type_name) if node.type_name else path, found)
    else:
        for key, child in zip(node.keys, node.children, strict=True):
            _collect(child, (*path, key), found)
