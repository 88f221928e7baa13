"""Rules between the tensors of a file and the leaves of a state: names with wildcards, transposes, reshapes, stacks. Pure.

A rule says for some saved names which wanted paths they make: ``Rule("model.layers.{n}.q_proj.weight",
"layers/{n}/q/kernel", transpose=(1, 0))``. In which order it works: a stacked tensor is taken apart; several saved
tensors are concatenated, or one is split; then reshaped; then transposed; then stacked. ``exports`` goes the way back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch
from ckpt_core._format.recipes import View
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core.arguments import an

PLACE = re.compile(r"\{(\w+)\}")
"""A place in a name, that stands for any text without the separator."""
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Rule:
    """How some saved tensors become some wanted leaves.

    Attributes:
        saved: name in the file, or path in the checkpoint as ``rename=`` takes it. ``{word}`` stands for any text
            without a dot, and in a path without a slash. The tensors of several names are concatenated.
        wanted: path in the target, with the same places but those in ``stack``; or several paths, among which one
            tensor is split by the sizes in the target.
        axis: dimension of the saved tensors along which they are concatenated or split.
        reshape: for each dimension of the saved tensor, the dimension of the reshaped one, or several that it is
            cut into: ``((0, 1), 2)`` makes ``[H * D, E]`` a ``[H, D, E]``, of the sizes in the target.
        transpose: for each dimension of the wanted leaf, that of the (reshaped) tensor, as in ``numpy.transpose``.
        stack: places that are numbers from 0 on one side, and on the other dimensions in this order. If ``saved`` has
            them, layers are stacked; if ``wanted`` has them, a stacked tensor becomes a leaf for each layer, and
            the dimensions above do not count the stacked ones.
        sizes: of the several saved tensors along ``axis``, for an export; None if they are equal.
        stack_axis: the first of the stacked dimensions, in the stacked array.

    Example:
        >>> import ckpt_core as ckpt
        >>> ckpt.Rule("layers.{n}.up.weight", "layers/up/kernel", transpose=(1, 0), stack=("n",)).stack
        ('n',)
    """

    saved: str | tuple[str, ...]
    wanted: str | tuple[str, ...]
    axis: int = 0
    reshape: tuple[int | tuple[int, ...], ...] | None = None
    transpose: tuple[int, ...] | None = None
    stack: Sequence[str] = ()
    sizes: tuple[int, ...] | None = None
    stack_axis: int = 0

    def __post_init__(self) -> None:
        for name in _ATTRIBUTES:
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        for name in ("saved", "wanted", "stack"):
            value = getattr(self, name)
            if not isinstance(value, str | tuple) or not all(isinstance(one, str) for one in value):
                raise TypeError(f"{self}: {name} must be a text or a tuple of texts")
        if isinstance(self.stack, str):
            object.__setattr__(self, "stack", (self.stack,))
        if problem := next(self._problems(), ""):
            raise ValueError(f"{self}: {problem}")

    @property
    def sources(self) -> tuple[str, ...]:
        """The saved names."""
        return (self.saved,) if isinstance(self.saved, str) else self.saved

    @property
    def results(self) -> tuple[str, ...]:
        """The wanted paths."""
        return (self.wanted,) if isinstance(self.wanted, str) else self.wanted

    @property
    def joins(self) -> bool:
        """Whether tensors are concatenated or split, for which ``axis`` counts."""
        return len(self.sources) > 1 or len(self.results) > 1

    @property
    def unstacks(self) -> bool:
        """Whether a stacked tensor is taken apart, into paths with the places of ``stack``."""
        return bool(self.stack) and self.stack[0] not in PLACE.findall(self.sources[0])

    def _problems(self) -> Iterator[str]:
        """What is wrong with the attributes, of which each check takes for granted those before it. Rules come from files, too."""
        if not self.sources or not self.results or len(set(self.results)) < len(self.results):
            yield "it needs a saved name and a wanted path, each path once"
        given = self.reshape if isinstance(self.reshape, tuple) else ()
        flat = [n for group in given for n in (group if isinstance(group, tuple) else (group,))]
        for name in ("reshape", "transpose", "sizes"):
            value = getattr(self, name)
            numbers = flat if name == "reshape" else value
            if value is not None and not (isinstance(value, tuple) and _are_counts(numbers)):
                yield f"{name}= must be a tuple of whole numbers from 0"
        if not _are_counts((self.axis, self.stack_axis)):
            yield "axis= and stack_axis= must be dimensions, counted from 0"
        if len(self.sources) > 1 and len(self.results) > 1:
            yield "several names on one side only: they are joined, or split"
        if self.sizes is not None and len(self.sizes) != len(self.sources):
            yield "sizes= must have one size for each saved name"
        places = [PLACE.findall(name) for name in self.sources]
        odd = next((place for place in places[0] if not place.isidentifier()), None)
        if odd is not None:
            yield f"a place must be a word, such as {{n}}, not {odd!r}"
        if any(len(set(one)) != len(one) or set(one) != set(places[0]) for one in places):
            yield "all saved names must have the same places, each once"
        there = set(self.stack) & set(places[0])
        if there not in (set(), set(self.stack)) or (self.stack_axis and not self.stack):
            yield "the saved names must have all places of stack= or none, and stack_axis= needs it"
        left = set(places[0]) ^ set(self.stack)
        for path in self.results:
            if set(PLACE.findall(path)) != left:
                yield (
                    f"{path!r} must have the places {sorted(left)}: those of the saved name, less stack=, and a place of "
                    "stack= that is in no saved name"
                )
        groups = self.groups
        if groups is not None and (flat != list(range(len(flat))) or not all(groups)):
            yield "reshape= must count dimensions from 0, such as ((0, 1), 2)"
        if self.transpose is not None:
            count = len(self.transpose) if groups is None else len(flat)
            if sorted(self.transpose) != list(range(count)):
                yield f"transpose= must name each of {count} dimensions once"

    @property
    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """``reshape``, each entry as a tuple."""
        if self.reshape is None:
            return None
        return tuple((one,) if isinstance(one, int) else tuple(one) for one in self.reshape)


_ATTRIBUTES = tuple(field.name for field in fields(Rule))


def _are_counts(numbers: Iterable[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def rules_from(value: Iterable[Rule | Mapping[str, Any]]) -> tuple[Rule, ...]:
    """The rules in a list of rules, or of dicts as JSON and YAML have them; raises TypeError for anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError("rules= must be a list of ckpt.Rule, or of dicts with their attributes")
    return tuple(one if isinstance(one, Rule) else _rule_from(one) for one in value)


def _rule_from(entry: Any) -> Rule:
    if not isinstance(entry, Mapping):
        raise TypeError(f"rules= must hold ckpt.Rule or dicts, not {an(entry)}")
    unknown = sorted(map(str, set(entry) - set(_ATTRIBUTES)))
    if unknown or not {"saved", "wanted"} <= set(entry):
        raise TypeError(
            f"a rule needs saved and wanted, and may have {', '.join(_ATTRIBUTES[2:])}; it has "
            f"{', '.join(map(str, entry))}"
        )
    return Rule(**entry)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def dimensions(rule: Rule, count: int) -> int:
    """How many dimensions a leaf has by a rule, without the stacked ones; ``count`` if it says nothing of that."""
    if rule.groups is not None:
        return sum(map(len, rule.groups))
    return count if rule.transpose is None else len(rule.transpose)


def view_of(rule: Rule, leaf: tuple[int, ...]) -> View | None:
    """The view that a leaf of this shape is by a rule; None if it has another number of dimensions."""
    axes = tuple(range(len(leaf)))
    if dimensions(rule, len(leaf)) != len(leaf):
        return None
    groups, transpose = rule.groups, rule.transpose or axes
    reshaped = tuple(leaf[transpose.index(axis)] for axis in axes)
    return View(tuple((axis,) for axis in axes) if groups is None else groups, reshaped, transpose)


def resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """A shape with another size along a dimension."""
    return (*shape[:axis], size, *shape[axis + 1 :]) if shape else shape


@dataclass(frozen=True)
class Bound:
    """A rule with the names that fit it, for one setting of the places that are not stacked."""

    rule: Rule
    results: tuple[str, ...]  # the wanted paths; they keep the places of a rule that unstacks
    sources: tuple[tuple[str, ...], ...]  # the names that are there, for each stacked index
    counts: tuple[int, ...]  # size of each stacked dimension; empty if the rule unstacks
    missing: int  # number of names that are not there


def bind(
    rules: Sequence[Rule], names: Iterable[str], separators: str = "."
) -> tuple[list[Bound], list[str]]:
    """The rules with the names that fit them, and the names that fit none; of several rules, the first counts."""
    texts = [(rule.sources, () if rule.unstacks else rule.stack) for rule in rules]
    found, left = fits(texts, names, separators)
    return [_bound(rules[number], dict(fixed), at) for (number, fixed), at in found.items()], left


_Setting = tuple[int, tuple[tuple[str, str], ...]]
"""Position of a rule, and the texts of those of its places that are not stacked."""


def fits(
    texts: Sequence[tuple[Sequence[str], Sequence[str]]], names: Iterable[str], separators: str
) -> tuple[dict[_Setting, dict[tuple[Any, ...], str]], list[str]]:
    """The names that fit texts of rules with stacked places, by stacked index and position of the text; and the rest."""
    patterns = [
        (number, part, pattern_of(text, separators), stack)
        for number, (of_rule, stack) in enumerate(texts)
        for part, text in enumerate(of_rule)
    ]
    found: dict[_Setting, dict[tuple[Any, ...], str]] = {}
    left: list[str] = []
    for name in names:
        for number, part, pattern, stack in patterns:
            fitting = pattern.fullmatch(name)
            if fitting is None or not all(_NUMBER.fullmatch(fitting[place]) for place in stack):
                continue
            places = fitting.groupdict()
            fixed = tuple(sorted((key, text) for key, text in places.items() if key not in stack))
            index = tuple(int(places[key]) for key in stack)
            found.setdefault((number, fixed), {})[index, part] = name
            break
        else:
            left.append(name)
    return found, left


def pattern_of(text: str, separators: str) -> re.Pattern[str]:
    """A name with places as a regex; a place stands for any text without the separators."""
    parts = enumerate(PLACE.split(text))
    return re.compile(
        "".join(f"(?P<{part}>[^{separators}]+)" if n % 2 else re.escape(part) for n, part in parts)
    )


def with_places(text: str, values: Mapping[str, str]) -> str:
    """A name with the values of its places; a place without one stays."""
    return PLACE.sub(lambda place: values.get(place[1], place[0]), text)


def _bound(rule: Rule, fixed: Mapping[str, str], at: Mapping[tuple[Any, ...], str]) -> Bound:
    dimensions = 0 if rule.unstacks else len(rule.stack)
    counts = tuple(max(index[n] for index, _ in at) + 1 for n in range(dimensions))
    results = tuple(with_places(path, fixed) for path in rule.results)
    missing = math.prod(counts) * len(rule.sources) - len(at)
    rows: dict[tuple[int, ...], list[str]] = {}
    for index, part in sorted(at):  # not all indices, of which a forged name could make billions
        rows.setdefault(index, []).append(at[index, part])
    return Bound(rule, results, tuple(map(tuple, rows.values())), counts, missing)


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

    def make(self, arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """The tensor, of these parts of its leaves: of each the row ``index``."""
        if self.rule is None:
            return arrays[0]
        views = [_checked_view(self.rule, array.shape) for array in arrays]
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
        alike = len({resized(shape, rule.axis, 0) for shape in shapes}) == 1
        if not same or not alike or specs[leaf].dtype != specs[first].dtype:
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
    return _checked_view(rule, leaf).tensor


def _checked_view(rule: Rule, leaf: tuple[int, ...]) -> View:
    view = view_of(rule, leaf)
    assert view is not None  # _problem has compared the dimensions
    return view
