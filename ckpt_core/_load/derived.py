"""What ``rules=`` and ``select=`` make of the arrays of an item."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._format.recipes import Cut, Recipe, View, indexed, unchanged
from ckpt_core._format.rules import Bound, Rule, bind, dimensions, resized, view_of, with_places
from ckpt_core._layout.regions import Shape, whole
from ckpt_core._load.renames import paths_of_names
from ckpt_core._saved import DerivedItem, ExtentItem, SavedItem
from ckpt_core._tree import Path, format_path
from ckpt_core._tree.leaves import LeafSpec, leaf_spec
from ckpt_core._tree.match import parse_path
from ckpt_core._tree.patterns import Predicate, selector

_MOST_LEAVES = 100_000
"""Of one stacked array: a forged size could ask for any number."""
_ARRAYS = ("jax", "numpy")
_Made = tuple[LeafSpec, Recipe]
"""Description and recipe of a leaf that a rule makes."""


@dataclass(frozen=True)
class _Names:
    """The arrays of an item by the names that rules have for them, and the shapes of a target by its paths."""

    item: SavedItem
    at: Mapping[str, int]  # position of each name
    shapes: Mapping[str, Shape | None]  # None: any
    key: Callable[[str], str]  # of a path as text, in ``shapes``

    def specs(self, names: Sequence[str]) -> list[LeafSpec]:
        return [self.item.specs[self.at[name]] for name in names]


def under_rules(
    item: SavedItem, rules: Sequence[Rule], paths: Sequence[Path], wanted: Sequence[LeafSpec | None]
) -> tuple[DerivedItem, list[Mismatch]]:
    """The leaves that rules make of an item (the others stay), and what hinders some. ``wanted`` are specs of ``paths``, or None."""
    of_file = isinstance(item, ExtentItem)
    texts = [str(path[0]) if of_file else format_path(path) for path in item.paths]

    def key(path: str) -> str:
        return path.replace("/", ".") if of_file else path

    there = {key(format_path(path)): (path, spec) for path, spec in zip(paths, wanted, strict=True)}
    shapes = {name: spec and spec.shape for name, (_, spec) in there.items()}
    names = _Names(item, {text: at for at, text in enumerate(texts)}, shapes, key)
    bounds, left = bind(rules, texts, "." if of_file else "./")
    own = paths_of_names(left, paths) if of_file else [item.paths[names.at[name]] for name in left]
    made = [_as_saved(item, names.at[name]) for name in left]
    results, problems = list[str](), list[Mismatch]()
    for bound in bounds:
        rule = bound.rule
        if not (rule.joins or rule.groups or rule.transpose or rule.stack):  # any leaf is renamed
            results += bound.results
            made.append(_as_saved(item, names.at[bound.sources[0][0]]))
            continue
        found = _problems(bound, names) or _without_shape(bound, names)
        problems += found
        for path, one in () if found else _made(bound, names):
            results.append(path)
            made.append(one)
    own += [there[key(path)][0] if key(path) in there else parse_path(path) for path in results]
    once = dict[str, tuple[Path, _Made]]()
    for path, one in zip(own, made, strict=True):
        if once.setdefault(name := key(format_path(path)), (path, one))[1] is not one:
            problems.append(item.differs(name, "shape", "2 tensors", "one, by the rules"))
    fitting = frozenset(bound.rule for bound in bounds)
    return _derived(item, list(once.values()), fitting), problems


def _as_saved(item: SavedItem, leaf: int) -> _Made:
    return item.specs[leaf], Recipe.of(Cut(leaf, whole(item.specs[leaf].stored_shape)))


def _derived(
    item: SavedItem, made: Sequence[tuple[Path, _Made]], rules: frozenset[Rule] = frozenset()
) -> DerivedItem:
    recipes = [recipe for _, (_, recipe) in made]
    of_item: dict[str, Any] = {one.name: getattr(item, one.name) for one in fields(SavedItem)}
    of_item |= {
        "paths": [path for path, _ in made],
        "specs": [spec for _, (spec, _) in made],
        "shardings": [_sharding(item, spec, recipe) for _, (spec, recipe) in made],
        "names": item.names_of(recipe.first for recipe in recipes),
    }
    return DerivedItem(**of_item, base=item, recipes=recipes, rules=rules)


def _sharding(item: SavedItem, spec: LeafSpec, recipe: Recipe) -> dict[str, Any] | None:
    """The sharding of the first array that a leaf is made of, in the dimensions that both have whole."""
    described, sizes = item.shardings[recipe.first], item.specs[recipe.first].shape
    saved = described and described.get("partition_spec")
    as_stored = recipe.is_all_of(item.specs[recipe.first].stored_shape)
    if described is None or as_stored or not isinstance(saved, list):
        return described
    return described | {
        "partition_spec": [
            saved[axis] if axis is not None and axis < len(saved) and sizes[axis] == size else None
            for axis, size in zip(recipe.axes, spec.shape, strict=False)
        ]
    }


def _problems(bound: Bound, names: _Names) -> list[Mismatch]:
    """What hinders the arrays of a rule from being put together."""
    rule, item = bound.rule, names.item
    known = [name for row in bound.sources for name in row]
    if bound.missing:
        text = f"{bound.missing} more tensors {' and '.join(rule.sources)}, beside {known[-1]}"
        return [item.differs(" and ".join(bound.results), "missing", None, text)]
    specs = names.specs(known)
    pairs, first, found = list(zip(known, specs, strict=True)), specs[0], list[Mismatch]()
    if odd := [pair for pair in pairs if pair[1].kind not in _ARRAYS]:
        return [item.differs(name, "kind", spec, "an array, by its rule") for name, spec in odd]
    stacked = len(rule.stack) if rule.unstacks else 0
    count = len(first.shape) - stacked
    added = 0 if rule.unstacks else dimensions(rule, count) - count
    needed = len(rule.groups) if rule.groups is not None else len(rule.transpose or range(count))
    needed = max(needed, rule.axis + 1 if rule.joins else 0, rule.stack_axis - added)
    if needed != count:
        wanted = f"{needed + stacked} dimensions, by its rule"
        return [item.differs(known[0], "shape", first, wanted)]
    if math.prod(_stacked(rule, first.shape)) > _MOST_LEAVES:
        wanted = f"at most {_MOST_LEAVES:,} leaves of its rule"
        return [item.differs(known[0], "shape", first, wanted)]
    axis = rule.axis + (stacked if rule.axis >= rule.stack_axis else 0)
    for name, spec in pairs:
        joins = len(rule.sources) > 1 and len(spec.shape) == len(first.shape)
        rest, asked = (resized(one.shape, axis, 0) if joins else one.shape for one in (spec, first))
        if rest != asked or spec.dtype != first.dtype:
            kind = "shape" if rest != asked else "dtype"
            found.append(item.differs(name, kind, spec, f"one that fits {known[0]}, {first}"))
    rows = [[spec.shape for spec in names.specs(row)] for row in bound.sources]
    uneven = next((n for n, row in enumerate(rows) if row != rows[0]), None)
    if not found and uneven is not None:
        wanted, odd_one = f"sizes as in {known[0]}", bound.sources[uneven][0]
        found.append(item.differs(odd_one, "shape", rows[uneven], wanted))
    return found


def _stacked(rule: Rule, shape: Shape) -> Shape:
    """The sizes of the dimensions that a rule takes apart."""
    return shape[rule.stack_axis :][: len(rule.stack)] if rule.unstacks else ()


def _without_shape(bound: Bound, names: _Names) -> list[Mismatch]:
    """The places of the target that take anything, where the rule needs a shape to cut tensors by."""
    groups = bound.rule.groups or ()
    if len(bound.results) == 1 and all(len(group) == 1 for group in groups):
        return []
    expected = "a leaf with a shape, by which its rule cuts tensors"
    asked = [path for path in bound.results if names.shapes.get(names.key(path), ()) is None]
    return [names.item.differs(path, "shape", "any", expected) for path in asked]


def _made(bound: Bound, names: _Names) -> Iterator[tuple[str, _Made]]:
    """Path and making of each leaf that a rule makes; in a shape that differs from the wanted one, if they do not fit it."""
    rule, specs = bound.rule, names.item.specs
    rows = [[names.at[name] for name in row] for row in bound.sources]
    sizes = _stacked(rule, specs[rows[0][0]].shape)
    dropped = tuple(range(rule.stack_axis, rule.stack_axis + len(sizes)))
    for at in itertools.product(*map(range, sizes)):
        numbers = dict(zip(dropped, at, strict=True))

        def part(leaf: int, numbers: Mapping[int, int] = numbers) -> Cut:
            region = list(whole(specs[leaf].shape))
            for axis, n in numbers.items():
                region[axis] = n, n + 1
            return Cut(leaf, tuple(region), dropped)

        values = dict(zip(rule.stack, map(str, at), strict=False))
        results = [with_places(path, values) for path in bound.results]
        yield from _of_rows(bound, names, results, [tuple(map(part, row)) for row in rows])


def _of_rows(
    bound: Bound, names: _Names, results: Sequence[str], rows: Sequence[tuple[Cut, ...]]
) -> Iterator[tuple[str, _Made]]:
    """The leaves that a rule makes of rows of parts."""
    rule, counts, sizes = bound.rule, bound.counts, [part.shape for part in rows[0]]
    first = names.item.specs[rows[0][0].leaf]
    joined = sizes[0]
    if len(sizes) > 1:
        joined = resized(joined, rule.axis, sum(size[rule.axis] for size in sizes))
    views = [
        _view(rule, names.shapes.get(names.key(path)), len(counts), len(joined)) for path in results
    ]
    cut = [joined]
    if len(results) > 1:
        cut = [
            joined if view is None else resized(joined, rule.axis, view.tensor[rule.axis])
            for view in views
        ]
        if sum(shape[rule.axis] for shape in cut) != joined[rule.axis]:
            cut = [joined] * len(cut)  # they do not fit: reported as a difference of shapes
    begin = 0
    for path, view, shape in zip(results, views, cut, strict=True):
        if view is None or view.tensor != shape:
            view = unchanged(shape)
            plain = rule.groups is None or all(len(group) == 1 for group in rule.groups)
            if plain and rule.transpose is not None:
                view = replace(view, transpose=rule.transpose)
        of_leaf = rows
        if shape != joined:
            region = list(whole(shape))
            region[rule.axis] = begin, begin + shape[rule.axis]
            begin += shape[rule.axis]
            of_leaf = [(part.within(tuple(region)),) for (part,) in rows]
        stacked = tuple(zip(itertools.product(*map(range, counts)), of_leaf, strict=True))
        leaf = (*view.leaf[: rule.stack_axis], *counts, *view.leaf[rule.stack_axis :])
        spec = leaf_spec(first.kind, first.dtype, leaf)
        yield path, (spec, Recipe(stacked, view, rule.axis, rule.stack_axis))


def _view(rule: Rule, wanted: Shape | None, stacked: int, joined: int) -> View | None:
    """The view of a tensor that has the wanted shape; None if any will do, or none has it. The numbers count dimensions."""
    if wanted is None:
        return None
    row = (*wanted[: rule.stack_axis], *wanted[rule.stack_axis + stacked :]) if stacked else wanted
    view = view_of(rule, row)
    return view if view is not None and len(view.groups) == joined else None


def under_select(
    where: str, item: SavedItem, select: Mapping[str, tuple[Any, ...]], wanted: Predicate | None
) -> SavedItem:
    """The item with the parts of ``wanted`` arrays that ``select=`` takes; itself if no pattern fits. Raises StructureMismatch."""
    made, problems, changed = list[tuple[Path, _Made]](), list[Mismatch](), False
    chosen = [(one, selector(one, item=item.name)) for one in select]
    for leaf, (path, spec) in enumerate(zip(item.paths, item.specs, strict=True)):
        made.append((path, _as_saved(item, leaf)))
        if wanted is not None and not wanted(path, spec):
            continue
        as_file = tuple(str(path[0]).split(".")) if isinstance(item, ExtentItem) else path
        fit = [one for one, fits in chosen if fits and (fits(path, spec) or fits(as_file, spec))]
        changed = changed or bool(fit)
        try:
            if len(fit) > 1:
                raise IndexError(f"{fit[0]!r} and {fit[1]!r} take parts of it")
            if fit and spec.kind not in _ARRAYS:
                raise IndexError("only arrays have parts")
            for one in fit:
                part = indexed(leaf, spec.shape, select[one])
                as_part = leaf_spec(spec.kind, spec.dtype, part.shape, spec.detail)
                made[leaf] = path, (as_part, Recipe.of(part))
        except IndexError as error:
            problems.append(item.differs(path, "select", spec, error))
    if problems:
        raise StructureMismatch(problems, where=where)
    return _derived(item, made) if changed else item
