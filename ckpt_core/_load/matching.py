"""Matches saved items against their targets, before any array is read."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import CheckpointNotFound, Mismatch, StructureMismatch, UnsupportedLeaf
from ckpt_core._items import Files, Json, SavedFiles
from ckpt_core._lazy import jax
from ckpt_core._load import constants, non_tree, targets
from ckpt_core._load.derived import under_rules, under_select
from ckpt_core._load.plans import ItemPlan, Make, constant, pruned, renamed_dicts
from ckpt_core._load.renames import renamed_names, under_wanted_paths
from ckpt_core._load.request import NOT_PASSED, Request
from ckpt_core._load.targets import TargetTree
from ckpt_core._read import Want, with_specs
from ckpt_core._saved import Checkpoint, DerivedItem, ExtentItem, NativeItem, OrbaxItem, SavedItem
from ckpt_core._tree import Node, Path, code_and_constants, flatten, format_path, unflatten
from ckpt_core._tree.leaves import PYTHON_NUMBERS, TEXT_KINDS, LeafSpec
from ckpt_core._tree.match import Match, MatchRules, covers, match, positions_of, renamed_path
from ckpt_core._tree.patterns import Predicate, selector
from ckpt_core._words import some
from ckpt_core.arguments import nearest, with_article


def item_meant(checkpoint: Checkpoint, name: str) -> SavedItem:
    """The item that is meant by a name that none has; CheckpointNotFound lists those that exist. One state that was saved alone
    is found as ``state`` and, as Orbax's managers call it, ``default``, whatever its directory is called.
    """
    only = next(iter(checkpoint.items.values()))
    if checkpoint.single and len(checkpoint.items) == 1 and name in ("state", "default"):
        return only
    if isinstance(only, ExtentItem):
        return replace(only, name=name)  # such files have no items
    known = ", ".join(checkpoint.items) or "none"
    by_name = ", ".join(f"{key}=..." for key in checkpoint.items if key.isidentifier())
    close = nearest(name, checkpoint.items)
    if checkpoint.single:
        hint = "it was saved as one state, pass one target without a name"
    elif name == "state" and by_name:
        hint = f"pass each target by its name ({by_name})"
    elif close:
        hint = f"did you mean {close!r}?"
    else:
        named = f" ({by_name})" if by_name else ""
        hint = f"restore what is there by its name{named}, or use another directory, if this one belongs to another program"
    raise CheckpointNotFound(f"{checkpoint.path} has no item {name!r}; it has: {known}: {hint}")


def plan_item(checkpoint: Checkpoint, saved: SavedItem, like: Any, request: Request) -> ItemPlan:
    """The plan of an item, matched against its target, or ``NOT_PASSED``. Reads no array data of a pytree; an item that is none,
    like ``Files``, is read and verified here. Differences between leaves are in ``ItemPlan.match``; other misfits raise.
    """
    if isinstance(like, Files | Json | SavedFiles | type):
        if non_tree.wants_json(saved, like):
            return _plan_as_saved(saved, replace(request, only=None)).then(non_tree.as_json)
        non_tree.refuse_other_form(checkpoint, saved, like)
    if like is ...:
        return ItemPlan(saved, constant(...))
    adapter, copy = None if like is NOT_PASSED else _adapters.adapter_for(like), None
    if not request.restores and like is not NOT_PASSED:
        copy = copier(like, saved.name)
        if adapter is not None:
            like, copy = copy(like), None
    if saved.form == "numpy_key":
        assert isinstance(saved, OrbaxItem)
        tree = with_specs(checkpoint, replace(saved, form="tree"))
        plan = _plan_as_saved(tree, replace(request, dtype=""))
        # the tuple or dict that numpy's ``set_state`` takes
        return plan.then(lambda value: value if isinstance(value, dict) else tuple(value))
    if saved.form != "tree":
        return non_tree.plan_non_tree(checkpoint, saved, adapter, like)
    # arrays of an Orbax item are opened to learn the spec of every leaf
    item = with_specs(checkpoint, saved) if isinstance(saved, OrbaxItem) else saved
    if request.select:
        target = None if like is NOT_PASSED else like
        wanted = None if request.only is None else selection(request.only, item.name, target)
        item = under_select(checkpoint.path, item, request.select, wanted)
    if like is NOT_PASSED:
        return _plan_as_saved(item, request)
    if getattr(adapter, "per_process", False):
        raise non_tree.other_kind(checkpoint, item, "a tree of arrays", type(like).__name__)
    if getattr(adapter, "accepts_any_structure", False):
        if request.rules and under_rules(item, request.rules, (), ())[0].rules:
            raise TypeError(
                f"item {item.name!r}: rules= need a target with a structure of its own: pass a tree of arrays"
            )
        return _plan_object(item, adapter, like, request)
    live: list[tuple[Any, bool]] = []
    dicts = dict[Path, tuple[Node, int]]()
    expand = _adapters.expander(
        lambda path: constants.unread(item, dicts, path, request), stand_in=copy, live=live
    )
    wanted = TargetTree.of(like, flatten(like, expand=expand, keep=True), live)
    return _plan_strict(item, wanted, request)


def _plan_strict(item: SavedItem, wanted: TargetTree, request: Request) -> ItemPlan:
    """The plan for a target that the item must match, except for what the request allows."""
    like, flat, live = wanted.like, wanted.flat, wanted.live
    problems: list[Mismatch] = []
    if request.rules is not None:
        item, problems = under_rules(item, request.rules, flat.paths, wanted.specs)
    found = _matched(item, wanted, request)
    found.mismatches += problems
    at_once = not live or not request.restores or request.options.atomic_restore
    set_leaves = None if at_once else getattr(_adapters.adapter_for(like), "set_leaves", None)
    set_parts = set_leaves and functools.partial(set_leaves, like)
    wants = dict[int, Want]()
    if not found.mismatches:
        results, entries = list[int](), list[tuple[int, LeafSpec, Any]]()
        for result, position in enumerate(found.source):
            if position is None or (saved := item.specs[position]).kind in TEXT_KINDS:
                continue
            spec = wanted.specs[result] or saved
            if spec.kind in PYTHON_NUMBERS:
                spec = targets.kind_of_result(saved, spec)
            results.append(result)
            entries.append((position, spec, wanted.leaves[result]))
        made = targets.wants_of(item, entries, request.sharding)
        pairs = list(zip(results, made, strict=True))
        if isinstance(item, DerivedItem):  # parts of one array are read together
            recipes = item.recipes
            pairs.sort(key=lambda pair: recipes[pair[1].leaf].first)
        wants = dict(pairs)
        if request.sharding is None and set_parts is None:  # else each frees an old array
            targets.check_room(item, made, [leaf for _, _, leaf in entries])
    return ItemPlan(
        item,
        functools.partial(unflatten, flat.root),
        found.source,
        flat.leaves,
        wants,
        found,
        flat.paths,
        live,
        set_parts=set_parts,
        leaves_now=lambda: flatten(like, expand=_adapters.expander()).leaves if live else (),
    )


def _matched(item: SavedItem, wanted: TargetTree, request: Request) -> Match:
    """For each leaf of the target the position of its saved leaf; and all differences."""
    rules, left_alone = request.matching, frozenset[str]()
    flat, places = wanted.flat, wanted.places
    # else the paths are those of the target
    aligns = wanted.live and hasattr(_adapters.adapter_for(wanted.like), "align")
    if aligns or rules.rename is not None or not isinstance(item, NativeItem):
        item, rules, left_alone = under_wanted_paths(item, wanted, request)
    selected = None if request.only is None else selection(request.only, item.name, wanted.like)
    everything = selected is None
    if left_alone:
        selected = _less(selected, lambda path: format_path(path) in left_alone)
    loaded = selected
    if places:
        cover, rename = covers(places), rules.rename
        loaded = _less(selected, lambda path: cover(path) or cover(renamed_path(path, rename)))
    found = match(
        list(zip(item.paths, item.specs, strict=True)),
        list(zip(flat.paths, wanted.specs, strict=True)),
        rules,
        selected=loaded,
        item=item.name or None,
    )
    if places and rules.missing != "keep":
        found.mismatches += _placeholders_for_nothing(places, item, rules)
    before, now = code_and_constants(item.root), code_and_constants(flat.root)
    if before != now or (now and rules.rename is not None):
        constants.compare(found, item, flat, rules, everything)
    if None in found.source:
        _refuse_abstract_kept(found, wanted, item, everything, selected)
    if wanted.live and selected is not None and not found.mismatches:
        _warn_of_abstract_rest(found, wanted, item)
    return found


def _plan_as_saved(item: SavedItem, request: Request) -> ItemPlan:
    """The plan without a target: all leaves, or those that ``only=`` selects, as saved."""
    selected = None if request.only is None else selection(request.only, item.name, None)
    positions: Sequence[int] = range(len(item.paths))
    if selected is not None:
        positions = positions_of(item.paths, item.specs, selected)
    one_of = {id(spec): spec for spec in item.specs}  # thousands of leaves share few
    becomes = {key: targets.spec_as_saved(spec, request) for key, spec in one_of.items()}
    results, entries = list[int](), list[tuple[int, LeafSpec, None]]()
    for result, position in enumerate(positions):
        spec = becomes[id(item.specs[position])]
        if spec.kind not in TEXT_KINDS:
            results.append(result)
            entries.append((position, spec, None))
    wants = targets.wants_of(item, entries, request.sharding, request.as_numpy)
    if request.sharding is None and not request.as_numpy:
        targets.check_room(item, wants)
    root = item.root
    if selected is not None:
        root = pruned(root, set(positions)) or Node("dict")
    elif request.matching.rename is None and code_and_constants(root):
        constants.refuse_without_functions(item, root)
    make: Make = functools.partial(unflatten, root)
    renamed = request.matching.rename
    if renamed is not None:
        names = renamed_names(item, renamed)
        make = functools.partial(renamed_dicts, [names[at] for at in positions])
    return ItemPlan(
        item, make, positions, [None] * len(positions), dict(zip(results, wants, strict=True))
    )


def _plan_object(item: SavedItem, adapter: Any, like: Any, request: Request) -> ItemPlan:
    """The plan for a user's object that gets exactly what was saved; arrays go where its arrays of equal path and shape lie."""
    flat = flatten(adapter.get_state(like), expand=_adapters.expander(sets=False), keep=True)
    now = dict(zip(flat.paths, flat.leaves, strict=True))
    # use its present container classes if they are the saved ones: they need not be importable
    same = constants.without_static(flat.root) == constants.without_static(item.root)
    found = Match()
    if same and flat.root != item.root and request.only is None:
        constants.compare(found, item, flat, request.matching, everything=True)
    item = replace(
        item, root=flat.root if same else constants.with_functions_of(flat.root, item.root)
    )
    plan = _plan_as_saved(item, request)
    read = {at: result for result, at in enumerate(plan.positions) if at is not None}
    if item.paths and not read:
        return ItemPlan(item, constant(like))
    lacking = [
        item.differs(path, "unexpected", item.specs[at], None)
        for at, path in enumerate(item.paths)
        if at not in read and path not in now
    ]
    if lacking:
        raise StructureMismatch(
            lacking,
            advice="only= keeps what the object has there, and it has nothing: leave out only=, or give the object these "
            "leaves first.",
        )
    wants = {want.leaf: want for want in plan.wants.values()}
    for at in wants:
        leaf, spec = now.get(item.paths[at]), item.specs[at]
        fits = isinstance(leaf, jax.Array) and tuple(leaf.shape) == spec.shape
        if fits and spec.kind in ("jax", "key"):
            (wants[at],) = targets.wants_of(item, [(at, spec, leaf)])

    def make(leaves: list[Any]) -> Any:
        adapter.set_state(like, unflatten(item.root, leaves))
        return like

    positions = [at if at in read else None for at in range(len(item.paths))]
    kept = [None if at in read else now[path] for at, path in enumerate(item.paths)]
    return ItemPlan(item, make, positions, kept, wants, found, live=[(like, False)])


def selection(only: Any, item: str, like: Any) -> Predicate | None:
    """The function of (path, spec) that ``only=`` stands for; None: all. TypeError for a filter that no adapter here knows."""
    adapter = None if like is None else _adapters.adapter_for(like)
    is_filter = getattr(adapter, "is_filter", None)
    if isinstance(only, type) or (is_filter is not None and is_filter(only)):
        select = getattr(adapter, "select", None)
        if select is None:
            raise TypeError(
                f"only={getattr(only, '__name__', only)}: item {item!r} has no adapter that knows this class as a filter: "
                'use a pattern such as only="params/**"'
            )
        return select(like, only)
    return selector(only, item=item)


def _less(selected: Predicate | None, left_out: Callable[[Path], bool]) -> Predicate:
    """The selection without the paths that are left out."""

    def selects(path: Path, spec: LeafSpec) -> bool:
        return not left_out(path) and (selected is None or selected(path, spec))

    return selects


def _placeholders_for_nothing(
    places: Sequence[Path], item: SavedItem, rules: MatchRules
) -> list[Mismatch]:
    """A mismatch for each placeholder below which nothing was saved."""
    saved: set[tuple[str, ...]] = set()
    for path in item.paths:
        text = tuple(map(str, renamed_path(path, rules.rename)))
        saved.update(text[:length] for length in range(len(text) + 1))
    return [
        item.differs(path, "missing", None, "anything, to be left out")
        for path in places
        if tuple(map(str, path)) not in saved
    ]


def _refuse_abstract_kept(
    found: Match, wanted: TargetTree, item: SavedItem, everything: bool, selected: Predicate | None
) -> None:
    """Adds to ``found`` a mismatch for each leaf that must come from the checkpoint and is missing there: abstract leaves and
    deleted arrays hold no value to keep. Beside ``only=`` abstract leaves may stay, but none that is wanted as it was saved.
    """
    places = {
        entry.path: at for at, entry in enumerate(found.mismatches) if entry.kind == "missing"
    }
    without_value = (LeafSpec, jax.ShapeDtypeStruct) if everything else LeafSpec
    leaves = zip(wanted.flat.paths, wanted.leaves, wanted.specs, found.source, strict=True)
    for path, leaf, spec, source in leaves:
        if source is not None:
            continue
        chosen = selected is None or (spec is not None and selected(path, spec))
        deleted = chosen and targets.is_deleted(leaf)
        if not deleted and not isinstance(leaf, without_value):
            continue
        why = "deleted: donated, or by a restore that failed" if deleted else "abstract"
        now = "as saved" if spec is None else f"{spec} ({why})"
        at = places.get(format_path(path))
        if at is None:
            found.mismatches.append(item.differs(path, "missing", None, now))
        else:
            found.mismatches[at] = replace(found.mismatches[at], wanted=now)


def _warn_of_abstract_rest(found: Match, wanted: TargetTree, item: SavedItem) -> None:
    """Warns if ``only=`` leaves leaves of a live object abstract: it cannot compute with them."""
    rest = [
        format_path(path)
        for path, leaf, source in zip(wanted.flat.paths, wanted.leaves, found.source, strict=True)
        if source is None and isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if rest:
        warnings.warn(
            f"item {item.name or 'state'!r}: only= leaves {len(rest)} leaves of an abstract object without a value: "
            f"{some(rest)}. Set them before the object is used, or restore all of it",
            UserWarning,
            stacklevel=2,
        )


def copier(like: Any, item: str = "") -> Callable[[Any], Any]:
    """The function from a live object in ``like`` to its copy. Its first call copies all, together: if originals share arrays or
    submodules, their copies do, too. ``item`` is for messages.
    """
    made: dict[int, Any] = {}

    def copy(obj: Any) -> Any:
        if not made:
            of_adapter: dict[int, dict[int, tuple[Path, Any]]] = {}
            for path, one in _adapters.live_objects(like):
                found = of_adapter.setdefault(id(_adapters.adapter_for(one)), {})
                found.setdefault(id(one), (path, one))
            for found in of_adapter.values():
                originals = [one for _, one in found.values()]
                copy_all = getattr(_adapters.adapter_for(originals[0]), "copy", None)
                copies = copy_all(originals) if copy_all else [None] * len(originals)
                for (path, one), copied in zip(found.values(), copies, strict=True):
                    if copied is None:
                        where, name = format_path(path), type(one).__name__
                        as_item = item if item.isidentifier() else "state"
                        raise UnsupportedLeaf(
                            f"{where}: load changes nothing that it is given, and {with_article(name)} cannot be copied. To "
                            f"set it in place, use restore(path, {as_item}=...); to get only the saved values, leave it out of like",
                            leaf=where,
                            type_name=name,
                        )
                    made[id(one)] = copied
        return made[id(obj)]

    return copy


def detached(like: Any) -> Any:
    """``like`` with a copy of each live object, so that the caller may change the originals."""
    copy = copier(like)

    def expand(obj: Any, _: Path) -> Any:
        return None if _adapters.adapter_for(obj) is None else ((), lambda _: copy(obj))

    flat = flatten(like, expand=expand, keep=True)
    return unflatten(flat.root, flat.leaves)
