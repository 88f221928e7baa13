"""The way back through rules: which saved tensors the leaves of a state make. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch
from ckpt_core._format.recipes import View
from ckpt_core._format.rules import Rule, dimensions, fits, resized, view_of, with_places
from ckpt_core._tree.leaves import LeafSpec

_Array = np.ndarray


@dataclass(frozen=True)
class Export:
    """One tensor to write, and the leaves that make it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaves: tuple[int, ...]  # positions of those that are joined to it
    index: tuple[int, ...] = ()  # the row of their stacked dimensions
    rule: Rule | None = None  # None for a leaf that is written as it is
    part: tuple[int, int] = (0, 0)  # start and stop along the rule's axis, if the leaf is split

    def make(self, arrays: Sequence[_Array]) -> _Array:
        """The tensor, of these parts of its leaves: of each the row ``index``."""
        if self.rule is None:
            return arrays[0]
        views = [_view(self.rule, array.shape) for array in arrays]
        joined = [
            array.transpose(view.back).reshape(view.tensor)
            for array, view in zip(arrays, views, strict=True)
        ]
        array = joined[0] if len(joined) == 1 else np.concatenate(joined, self.rule.axis)
        if array.ndim:
            array = array[(*[slice(None)] * self.rule.axis, slice(*self.part))]
        return array


def exports(rules: Sequence[Rule], paths: Sequence[str], specs: Sequence[LeafSpec]) -> list[Export]:
    """The tensors that leaves make by the rules of a load taken backwards; others keep their path, with dots for ``/``."""
    if odd := [rule for rule in rules if rule.unstacks or rule.stack_axis]:
        raise CheckpointError(
            f"{odd[0]}: an export takes no rule backwards that has stack_axis=, or in stack= places of the wanted path: load "
            "by it, save that, and export it without the rule"
        )
    rules = [rule if rule.joins else replace(rule, axis=0) for rule in rules]
    found, left = fits([(rule.results, ()) for rule in rules], paths, "/")
    at = {path: leaf for leaf, path in enumerate(paths)}
    made = [
        Export(path.replace("/", "."), specs[at[path]].dtype, specs[at[path]].shape, (at[path],))
        for path in left
    ]
    problems: list[Mismatch] = []
    for (number, fixed), names in found.items():
        rule, leaves = rules[number], {part: at[name] for (_, part), name in names.items()}
        wrong = _problem(rule, [leaves.get(n) for n in range(len(rule.results))], paths, specs)
        if wrong is None:
            members = tuple(leaves[n] for n in range(len(rule.results)))
            made += _tensors(rule, dict(fixed), members, specs)
        else:
            problems.append(wrong)
    seen: set[str] = set()
    for one in made:
        if one.name in seen:
            text = f"a name that {paths[one.leaves[0]]} has alone"
            problems.append(Mismatch(one.name, "shape", "two leaves", text))
        seen.add(one.name)
    if problems:
        raise StructureMismatch(
            problems, advice="The rules cannot be taken backwards for these leaves."
        )
    return made


def _problem(
    rule: Rule, leaves: Sequence[int | None], paths: Sequence[str], specs: Sequence[LeafSpec]
) -> Mismatch | None:
    """Why leaves cannot be taken back through a rule; None if they can."""
    known = [leaf for leaf in leaves if leaf is not None]
    first = known[0]
    if len(known) < len(leaves):
        lost = rule.results[leaves.index(None)]
        return Mismatch(lost, "missing", None, f"a leaf beside {paths[first]}")
    count = len(rule.stack)
    for leaf in known:
        rest = specs[leaf].shape[count:]
        if len(specs[leaf].shape) < count or view_of(rule, rest) is None:
            expected = f"{count + dimensions(rule, len(rest))} dimensions, by its rule"
            return Mismatch(paths[leaf], "shape", str(specs[leaf]), expected)
        same = specs[leaf].shape[:count] == specs[first].shape[:count]
        shapes = (_shape(rule, rest), _shape(rule, specs[first].shape[count:]))
        fits = len({resized(shape, rule.axis, 0) for shape in shapes}) == 1
        if not same or not fits or specs[leaf].dtype != specs[first].dtype:
            return Mismatch(paths[leaf], "shape", str(specs[leaf]), f"one that fits {paths[first]}")
    shape = _shape(rule, specs[first].shape[count:])
    if rule.joins and len(shape) <= rule.axis:
        return Mismatch(paths[first], "shape", str(specs[first]), f"a dimension {rule.axis}")
    if len(rule.sources) > 1 and _sizes(rule, shape[rule.axis]) is None:
        expected = f"{len(rule.sources)} parts of sizes= along axis {rule.axis}"
        return Mismatch(paths[first], "shape", str(specs[first]), expected)
    return None


def _sizes(rule: Rule, size: int) -> tuple[int, ...] | None:
    """How a dimension is cut into the saved tensors; None if that is not known, or does not fit."""
    if rule.sizes is not None:
        return rule.sizes if sum(rule.sizes) == size else None
    count = len(rule.sources)
    return None if size % count else (size // count,) * count


def _tensors(
    rule: Rule, places: Mapping[str, str], leaves: tuple[int, ...], specs: Sequence[LeafSpec]
) -> list[Export]:
    count = len(rule.stack)
    shapes = [_shape(rule, specs[leaf].shape[count:]) for leaf in leaves]
    shape = shapes[0]
    if len(shapes) > 1:
        shape = resized(shape, rule.axis, sum(one[rule.axis] for one in shapes))
    sizes = (shape[rule.axis] if shape else 1,)
    if len(rule.sources) > 1:
        sizes = _sizes(rule, sizes[0]) or sizes
    made: list[Export] = []
    for index in np.ndindex(*specs[leaves[0]].shape[:count]):
        named = {**places, **{place: str(n) for place, n in zip(rule.stack, index, strict=True)}}
        start = 0
        for source, size in zip(rule.sources, sizes, strict=True):
            name = with_places(source, named)
            part = resized(shape, rule.axis, size)
            made.append(
                Export(
                    name, specs[leaves[0]].dtype, part, leaves, index, rule, (start, start + size)
                )
            )
            start += size
    return made


def _shape(rule: Rule, leaf: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the tensor that has a row of a leaf as its view."""
    return _view(rule, leaf).tensor


def _view(rule: Rule, leaf: tuple[int, ...]) -> View:
    view = view_of(rule, leaf)
    assert view is not None  # _problem has compared the dimensions
    return view
