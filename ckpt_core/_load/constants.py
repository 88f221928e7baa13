"""What is recorded and is no state: static values of a target, and settings of jax. Both change what is computed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_core._adapters import SavedDict
from ckpt_core._errors import Mismatch
from ckpt_core._lazy import JAX_SETTINGS, jax
from ckpt_core._load import functions
from ckpt_core._load.request import Request
from ckpt_core._load.targets import SavedLeaf
from ckpt_core._saved import SavedItem
from ckpt_core._tree import (
    FlatTree,
    Node,
    Path,
    compared_values,
    format_path,
    unflatten,
)
from ckpt_core._tree.match import Match, MatchRules, renamed_path
from ckpt_core._words import some

_ABSENT: tuple[()] = ()
"""What a field has at a place beyond its end."""


def unread(
    item: SavedItem, dicts: dict[Path, tuple[Node, int]], path: Path, request: Request
) -> Any:
    """What was saved for a path of the target, for ``wanted`` of an adapter: a ``SavedLeaf`` for each leaf; of a live object with
    what was recorded beside its state. None inside of the item where no dict was saved, or with ``only=`` or
    ``missing="keep"``. ``dicts`` keeps them, with their first leaves.
    """
    if path and (request.only is not None or request.rules.missing != "error"):
        return None
    if path and not dicts:
        dicts[()] = item.root, 0
        first = dict[Path, int]()
        for position, saved in enumerate(item.paths):
            for length in range(1, len(saved)):
                first.setdefault(saved[:length], position)
        for at, node in functions.nodes_in(item.root):
            if node.kind == "dict":
                renamed = tuple(map(str, renamed_path(at, request.rules.rename)))
                dicts[renamed] = node, first.get(at, 0)
    root, start = dicts.get(tuple(map(str, path)), (None, 0)) if path else (item.root, 0)
    if root is None:
        return None
    leaves = (SavedLeaf(item.specs[at]) for at in range(start, len(item.specs)))
    tree = unflatten(root, leaves)
    if root.kind == "dict" and root.static:
        tree = SavedDict(tree)
        tree.constants = compared_values(root.static)
    return tree


def compare(
    found: Match, item: SavedItem, flat: FlatTree, rules: MatchRules, everything: bool
) -> None:
    """Adds to ``found`` what differs between saved and wanted functions and static values. A static value that can be set
    nowhere, as in a live object, and a text, which is often a name, are a warning. If not ``everything`` is
    restored, only containers count that are restored whole.
    """
    if everything and rules.unexpected == "error":
        known = {entry.path for entry in found.mismatches}
        found.mismatches += functions.differing(item, flat.root, rules, known)
    if rules.static == "target":
        return
    parts = set[Path]()
    if not everything:
        pairs = zip(flat.paths, found.source, strict=True)
        kept = [path for path, source in pairs if source is None]
        parts = {path[:end] for path in kept for end in range(len(path) + 1)}
    saved = {
        functions.compared_path(path, True, rules): compared_values(node.static)
        for path, node in functions.nodes_in(item.root)
        if node.static
    }
    others: list[Mismatch] = []
    for path, node in functions.nodes_in(flat.root):
        before = saved.get(functions.compared_path(path, False, rules)) if node.static else None
        if not before or path in parts:
            continue
        now = compared_values(node.static)
        before, now = _by_places(before, now), _by_places(now, before)
        fields = {name.partition("/")[0] for name in before} & {
            name.partition("/")[0] for name in now
        }
        moved = _are_permuted(before, now)
        names = (*now, *before) if node.kind == "custom" else filter(before.__contains__, now)
        for name in dict.fromkeys(names):
            one, other = before.get(name, _ABSENT), now.get(name, _ABSENT)
            how = _differs(one, other) if name.partition("/")[0] in fields else ""
            if how and name not in before and not name.rpartition("/")[2].isdigit():
                how = "text" if name.partition("/")[0] not in before else how  # a new setting
            if how:
                where = "/".join([*([format_path(path)] if path else []), name])
                both = _shown(one), _shown(other)
                mismatch = Mismatch(where, "static", *both, None, item.name or None)
                grave = (how == "value" or moved) and node.kind == "custom"
                (found.mismatches if grave else others).append(mismatch)
    if others and not found.mismatches:
        _warn(others)


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


def _warn(differing: Sequence[Mismatch]) -> None:
    """Warns of static values that the target keeps, though others were saved, and that are no mismatch."""
    shown = some([*map(str, differing)], "; ")
    warnings.warn(
        f"{shown}. Such values are no state that could be restored: those of the target stay. Set them "
        'yourself if they matter, or pass static="target" to load or restore if they are meant to differ',
        UserWarning,
        stacklevel=2,
    )


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
