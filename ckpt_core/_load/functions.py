"""Functions in modules: compared by name, and brought by the target, since a checkpoint has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpt_core._code import same_function
from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._load.opened import SavedItem
from ckpt_core._match import MatchRules, renamed_path
from ckpt_core._tree import LEAF, Node, Path, format_path

_BRING_THEM = (
    "Functions are code: a checkpoint records their names only. Pass a target that has them, such as "
    "load(path, model), where an abstract model will do (equinox.filter_eval_shape(make_model, key)); "
    'or leave them out with only="**", which gives the arrays in dicts.'
)


def differing(item: SavedItem, wanted: Node, rules: MatchRules) -> list[Mismatch]:
    """Functions that both sides have in one place, under different names.

    Where one side has none (of a module whose functions were filtered out), nothing is missed: they
    are no state.
    """
    saved = {renamed_path(path, rules.rename): node for path, node in _functions_in(item.root)}
    found: list[Mismatch] = []
    for path, node in _functions_in(wanted):
        before = saved.get(path if rules.rename is None else tuple(map(str, path)))
        if before is not None and not same_function(before.type_name, node.type_name):
            names = before.type_name, node.type_name
            found.append(Mismatch(format_path(path), "function", *names, None, item.name or None))
    return found


def refuse_missing(item: SavedItem, root: Node) -> None:
    """Refuses a structure with functions that nobody has brought.

    Raises:
        StructureMismatch: with all of them, and what to pass.
    """
    missing = [
        Mismatch(format_path(path), "function", node.type_name, None, None, item.name or None)
        for path, node in _functions_in(root)
        if node.make is None
    ]
    if missing:
        raise StructureMismatch(missing, advice=_BRING_THEM)


def taken_from(live: Node, saved: Node) -> Node:
    """The saved structure with the functions that a live one has in the same places."""
    return _filled(saved, dict(_functions_in(live)), ())


def _functions_in(root: Node) -> Iterator[tuple[Path, Node]]:
    """The path and the node of every function in a structure."""
    if root.kind == "code":
        yield (), root
    elif root.kind == "expanded":
        yield from _functions_in(root.children[0])
    elif len(root.children) != root.children.count(LEAF):
        for key, child in zip(root.keys, root.children, strict=True):
            yield from (((key, *path), node) for path, node in _functions_in(child))


def _filled(root: Node, known: Mapping[Path, Node], path: Path) -> Node:
    if root.kind == "code":
        return known.get(path, root)
    if not root.children:
        return root
    children = tuple(
        child if child is LEAF else _filled(child, known, (*path, key))
        for key, child in zip(root.keys, root.children, strict=True)
    )
    return replace(root, children=children)
