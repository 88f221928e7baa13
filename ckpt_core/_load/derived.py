"""What ``rules=`` make of the tensors of a file, for one target."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch
from ckpt_core._format.rules import Bound, Rule, View, bind, resized, unchanged, view_of
from ckpt_core._saved import DerivedItem, ExtentItem, Recipe, SavedItem
from ckpt_core._tree import LEAF, Node, Path
from ckpt_core._tree.leaves import LeafSpec, leaf_spec

_Shapes = Mapping[str, tuple[int, ...] | None]
"""The shape that each path of the target asks for; None if it takes any."""
_Made = tuple[str, LeafSpec, Recipe]
"""Path, description and recipe of a leaf that a rule makes."""


def under_rules(
    where: str,
    item: SavedItem,
    rules: Sequence[Rule],
    paths: Sequence[Path],
    wanted: Sequence[LeafSpec | None],
) -> DerivedItem:
    """The leaves that rules make of an item; a tensor that no rule names stays as it is. ``wanted`` has a spec for each of the
    target's ``paths``, by which tensors are cut; None takes any. Raises StructureMismatch if tensors to stack or join are
    missing or do not fit together, and CheckpointError if the item is no file of tensors.
    """
    if not isinstance(item, ExtentItem):
        raise CheckpointError(
            f"{where}: rules= are for the names of tensors in safetensors; what a checkpoint holds is "
            "renamed with rename="
        )
    shapes: dict[str, tuple[int, ...] | None] = {
        ".".join(map(str, path)).replace("/", "."): None if spec is None else spec.shape
        for path, spec in zip(paths, wanted, strict=True)
    }
    position = {str(path[0]): number for number, path in enumerate(item.paths)}
    bounds, left = bind(rules, position)
    made: list[_Made] = []
    for name in left:
        spec = item.specs[position[name]]
        made.append((name, spec, Recipe.of(position[name], spec.shape)))
    problems: list[Mismatch] = []
    for bound in bounds:
        found = _problems(bound, item, position) or _without_shape(bound, shapes, item)
        problems += found
        if not found:
            made += _made(bound, item, position, shapes)
    counts = Counter(path.replace("/", ".") for path, _, _ in made)
    problems += [
        Mismatch(path, "shape", f"{count} tensors", "one, by the rules", None, item.name)
        for path, count in counts.items()
        if count > 1
    ]
    if problems:
        raise StructureMismatch(problems, where=where)
    names = tuple(path for path, _, _ in made)
    return DerivedItem(
        name=item.name,
        form="tree",
        root=Node("dict", names, (LEAF,) * len(names)),
        paths=[(name,) for name in names],
        specs=[spec for _, spec, _ in made],
        shardings=[None] * len(names),
        base=item,
        recipes=[recipe for _, _, recipe in made],
    )


def _problems(bound: Bound, item: ExtentItem, position: Mapping[str, int]) -> list[Mismatch]:
    """What hinders the tensors of a rule from being put together."""
    rule, wanted = bound.rule, " and ".join(bound.results)
    known = [name for row in bound.sources for name in row]
    if bound.missing:
        text = f"{bound.missing} more tensors {' and '.join(rule.sources)}, beside {known[-1]}"
        return [Mismatch(wanted, "missing", None, text, None, item.name)]
    specs = [item.specs[position[name]] for name in known]
    first, found = specs[0], list[Mismatch]()
    count = len(first.shape)
    dimensions = len(rule.groups) if rule.groups is not None else len(rule.transpose or first.shape)
    if dimensions != count or (rule.joins and not 0 <= rule.axis < count):
        expected = f"{dimensions} dimensions, by its rule"
        found.append(Mismatch(known[0], "shape", str(first), expected, None, item.name))
    for name, spec in zip(known, specs, strict=True):
        rest, asked = spec.shape, first.shape
        if len(rule.sources) > 1:
            rest, asked = resized(rest, rule.axis, 0), resized(asked, rule.axis, 0)
        alike = rest == asked
        if not alike or spec.dtype != first.dtype:
            kind = "shape" if not alike else "dtype"
            expected = f"one that fits {known[0]}, {first}"
            found.append(Mismatch(name, kind, str(spec), expected, None, item.name))
    rows = [[item.specs[position[name]].shape for name in row] for row in bound.sources]
    uneven = next((n for n, row in enumerate(rows) if row != rows[0]), None)
    if not found and uneven is not None:
        expected = f"sizes as in {known[0]}"
        name = bound.sources[uneven][0]
        found.append(Mismatch(name, "shape", str(rows[uneven]), expected, None, item.name))
    return found


def _without_shape(bound: Bound, shapes: _Shapes, item: ExtentItem) -> list[Mismatch]:
    """The places of the target that take anything, where the rule needs a shape to cut tensors by."""
    groups = bound.rule.groups or ()
    if len(bound.results) == 1 and all(len(group) == 1 for group in groups):
        return []
    asked = [path for path in bound.results if shapes.get(path.replace("/", "."), ()) is None]
    expected = "a leaf with a shape, by which its rule cuts tensors"
    return [Mismatch(path, "shape", "any", expected, None, item.name) for path in asked]


def _made(
    bound: Bound, item: ExtentItem, position: Mapping[str, int], shapes: _Shapes
) -> list[_Made]:
    """The leaves that a rule makes; in a shape that differs from the wanted one, if they do not fit it."""
    rule = bound.rule
    firsts = [item.specs[position[name]] for name in bound.sources[0]]
    sizes = [spec.shape[rule.axis] if spec.shape else 1 for spec in firsts]
    joined = resized(firsts[0].shape, rule.axis, sum(sizes))
    views = [
        _view(rule, shapes.get(path.replace("/", ".")), len(bound.counts), len(joined))
        for path in bound.results
    ]
    cut = [joined]
    if len(bound.results) > 1:
        cut = [
            joined if view is None else resized(joined, rule.axis, view.tensor[rule.axis])
            for view in views
        ]
        if sum(shape[rule.axis] for shape in cut) != joined[rule.axis]:
            cut = [joined] * len(cut)  # they do not fit: reported as a difference of shapes
    made: list[_Made] = []
    begin = 0
    tensors = [tuple(position[name] for name in row) for row in bound.sources]
    rows = tuple(zip(itertools.product(*map(range, bound.counts)), tensors, strict=True))
    for path, view, shape in zip(bound.results, views, cut, strict=True):
        if view is None or view.tensor != shape:
            view = unchanged(shape)
            plain = rule.groups is None or all(len(group) == 1 for group in rule.groups)
            if plain and rule.transpose is not None:
                view = replace(view, transpose=rule.transpose)
        part = None
        if shape != joined:
            part = begin, begin + shape[rule.axis]
            begin = part[1]
        spec = leaf_spec("jax", firsts[0].dtype, (*bound.counts, *view.leaf))
        made.append((path, spec, Recipe(rows, rule.axis, part, view)))
    return made


def _view(rule: Rule, wanted: tuple[int, ...] | None, stacked: int, joined: int) -> View | None:
    """The view of a tensor that has the wanted shape; None if no view has it, or if any shape will do. ``stacked`` and
    ``joined`` count the stacked dimensions and those of the joined tensor.
    """
    view = None if wanted is None else view_of(rule, wanted[stacked:])
    return view if view is not None and len(view.groups) == joined else None
