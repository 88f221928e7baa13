"""Functions inside pytrees: a checkpoint records only their names, the target must supply them.

Equinox modules, for example, contain activation functions.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._saved import SavedItem
from ckpt_core._tree import LEAF, Node, Path, format_path, static_function
from ckpt_core._tree.code import same_function
from ckpt_core._tree.match import MatchRules, renamed_path

NONE = "no function"
"""The ``saved`` or ``wanted`` of a mismatch, on the side that has no function there."""
_BRING_THEM = (
    "Functions are code: a checkpoint records their names only. Pass a target that has them, such as "
    "load(path, model), where an abstract model will do (equinox.filter_eval_shape(make_model, key)); "
    'or leave them out with only="**", which gives the arrays in dicts.'
)


def differing(
    item: SavedItem, wanted: Node, rules: MatchRules, reported: Collection[str]
) -> list[Mismatch]:
    """Mismatches for functions of different names at one path, or on one side only; none at ``reported`` paths. A side without
    any function misses none: its functions were filtered out, as they are no state. A filtered target has None in their places,
    so a function of a field that no longer exists is a mismatch.
    """
    here = functools.partial(compared_path, rules=rules)
    before = {here(path, True): (path, _name(node)) for path, node in _functions_in(item.root)}
    now = {here(path, False): (path, _name(node)) for path, node in _functions_in(wanted)}
    gone = _only_in(before, now)
    if gone and not _has_code(wanted):
        empty = {here(path, False) for path, node in nodes_in(wanted) if node.kind == "none"}
        gone = {
            place: entry
            for place, entry in gone.items()
            if empty.isdisjoint(place[:length] for length in range(len(place) + 1))
        }
    new = _only_in(now, before) if rules.missing == "error" else {}
    if new and not _has_code(item.root):
        new = {}
    if new:  # earlier versions of ckpt did not record a function that a container wraps
        known = {here(path, True) for path, node in nodes_in(item.root) if node.kind == "custom"}
        new = {place: entry for place, entry in new.items() if place not in known}
    found = [
        (path, before[place][1], name, None)
        for place, (path, name) in now.items()
        if place in before and not same_function(before[place][1], name)
    ]
    found += [(path, name, NONE, _nearest(path, name, new)) for path, name in gone.values()]
    found += [(path, NONE, name, _nearest(path, name, gone)) for path, name in new.values()]
    return [
        Mismatch(format_path(path), "function", saved, name, nearest, item.name or None)
        for path, saved, name, nearest in found
        if format_path(path) not in reported
    ]


_Functions = Mapping[Path, tuple[Path, str]]
"""Path and name of each function, by the path (after renaming) at which both sides are compared."""


def compared_path(path: Path, saved: bool, rules: MatchRules) -> Path:
    """A path as it is compared: a saved one is renamed; keys become text if the rules say so."""
    path = renamed_path(path, rules.rename) if saved else path
    return tuple(map(str, path)) if rules.loose_keys or rules.rename is not None else path


def _only_in(one: _Functions, other: _Functions) -> _Functions:
    return {place: entry for place, entry in one.items() if place not in other}


def _nearest(path: Path, name: str, others: _Functions) -> str | None:
    """The most similar path on the other side; paths of the same function are preferred."""
    same = [format_path(other) for other, theirs in others.values() if same_function(theirs, name)]
    candidates = same or [format_path(other) for other, _ in others.values()]
    close = difflib.get_close_matches(
        format_path(path), candidates[:200], n=1, cutoff=0.0 if same else 0.6
    )
    return close[0] if close else None


def have_moved(mismatches: Iterable[Mismatch]) -> bool:
    """Whether each side has a function at a path where the other has none: ``rename=`` may help."""
    functions = [entry for entry in mismatches if entry.kind == "function"]
    gone = any(entry.wanted == NONE for entry in functions)
    return gone and any(entry.saved == NONE for entry in functions)


def refuse_missing(item: SavedItem, root: Node) -> None:
    """Raises StructureMismatch if the structure has functions that no target supplied; it lists all, and what to pass."""
    missing = [
        Mismatch(format_path(path), "function", _name(node), None, None, item.name or None)
        for path, node in _functions_in(root)
        if node.make is None
    ]
    if missing:
        raise StructureMismatch(missing, advice=_BRING_THEM)


def taken_from(live: Node, saved: Node) -> Node:
    """The saved structure, with the functions of the ``live`` structure at the same paths."""
    known = {path: node for path, node in _functions_in(live) if node.kind == "code"}
    return _filled(saved, known, ())


def without_static(root: Node) -> Node:
    """The structure without static fields, as earlier versions of ckpt recorded it."""
    children = (child if child is LEAF else without_static(child) for child in root.children)
    return replace(root, static="", children=tuple(children))


def _functions_in(root: Node) -> Iterator[tuple[Path, Node]]:
    """Path and node of every function in a structure, and of every container that wraps one."""
    if root.kind == "code":
        yield (), root
    elif root.kind == "expanded":
        yield from _functions_in(root.children[0])
    else:
        if root.static and static_function(root.static):
            yield (), root
        if len(root.children) != root.children.count(LEAF):
            for key, child in zip(root.keys, root.children, strict=True):
                yield from (((key, *path), node) for path, node in _functions_in(child))


def nodes_in(root: Node) -> Iterator[tuple[Path, Node]]:
    """Path and node of everything in a structure but its leaves."""
    if root.kind == "expanded":
        yield from nodes_in(root.children[0])
    elif root.kind != "leaf":
        yield (), root
        for key, child in zip(root.keys, root.children, strict=True):
            if child is not LEAF:
                yield from (((key, *path), node) for path, node in nodes_in(child))


def wraps_any(root: Node) -> bool:
    """Whether a container in the structure wraps a function that has no node of its own."""
    return any(static_function(node.static) for _, node in nodes_in(root))


def _name(node: Node) -> str:
    return node.type_name if node.kind == "code" else static_function(node.static)


def _has_code(root: Node) -> bool:
    """Whether a structure has functions as nodes: those are what a filter can remove."""
    return root.kind == "code" or any(map(_has_code, root.children))


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
