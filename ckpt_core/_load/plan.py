"""Matching saved items against what is wanted, before any array is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from ckpt_core import _adapters
from ckpt_core._errors import (
    CheckpointNotFound,
    Mismatch,
    StructureMismatch,
)
from ckpt_core._leaves import TEXT_KINDS, LeafSpec, describe
from ckpt_core._load import place
from ckpt_core._load.align import align
from ckpt_core._load.foreign import with_specs
from ckpt_core._load.opened import Opened, SavedItem
from ckpt_core._load.other import plan_other
from ckpt_core._load.place import SavedLeaf
from ckpt_core._load.request import Request
from ckpt_core._load.wants import NOT_SAVED, Planned
from ckpt_core._match import Match, MatchRules, Select, match, positions_of, selector
from ckpt_core._tree import LEAF, FlatTree, Node, flatten, format_path, importable_type, unflatten


def find_item(opened: Opened, name: str) -> SavedItem:
    """The item of that name.

    Raises:
        CheckpointNotFound: with the names of those that exist.
    """
    if name not in opened.items:
        known = ", ".join(opened.items) or "none"
        raise CheckpointNotFound(f"{opened.path} has no item {name!r}; it has: {known}")
    return opened.items[name]


def plan_item(
    opened: Opened, saved: SavedItem, like: Any, request: Request, context: Any
) -> Planned:
    """Matches one item against its target; reads no array of ours."""
    if saved.form == "numpy_key":
        return _plan_numpy_key(opened, saved, request, context)
    if saved.form != "tree":
        return plan_other(opened, saved, like, context)
    item = with_specs(opened, saved, context)
    if like is NOT_SAVED:
        return _plan_as_saved(item, request)
    adapter = _adapters.adapter_for(like)
    if adapter is not None and _adapters.is_per_process(adapter):
        raise StructureMismatch(
            [Mismatch("(root)", "kind", "a tree of arrays", type(like).__name__, None, item.name)],
            where=opened.path,
        )
    if adapter is not None and _adapters.is_lenient(adapter):
        return _plan_lenient(item, adapter, like, request)
    expand = _adapters.expander(like, lambda: _unread(item))
    flat = flatten(like, expand=expand, keep=True)
    return _plan_strict(item, flat, like, request)


def _unread(item: SavedItem) -> Any:
    """The saved tree with descriptions for leaves."""
    return unflatten(item.root, map(SavedLeaf, item.specs), resolve=importable_type)


def _plan_numpy_key(opened: Opened, saved: SavedItem, request: Request, context: Any) -> Planned:
    """Orbax's numpy random key: what numpy's ``set_state`` takes, a tuple or a dict."""
    planned = _plan_as_saved(with_specs(opened, replace(saved, form="tree"), context), request)
    make = planned.finish

    def finish(leaves: list[Any]) -> Any:
        value = make(leaves)
        return value if isinstance(value, dict) else tuple(value)

    planned.finish = finish
    return planned


def _plan_strict(item: SavedItem, flat: FlatTree, like: Any, request: Request) -> Planned:
    """Both sides must agree, but for what the request allows."""
    wanted = [_wanted_spec(path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    rules = request.rules
    if item.orbax is not None:
        rules = MatchRules(
            rules.rename, rules.cast, rules.missing, rules.unexpected, loose_keys=True
        )
    selected = _selection(request.only, item.name, like)
    everything = selected is None
    rules, selected = align(item, like, rules, selected)
    found = match(
        item.leaves,
        list(zip(flat.paths, wanted, strict=True)),
        rules,
        selected=selected,
        item=item.name or None,
    )
    _refuse_abstract_kept(found, flat, wanted, item, everything, selected)
    set_leaves = None if request.options.atomic_restore else _adapters.setter_of_parts(like)
    targets: dict[int, place.Target] = {}
    if not found.mismatches:
        chosen = [
            (result, position)
            for result, position in enumerate(found.source)
            if position is not None
        ]
        entries = [
            (position, wanted[result] or item.specs[position], flat.leaves[result])
            for result, position in chosen
        ]
        made = place.like_targets(item, entries)
        if request.sharding is not None:
            made = _with_sharding(item, entries, made, request.sharding)
        targets = {result: target for (result, _), target in zip(chosen, made, strict=True)}
        # what is set in parts takes the room of what is there
        placed = request.sharding is not None or set_leaves is not None
        place.check_room(item, made, placed)
    return Planned(
        item,
        found.source,
        flat.leaves,
        targets,
        lambda leaves: unflatten(flat.root, leaves),
        found,
        set_leaves=set_leaves,
        paths=flat.paths,
    )


def _with_sharding(
    item: SavedItem,
    entries: list[tuple[int, LeafSpec, Any]],
    made: list[place.Target],
    sharding: Any,
) -> list[place.Target]:
    positions = [position for position, spec, _ in entries if spec.kind in ("jax", "key")]
    plain = place.plain_targets(item, positions, sharding=sharding, as_numpy=False)
    return [
        place.Target(target.spec, plain[position].sharding, plain[position].regions)
        if position in plain
        else target
        for (position, _, _), target in zip(entries, made, strict=True)
    ]


def _wanted_spec(path: Any, leaf: Any) -> LeafSpec | None:
    if isinstance(leaf, SavedLeaf):
        return None
    # donated, or of a restore that failed: where a value goes, none is needed
    if _is_deleted(leaf):
        weak: bool = getattr(leaf, "weak_type", False)
        leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return describe(leaf, path)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _refuse_abstract_kept(
    found: Match,
    flat: FlatTree,
    wanted: Sequence[LeafSpec | None],
    item: SavedItem,
    everything: bool,
    selected: Select | None,
) -> None:
    """An abstract leaf, or a deleted one, has no value to keep: what is missing stays an error.

    Where a part is selected, the rest of an abstract tree stays abstract; but of what an adapter
    wants as it was saved, the object has nothing at all.
    """
    without_value = (SavedLeaf, jax.ShapeDtypeStruct) if everything else SavedLeaf
    for path, leaf, spec, source in zip(flat.paths, flat.leaves, wanted, found.source, strict=True):
        if source is not None:
            continue
        chosen = selected is None or (spec is not None and selected(path, spec))
        deleted = chosen and _is_deleted(leaf)
        if not deleted and not isinstance(leaf, without_value):
            continue
        text = format_path(path)
        if not any(entry.path == text for entry in found.mismatches):
            why = "deleted: donated, or by a restore that failed" if deleted else "abstract"
            now = "as saved" if spec is None else f"{spec} ({why})"
            found.mismatches.append(Mismatch(text, "missing", None, now, None, item.name))


def _plan_as_saved(item: SavedItem, request: Request) -> Planned:
    """No target: everything comes back as it was, or the part that was selected."""
    selected = _selection(request.only, item.name, None)
    positions = positions_of(item.paths, item.specs, selected)
    arrays = [position for position in positions if item.specs[position].kind not in TEXT_KINDS]
    targets = place.plain_targets(
        item, arrays, sharding=request.sharding, as_numpy=request.as_numpy
    )
    place.check_room(item, list(targets.values()), request.sharding is not None or request.as_numpy)
    root = item.root
    if selected is not None:
        root = _pruned(root, itertools.count(), set(positions)) or Node("dict")
    by_result = {
        result: targets[position]
        for result, position in enumerate(positions)
        if position in targets
    }
    renamed = request.rules.rename

    def finish(leaves: list[Any]) -> Any:
        if renamed is not None:
            paths = [renamed(format_path(item.paths[position])) for position in positions]
            return _nested(paths, leaves)
        return unflatten(root, leaves, resolve=importable_type)

    return Planned(item, positions, [None] * len(positions), by_result, finish)


def _nested(paths: list[str], leaves: list[Any]) -> Any:
    """Renamed leaves as nested dicts: their old containers no longer fit."""
    root: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node: Any = root
        *parents, last = path.split("/")
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise ValueError(f"rename= gives two leaves the path {path!r}, or one inside another")
        node[last] = leaf
    return root


def _pruned(node: Node, counter: Iterator[int], keep: set[int]) -> Node | None:
    """The structure without the leaves that were not selected; None where nothing is left."""
    count = len(node.children)
    if count and node.children[0] is LEAF and node.children.count(LEAF) == count:
        # nothing is done for each leaf
        own = list(itertools.islice(counter, count))
        if keep.isdisjoint(own):
            return None
        here = sorted(keep.intersection(own))
        return _remaining(node, [(node.keys[position - own[0]], LEAF) for position in here])
    if node.kind == "leaf":
        return node if next(counter) in keep else None
    if not node.children:
        return node if node.kind == "none" else None
    left: list[tuple[str | int, Node]] = []
    for key, child in zip(node.keys, node.children, strict=True):
        if child.kind == "leaf":  # most nodes are: no call for each
            kept = child if next(counter) in keep else None
        else:
            kept = _pruned(child, counter, keep)
        if kept is not None:
            left.append((key, kept))
    return _remaining(node, left)


def _remaining(node: Node, left: list[tuple[str | int, Node]]) -> Node | None:
    """A container of what is left of its children."""
    if len(left) == len(node.children):
        return Node(node.kind, node.keys, tuple(child for _, child in left), node.type_name)
    if not any(child.kind != "none" for _, child in left):
        return None
    # a tuple with holes is none: what is left of it is named by position
    kind = node.kind if node.kind in ("dict", "ordered") else "dict"
    return Node(kind, tuple(key for key, _ in left), tuple(child for _, child in left))


def _plan_lenient(item: SavedItem, adapter: Any, like: Any, request: Request) -> Planned:
    """A user's own object gets exactly what was saved, on the shardings that it uses now."""
    flat = flatten(adapter.get_state(like))
    now = dict(zip(flat.paths, flat.leaves, strict=True))
    planned = _plan_as_saved(item, request)
    for result, position in enumerate(planned.positions):
        assert position is not None
        leaf = now.get(item.paths[position])
        spec = item.specs[position]
        if (
            isinstance(leaf, jax.Array)
            and spec.kind in ("jax", "key")
            and tuple(leaf.shape) == spec.shape
        ):
            (planned.targets[result],) = place.like_targets(item, [(position, spec, leaf)])

    def finish(leaves: list[Any]) -> Any:
        adapter.set_state(like, unflatten(item.root, leaves, resolve=importable_type))
        return like

    planned.finish = finish
    return planned


def _selection(only: Any, item: str, like: Any) -> Select | None:
    """The function that ``only=`` stands for."""
    adapter = None if like is None else _adapters.adapter_for(like)
    if isinstance(only, type) or _adapters.is_filter(adapter, only):
        if adapter is None or not hasattr(adapter, "select"):
            raise TypeError(
                f"only={getattr(only, '__name__', only)}: item {item!r} has no adapter that knows this class as a filter: "
                'use a pattern such as only="params/**"'
            )
        return adapter.select(like, only)  # pyright: ignore
    return selector(only, item=item)


def check_patterns(opened: Opened, prepared: list[Planned], request: Request) -> None:
    """A pattern that selects nothing is a mistake, and said so."""
    if request.only is None or any(
        position is not None for p in prepared for position in p.positions
    ):
        return
    paths = [format_path(path) for planned in prepared for path in planned.item.paths]
    shown = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
    raise CheckpointNotFound(
        f"{opened.path}: only={request.only!r} matches no leaf; leaves are {shown}"
    )


def raise_mismatches(opened: Opened, prepared: list[Planned]) -> None:
    mismatches = [
        entry for planned in prepared if planned.match for entry in planned.match.mismatches
    ]
    if mismatches:
        raise StructureMismatch(mismatches, where=opened.path, advice=_advice(mismatches))


def _advice(mismatches: list[Mismatch]) -> str:
    kinds = {entry.kind for entry in mismatches}
    hints = [
        ("missing", 'missing="keep" keeps what the target holds'),
        ("unexpected", 'unexpected="ignore" leaves saved leaves out'),
        ("dtype", "cast=True converts dtypes"),
    ]
    told = [hint for kind, hint in hints if kind in kinds]
    if {"missing", "unexpected"} <= kinds:
        told.append("rename= maps saved paths to wanted ones")
    return f"Where this is intended: {'; '.join(told)}." if told else ""
