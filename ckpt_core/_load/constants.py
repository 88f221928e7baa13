"""What is recorded and is no state, but changes what is computed: the names of functions (Equinox modules contain activation
functions), static values, and settings of jax. The target supplies them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpt_core._adapters import SavedDict
from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._lazy import JAX_SETTINGS, jax
from ckpt_core._load.request import Request
from ckpt_core._saved import SavedItem
from ckpt_core._tree import (
    LEAF,
    FlatTree,
    Node,
    Path,
    compared_values,
    format_path,
    static_function,
    unflatten,
)
from ckpt_core._tree.code import same_function
from ckpt_core._tree.match import Match, MatchRules, renamed_path
from ckpt_core._words import some
from ckpt_core.arguments import nearest

NO_FUNCTION = "no function"
"""The ``saved`` or ``wanted`` of a mismatch, on the side that has no function there."""
_BRING_THEM = (
    "Functions are code: a checkpoint records their names only. Pass a target that has them, such as "
    "load(path, model), where an abstract model will do (equinox.filter_eval_shape(make_model, key)); "
    'or leave them out with only="**", which gives the arrays in dicts.'
)
_ABSENT: tuple[()] = ()
"""What a field has at a place beyond its end."""


def unread(
    item: SavedItem, dicts: dict[Path, tuple[Node, int]], path: Path, request: Request
) -> Any:
    """What was saved at a path of the target, or None, for ``wanted`` of an adapter: each leaf a ``LeafSpec``. ``dicts`` is a cache."""
    if path and (request.only is not None or request.matching.missing != "error"):
        return None
    if path and not dicts:
        dicts[()] = item.root, 0
        first = dict[Path, int]()
        for position, saved in enumerate(item.paths):
            for length in range(1, len(saved)):
                first.setdefault(saved[:length], position)
        for at, node in nodes_in(item.root):
            if node.kind == "dict":
                renamed = tuple(map(str, renamed_path(at, request.matching.rename)))
                dicts[renamed] = node, first.get(at, 0)
    root, start = dicts.get(tuple(map(str, path)), (None, 0)) if path else (item.root, 0)
    if root is None:
        return None
    tree = unflatten(root, itertools.islice(item.specs, start, None))
    if root.kind == "dict" and root.static:
        tree = SavedDict(tree)
        tree.constants = compared_values(root.static)
    return tree


_Nodes = Mapping[Path, tuple[Path, Node]]
"""Path and node of all in a structure but its leaves, by the path (after renaming) at which both sides are compared."""


def _nodes_of(root: Node, rules: MatchRules, saved: bool) -> _Nodes:
    """Saved paths are renamed; keys become text if the rules say so."""
    as_text, found = rules.loose_keys or rules.rename is not None, dict[Path, tuple[Path, Node]]()
    for path, node in nodes_in(root):
        place = renamed_path(path, rules.rename) if saved else path
        found[tuple(map(str, place)) if as_text else place] = path, node
    return found


def compare(
    found: Match, item: SavedItem, flat: FlatTree, rules: MatchRules, everything: bool
) -> None:
    """Adds to ``found`` what differs between saved and wanted functions and static values. A static value that can be set
    nowhere, as in a live object, and a text, which is often a name, are a warning. If not ``everything`` is
    restored, only containers count that are restored whole.
    """
    before, now = _nodes_of(item.root, rules, True), _nodes_of(flat.root, rules, False)
    if everything and rules.unexpected == "error":
        known = {entry.path for entry in found.mismatches}
        found.mismatches += [
            Mismatch(path, "function", one, other, close, item.name or None)
            for path, one, other, close in _functions(before, now, rules)
            if path not in known
        ]
    if rules.static == "target":
        return
    parts = set[Path]()
    if not everything:
        pairs = zip(flat.paths, found.source, strict=True)
        kept = [path for path, source in pairs if source is None]
        parts = {path[:end] for path in kept for end in range(len(path) + 1)}
    others: list[Mismatch] = []
    for place, (path, node) in now.items():
        if not node.static or place not in before or path in parts:
            continue
        custom = node.kind == "custom"
        for name, one, other, is_grave in _values(before[place][1].static, node.static, custom):
            where = "/".join([*([format_path(path)] if path else []), name])
            mismatch = item.differs(where, "static", _shown(one), _shown(other))
            (found.mismatches if is_grave and custom else others).append(mismatch)
    if others and not found.mismatches:
        shown = some([*map(str, others)], "; ")
        warnings.warn(
            f"{shown}. Such values are no state that could be restored: those of the target stay. Set them "
            'yourself if they matter, or pass static="target" to load or restore if they are meant to differ',
            UserWarning,
            stacklevel=2,
        )


def _functions(
    before: _Nodes, now: _Nodes, rules: MatchRules
) -> Iterator[tuple[str, str, str, str | None]]:
    """Path, saved and wanted function, and the most similar path on the other side, of functions that differ or are on one side
    only. A side without any function misses none: its functions were filtered out, as they are no state. A filtered target has
    None in their places, so a function of a field that no longer exists is a mismatch.
    """
    old, new = (
        {
            place: (format_path(path), name)
            for place, (path, node) in nodes.items()
            if (name := _name(node))
        }
        for nodes in (before, now)
    )
    gone = {place: entry for place, entry in old.items() if place not in new}
    if gone and not any(node.kind == "code" for _, node in now.values()):
        empty = {place for place, (_, node) in now.items() if node.kind == "none"}
        gone = {
            place: entry
            for place, entry in gone.items()
            if empty.isdisjoint(place[:length] for length in range(len(place) + 1))
        }
    came: dict[Path, tuple[str, str]] = {}
    if rules.missing == "error" and any(node.kind == "code" for _, node in before.values()):
        # earlier versions of ckpt did not record a function that a container wraps
        wraps = {place for place, (_, node) in before.items() if node.kind == "custom"}
        came = {place: new[place] for place in new if place not in old and place not in wraps}
    for place, (path, name) in new.items():
        if place in old and not same_function(old[place][1], name):
            yield path, old[place][1], name, None
    for path, name in gone.values():
        yield path, name, NO_FUNCTION, _nearest(path, name, came.values())
    for path, name in came.values():
        yield path, NO_FUNCTION, name, _nearest(path, name, gone.values())


def _nearest(path: str, name: str, others: Collection[tuple[str, str]]) -> str | None:
    """The most similar path on the other side; paths of the same function are preferred."""
    same = [other for other, theirs in others if same_function(theirs, name)]
    candidates = same or [other for other, _ in others]
    return nearest(path, candidates[:200], 0.0 if same else 0.6)


def refuse_without_functions(item: SavedItem, root: Node) -> None:
    """Raises StructureMismatch if the structure has functions that no target supplied; it lists all, and what to pass."""
    missing = [
        item.differs(path, "function", name, None)
        for path, node in nodes_in(root)
        if (name := _name(node)) and node.make is None
    ]
    if missing:
        raise StructureMismatch(missing, advice=_BRING_THEM)


def with_functions_of(live: Node, saved: Node) -> Node:
    """The saved structure, with the functions of the ``live`` structure at the same paths."""
    known = {path: node for path, node in nodes_in(live) if node.kind == "code"}

    def filled(root: Node, path: Path) -> Node:
        if root.kind == "code":
            return known.get(path, root)
        children = tuple(
            child if child is LEAF else filled(child, (*path, key))
            for key, child in zip(root.keys, root.children, strict=True)
        )
        return replace(root, children=children) if children else root

    return filled(saved, ())


def without_static(root: Node) -> Node:
    """The structure without static fields, as earlier versions of ckpt recorded it."""
    children = (child if child is LEAF else without_static(child) for child in root.children)
    return replace(root, static="", children=tuple(children))


def nodes_in(root: Node) -> Iterator[tuple[Path, Node]]:
    """Path and node of everything in a structure but its leaves."""
    if root.kind == "expanded":
        yield from nodes_in(root.children[0])
    elif root.kind != "leaf":
        yield (), root
        for key, child in zip(root.keys, root.children, strict=True):
            if child is not LEAF:
                yield from (((key, *path), node) for path, node in nodes_in(child))


def _name(node: Node) -> str:
    """The function that a node is or wraps; empty if there is none."""
    return node.type_name if node.kind == "code" else static_function(node.static)


def _values(saved: str, wanted: str, custom: bool) -> Iterator[tuple[str, Any, Any, bool]]:
    """Name, saved and wanted value, and whether it changes what is computed, of each that differs in a field of both sides."""
    before, now = compared_values(saved), compared_values(wanted)
    if not before:
        return
    before, now = _by_places(before, now), _by_places(now, before)
    fields = [{name.partition("/")[0] for name in side} for side in (before, now)]
    moved = _are_permuted(before, now)
    names = (*now, *before) if custom else filter(before.__contains__, now)
    for name in dict.fromkeys(names):
        one, other = before.get(name, _ABSENT), now.get(name, _ABSENT)
        field = name.partition("/")[0]
        how = _differs(one, other) if all(field in side for side in fields) else ""
        is_new = name not in before and not name.rpartition("/")[2].isdigit()
        if how and is_new and field not in before:
            how = "text"
        if how:
            yield name, one, other, how == "value" or moved


def _differs(one: Any, other: Any) -> str:
    """How two values differ: ``value``, or ``text`` if only in texts, or in None beside a text; empty if they are the same."""
    if one == other:
        return ""
    both = isinstance(one, tuple), isinstance(other, tuple)
    if all(both) and len(one) == len(other):
        return max(map(_differs, one, other))
    parts = [*(one if both[0] else [one]), *(other if both[1] else [other])]
    texts = all(part is None or type(part) is str for part in parts)
    return "text" if texts else "value"


def _by_places(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with a tuple by its places where the other side has places: a list is recorded so."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, tuple) and any(one.startswith(f"{name}/") for one in others):
            found |= {f"{name}/{place}": part for place, part in enumerate(value)}
        else:
            found[name] = value
    return found


def _are_permuted(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether auxiliary data hold the same texts in another order, as names of children that moved."""
    texts = [
        [value for name, value in values.items() if name.startswith("aux_data/")]
        for values in (one, other)
    ]
    plain = all(type(value) is str for values in texts for value in values)
    return plain and texts[0] != texts[1] and sorted(texts[0]) == sorted(texts[1])


def _shown(value: Any) -> str:
    if value == _ABSENT:
        return "nothing"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return " ".join(map(str, value)) if isinstance(value, list) else repr(value)


def warn_of_settings(saved: Mapping[str, Any]) -> None:
    """Warns of settings of jax that are not those of the save, with the lines that set the saved ones."""
    known = [name for name in JAX_SETTINGS if type(saved.get(name, ...)) in (bool, str, type(None))]
    now = {name: getattr(jax.config, name, saved[name]) for name in known}
    others = [name for name in known if saved[name] != now[name]]
    if others:
        both = ", ".join(f"{name} was {saved[name]!r} and is {now[name]!r}" for name in others)
        lines = "\n".join(f'    jax.config.update("{name}", {saved[name]!r})' for name in others)
        warnings.warn(
            f"jax gives other numbers from this state than where it was saved: {both}. To go on exactly, set "
            f"before anything is computed:\n{lines}",
            UserWarning,
            stacklevel=2,
        )
