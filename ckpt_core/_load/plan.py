"""Matching saved items against what is wanted, before any array is read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import (
    CheckpointNotFound,
    Mismatch,
    StructureMismatch,
)
from ckpt_core._lazy import jax
from ckpt_core._leaves import TEXT_KINDS, LeafSpec
from ckpt_core._load import functions, place
from ckpt_core._load.align import align, renamed_by_adapter, under_orbax_names
from ckpt_core._load.foreign import with_specs
from ckpt_core._load.live import Copies, held, setting_back
from ckpt_core._load.opened import Opened, SavedItem
from ckpt_core._load.other import plan_other
from ckpt_core._load.place import SavedLeaf
from ckpt_core._load.renames import advice_on, idle_renames, refuse_idle
from ckpt_core._load.request import Request
from ckpt_core._load.wants import NOT_SAVED, Planned
from ckpt_core._load.without_value import (
    WITHOUT_VALUE,
    is_deleted,
    refuse_abstract_kept,
    tell_of_abstract_rest,
)
from ckpt_core._match import (
    Idle,
    MatchRules,
    Select,
    match,
    positions_of,
    selector,
)
from ckpt_core._tree import (
    LEAF,
    FlatTree,
    Key,
    Node,
    flatten,
    format_path,
    importable_type,
    unflatten,
)


def find_item(opened: Opened, name: str) -> SavedItem:
    """The item of that name; of a checkpoint that is one tree, whatever that is called, ``state``.

    The one tree of a checkpoint is ``state`` and, as Orbax's managers call it, ``default``.

    Raises:
        CheckpointNotFound: with the names of those that exist.
    """
    if name not in opened.items:
        only = next(iter(opened.items.values()))
        if opened.single and len(opened.items) == 1 and name in ("state", "default"):
            return only
        known = ", ".join(opened.items) or "none"
        by_name = ", ".join(f"{key}=..." for key in opened.items if key.isidentifier())
        hint = f": pass each target by its name ({by_name})" if name == "state" and by_name else ""
        hint = ": it was saved as one, pass one target without a name" if opened.single else hint
        raise CheckpointNotFound(f"{opened.path} has no item {name!r}; it has: {known}{hint}")
    return opened.items[name]


def plan_item(
    opened: Opened, saved: SavedItem, like: Any, request: Request, context: Any
) -> Planned:
    """Matches one item against its target; reads no array of ours."""
    copies = Copies(like, saved.name) if request.copying else None
    if copies is not None and _adapters.adapter_for(like) is not None:
        like, copies = copies(like), None
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
    live: list[tuple[Any, bool]] = []
    expand = _adapters.expander(like, lambda: _unread(item), stand_in=copies, live=live)
    flat = flatten(like, expand=expand, keep=True)
    return _plan_strict(item, flat, like, request, live)


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


def _plan_strict(
    item: SavedItem, flat: FlatTree, like: Any, request: Request, live: list[tuple[Any, bool]]
) -> Planned:
    """Both sides must agree, but for what the request allows."""
    wanted = [_wanted_spec(path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]
    rules = request.rules
    if request.renames:
        rules = renamed_by_adapter(item, live, rules, request.renames)
    if item.orbax is not None:
        rules = under_orbax_names(item, like, rules)
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
    if everything and rules.unexpected == "error":
        told = {entry.path for entry in found.mismatches}
        found.mismatches += functions.differing(item, flat.root, rules, told)
    refuse_abstract_kept(found, flat, wanted, item, everything, selected)
    if live and selected is not None and not found.mismatches:
        tell_of_abstract_rest(found, flat, item)
    at_once = request.copying or request.options.atomic_restore
    set_leaves = None if at_once else _adapters.setter_of_parts(like)
    targets: dict[int, place.Target] = {}
    if not found.mismatches:
        chosen = [(result, leaf) for result, leaf in enumerate(found.source) if leaf is not None]
        entries: list[tuple[int, LeafSpec, Any]] = []
        for result, position in chosen:
            saved, asked = item.specs[position], wanted[result]
            spec = saved if asked is None else place.kind_of_result(saved, asked)
            entries.append((position, spec, flat.leaves[result]))
        made = place.like_targets(item, entries)
        if request.sharding is not None:
            made = _with_sharding(item, entries, made, request.sharding)
        targets = {result: target for (result, _), target in zip(chosen, made, strict=True)}
        # what is set in parts takes the room of what is there
        placed = request.sharding is not None or set_leaves is not None
        place.check_room(item, made, placed)
    # not the tree itself in what follows: a restore forgets the leaves that it has set
    root, kept = flat.root, flat.leaves

    def hold() -> Callable[[], object] | None:
        if all(_adapters.is_held_by_reference(obj) for obj, _ in live):
            return functools.partial(unflatten, root, list(kept))
        return held(like, request.options.max_host_bytes)

    return Planned(
        item,
        found.source,
        kept,
        targets,
        lambda leaves: unflatten(root, leaves),
        found,
        hold=hold if live else None,
        held_now=lambda: flatten(like, expand=_adapters.expander()).leaves,
        set_leaves=set_leaves,
        paths=flat.paths,
        live=live,
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
    if is_deleted(leaf):
        weak: bool = getattr(leaf, "weak_type", False)
        leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return place.describe_target(leaf, path)


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
    elif request.rules.rename is None:
        functions.refuse_missing(item, root)
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
    if node.kind == "expanded":
        return _pruned(node.children[0], counter, keep)
    if not node.children:
        return node if node.kind == "none" else None
    left: list[tuple[Key, Node]] = []
    for key, child in zip(node.keys, node.children, strict=True):
        if child.kind == "leaf":  # most nodes are: no call for each
            kept = child if next(counter) in keep else None
        else:
            kept = _pruned(child, counter, keep)
        if kept is not None:
            left.append((key, kept))
    return _remaining(node, left)


def _remaining(node: Node, left: list[tuple[Key, Node]]) -> Node | None:
    """A container of what is left of its children."""
    if len(left) == len(node.children) and not functions.wraps_any(node):
        return replace(node, children=tuple(child for _, child in left), make=None)
    if not any(child.kind != "none" for _, child in left):
        return None
    # a tuple with holes is none: what is left of it is named by position
    kind = node.kind if node.kind in ("dict", "ordered") else "dict"
    return Node(kind, tuple(key for key, _ in left), tuple(child for _, child in left))


def _plan_lenient(item: SavedItem, adapter: Any, like: Any, request: Request) -> Planned:
    """A user's own object gets exactly what was saved, on the shardings that it uses now."""
    flat = flatten(adapter.get_state(like), expand=_adapters.as_states(), keep=True)
    now = dict(zip(flat.paths, flat.leaves, strict=True))
    # in the classes that it has now, where they are the saved ones
    same = functions.without_static(flat.root) == functions.without_static(item.root)
    item = replace(item, root=flat.root if same else functions.taken_from(flat.root, item.root))
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
    planned.live = [(like, False)]
    planned.hold = lambda: setting_back(
        lambda leaves: adapter.set_state(like, unflatten(flat.root, leaves)),
        flat.leaves,
        request.options.max_host_bytes,
    )
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


def raise_mismatches(opened: Opened, prepared: list[Planned], request: Request) -> None:
    """Raises StructureMismatch with all that differs, and with what would allow it."""
    mismatches = [
        entry for planned in prepared if planned.match for entry in planned.match.mismatches
    ]
    idle = idle_renames(opened, request.rules)
    if mismatches:
        advice = _advice(mismatches, request.rules, idle)
        raise StructureMismatch(mismatches, where=opened.path, advice=advice)
    refuse_idle(opened, idle)


def _advice(mismatches: list[Mismatch], rules: MatchRules, idle: list[Idle]) -> str:
    """What would allow the differences, less what was given already."""
    kinds = {entry.kind for entry in mismatches}
    told: list[str] = []
    missing = [str(entry.wanted) for entry in mismatches if entry.kind == "missing"]
    without_value = sum(text.endswith(WITHOUT_VALUE) for text in missing)
    if without_value < len(missing) and rules.missing == "error":
        told.append('missing="keep" keeps what the target holds')
    if "unexpected" in kinds:
        told.append('unexpected="ignore" leaves saved leaves out')
    if "dtype" in kinds and not rules.cast:
        told.append("cast=True converts dtypes")
    if "function" in kinds:
        told.append('unexpected="ignore" keeps the functions of the target')
    both_sides = {"missing", "unexpected"} <= kinds or functions.have_moved(mismatches)
    if both_sides and (rules.rename is None or idle):
        told.append("rename= maps saved paths to wanted ones")
    lines = [f"Where this is intended: {'; '.join(told)}."] if told else []
    if idle:
        lines.append(advice_on(idle))
    if without_value or ("missing" in kinds and rules.missing != "error"):
        lines.append(
            "The target holds no value there that could be kept: give it one (an object that was made, in "
            "place of an abstract one), or select with only= what was saved."
        )
    return " ".join(lines)
