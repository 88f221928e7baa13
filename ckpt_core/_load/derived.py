"""What ``rules=`` make of the tensors of a file, for one target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch
from ckpt_core._format.rules import Bound, Rule, bind
from ckpt_core._saved import (
    DerivedItem,
    ExtentItem,
    Recipe,
    SavedItem,
    Source,
)
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
    """The leaves that rules make of an item; a tensor that no rule names stays as it is.

    Args:
        where: path of the checkpoint, for messages.
        item: its item.
        rules: the rules.
        paths: paths of the target.
        wanted: spec of each leaf of the target, by which tensors are cut; None for one that takes any.

    Raises:
        StructureMismatch: a tensor is missing between others that are stacked or joined, or those that are
            joined do not fit together.
        CheckpointError: the item is no file of tensors.
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
    made: list[_Made] = [_as_it_is(name, position[name], item.specs) for name in left]
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


def _as_it_is(name: str, leaf: int, specs: Sequence[LeafSpec]) -> _Made:
    spec = specs[leaf]
    return name, spec, _recipe((Source(leaf, (), 0),), 0, spec.shape)


def _recipe(
    sources: tuple[Source, ...],
    axis: int,
    shape: tuple[int, ...],
    groups: tuple[tuple[int, ...], ...] | None = None,
    transpose: tuple[int, ...] | None = None,
) -> Recipe:
    groups = groups or tuple((axis,) for axis in range(len(shape)))
    return Recipe(sources, axis, groups, shape, transpose or tuple(range(len(shape))))


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
        told = f"{dimensions} dimensions, by its rule"
        found.append(Mismatch(known[0], "shape", str(first), told, None, item.name))
    for name, spec in zip(known, specs, strict=True):
        rest, asked = _without(spec.shape, rule.axis), _without(first.shape, rule.axis)
        alike = (rest == asked) if len(rule.sources) > 1 else (spec.shape == first.shape)
        if not alike or spec.dtype != first.dtype:
            kind = "shape" if not alike else "dtype"
            told = f"one that fits {known[0]}, {first}"
            found.append(Mismatch(name, kind, str(spec), told, None, item.name))
    rows = [[item.specs[position[name]].shape for name in row] for row in bound.sources]
    uneven = next((n for n, row in enumerate(rows) if row != rows[0]), None)
    if not found and uneven is not None:
        told = f"sizes as in {known[0]}"
        name = bound.sources[uneven][0]
        found.append(Mismatch(name, "shape", str(rows[uneven]), told, None, item.name))
    return found


def _without_shape(bound: Bound, shapes: _Shapes, item: ExtentItem) -> list[Mismatch]:
    """The places of the target that take anything, where the rule needs a shape to cut tensors by."""
    groups = bound.rule.groups or ()
    if len(bound.results) == 1 and all(len(group) == 1 for group in groups):
        return []
    asked = [path for path in bound.results if shapes.get(path.replace("/", "."), ()) is None]
    told = "a leaf with a shape, by which its rule cuts tensors"
    return [Mismatch(path, "shape", "any", told, None, item.name) for path in asked]


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _made(
    bound: Bound, item: ExtentItem, position: Mapping[str, int], shapes: _Shapes
) -> list[_Made]:
    """The leaves that a rule makes; in a shape that differs from the wanted one, if they do not fit it."""
    rule = bound.rule
    firsts = [item.specs[position[name]] for name in bound.sources[0]]
    sizes = [spec.shape[rule.axis] if spec.shape else 1 for spec in firsts]
    joined = _with(firsts[0].shape, rule.axis, sum(sizes))
    indices = _indices(bound.counts)
    targets = [
        _reshaped(rule, shapes.get(path.replace("/", ".")), len(bound.counts), len(joined))
        for path in bound.results
    ]
    cut = [joined]
    if len(bound.results) > 1:
        cut = [
            joined if one is None else _with(joined, rule.axis, _merged(rule, one)[rule.axis])
            for one in targets
        ]
        if sum(shape[rule.axis] for shape in cut) != joined[rule.axis]:
            cut = [joined] * len(cut)  # they do not fit: told as a difference of shapes
    made: list[_Made] = []
    begin = 0
    for path, target, shape in zip(bound.results, targets, cut, strict=True):
        sources: list[Source] = []
        for index, row in zip(indices, bound.sources, strict=True):
            start = -begin
            for name, size in zip(row, sizes, strict=True):
                sources.append(Source(position[name], index, start))
                start += size
        fits = target is not None and _merged(rule, target) == shape
        groups = rule.groups if fits else None
        plain = rule.groups is None or all(len(group) == 1 for group in rule.groups)
        transpose = rule.transpose if fits or plain else None
        reshaped = target if fits and target is not None else shape
        recipe = _recipe(tuple(sources), rule.axis, reshaped, groups, transpose)
        result = (*bound.counts, *(recipe.reshaped[axis] for axis in recipe.transpose))
        made.append((path, leaf_spec("jax", firsts[0].dtype, result), recipe))
        if len(bound.results) > 1 and shape != joined:
            begin += shape[rule.axis]
    return made


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :]) if shape else shape


def _indices(counts: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for count in counts:
        found = [(*index, number) for index in found for number in range(count)]
    return found


def _reshaped(
    rule: Rule, wanted: tuple[int, ...] | None, stacked: int, joined: int
) -> tuple[int, ...] | None:
    """The shape of the reshaped tensor, before it is transposed to the wanted shape; None if none fits.

    Args:
        rule: the rule.
        wanted: the wanted shape.
        stacked, joined: number of stacked dimensions, and of those of the joined tensor.
    """
    if wanted is None:
        return None
    shape = wanted[stacked:]
    count = joined if rule.groups is None else sum(map(len, rule.groups))
    if len(shape) != count:
        return None
    transpose = rule.transpose or tuple(range(count))
    return tuple(shape[transpose.index(axis)] for axis in range(count))


def _merged(rule: Rule, reshaped: tuple[int, ...]) -> tuple[int, ...]:
    """The shape before it was reshaped."""
    groups = rule.groups or tuple((axis,) for axis in range(len(reshaped)))
    return tuple(math.prod(reshaped[axis] for axis in group) for group in groups)
