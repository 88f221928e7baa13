"""Saved variables, and which of a live object they are: by name, by ``rename=``, by counters, or by order. Pure.

1. Equal paths are one variable; ``rename=`` (``renamed``) changes saved paths before they are compared.
2. Weights come first: paths that differ only in Keras' counters are one, and a path that omits layers is that of the one
   weight whose layers it names.
3. An optimizer's slots follow the weights whose names they contain; metrics are matched by name, or ignored.
4. Only in a model that was just made from the checkpoint's configuration are names that it lost matched by order.

All other names stay as saved, so that the resulting error names both sides: guessing could put weights into the wrong layer.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ckpt_keras._slots import (
    METRICS,
    MORE_OPTIMIZERS,
    NON_TRAINABLE,
    OPTIMIZER,
    TRAINABLE,
    Parts,
    numbered,
)

_AT_NUMBER = re.compile(r"@\d+$")


Pattern = tuple[tuple[str, int | None], ...]
"""Parts of a name without their numbers, each with its number if its class is one that Keras numbers."""


@dataclass(frozen=True)
class Named:
    """A saved or live variable."""

    path: str  # begins with the collection
    shape: tuple[int, ...]
    dtype: str
    owners: Parts = ()  # layers of a live weight, from the model inwards


Side = Sequence[Named]
"""The saved variables, or the live ones."""
Names = dict[str, str]
"""Saved path -> path now."""

_ROOT = ""
"""Stands for the model's own name, which distinguishes no layers."""


def align_model(saved: Side, wanted: Side, *, counted: Set[str]) -> tuple[Names, set[str]]:
    """Changed names (saved -> live), and ignored paths of both sides: metrics that do not fit, as Keras resets them."""
    old, new = _by_collection(saved), _by_collection(wanted)
    weights = _align_weights(saved, wanted, counted)
    names = dict(weights)
    for group in sorted(old.keys() & new.keys() - {TRAINABLE, NON_TRAINABLE, METRICS}):
        names |= _align_slots(old[group], new[group], weights, counted)
    metrics, others = old.get(METRICS, []), new.get(METRICS, [])
    paired = _align_metrics(metrics, others, counted)
    if paired is not None:
        return _changed(names | paired), set()
    return _changed(names), {entry.path for entry in (*metrics, *others)}


def align_plain(saved: Side, wanted: Side, *, counted: Set[str]) -> Names:
    """Changed names in an optimizer, a metric or a seed generator that is saved without a model."""
    joined = counted - {"seed_generator"}  # it has no slot: seed_generator_state is its own
    bases = "|".join(re.escape(base) for base in sorted(joined, key=len, reverse=True))
    # In the last part names are joined with "_".
    counter = re.compile(rf"(?:(?<=[_@.])|^)({bases})(?:_([1-9]\d*))?(?=[_@.]|$)")

    def pattern_of(path: str) -> Pattern:
        *front, last = path.split("/")
        numbers = ((found[1], int(found[2] or 0)) for found in counter.finditer(last))
        return (*pattern(front, counted), (counter.sub(r"\1", last), None), *numbers)

    old, new = ({one.path: pattern_of(one.path) for one in side} for side in (saved, wanted))
    return _changed(pair(*comparable(old, new)))


def _changed(names: Names) -> Names:
    return {old: new for old, new in names.items() if old != new}


def _is_weight(path: str) -> bool:
    return path.partition("/")[0] in (TRAINABLE, NON_TRAINABLE)


def _by_collection(entries: Iterable[Named]) -> dict[str, list[Named]]:
    groups: dict[str, list[Named]] = {}
    for entry in entries:
        parts = entry.path.split("/")
        group = "/".join(parts[:2]) if parts[0] == MORE_OPTIMIZERS else parts[0]
        groups.setdefault(group, []).append(entry)
    return groups


def _align_weights(saved: Side, wanted: Side, counted: Set[str]) -> Names:
    """Matches weights and random state; freezing moves a variable between collections."""
    saved, wanted = ([one for one in side if _is_weight(one.path)] for side in (saved, wanted))
    before = {inside(entry.path): entry.path for entry in saved}
    now = {inside(entry.path): entry for entry in wanted}
    if len(before) < len(saved) or len(now) < len(wanted):
        return {}  # Keras' own callback saved layers of one name, of which one is frozen
    same = before.keys() == now.keys()
    pairs = {path: path for path in now} if same else _pair_weights(before, now, counted)
    return {before[a]: now[b].path for a, b in pairs.items()}


def _pair_weights(saved: Iterable[str], wanted: Mapping[str, Named], counted: Set[str]) -> Names:
    """Pairs equal paths, and then those that omit different layers: models made in code and from a configuration."""
    old, new = ({path: split(path) for path in side} for side in (saved, wanted))
    root = next(iter(wanted.values())).owners[:1] if wanted else ()
    first = within_one(old.values())
    named_alike = _without_numbers(first, counted) == _without_numbers(root, counted)
    if named_alike or within_one(new.values()) == root:
        old = {path: _without_root(parts, first) for path, parts in old.items()}
    new = {path: _without_root(parts, root) for path, parts in new.items()}
    pairs = pair_parts(old, new, counted)
    rest, whole = comparable(
        {path: pattern(_owners_first(parts), counted) for path, parts in old.items()},
        {path: pattern(_whole_path(entry), counted) for path, entry in wanted.items()},
    )
    taken = set(pairs.values())
    return pairs | _pair_by_layers(
        {path: parts for path, parts in rest.items() if path not in pairs},
        {path: parts for path, parts in whole.items() if path not in taken},
    )


def _pair_by_layers(saved: Mapping[str, Pattern], wanted: Mapping[str, Pattern]) -> Names:
    """Pairs a path with the one weight that is in all layers which it names, in their order."""
    having: dict[object, list[str]] = {}
    for path, whole in wanted.items():
        for part in set(whole):
            having.setdefault(part, []).append(path)
    found: Names = {}
    for path, parts in saved.items():
        fewest = min((having.get(part, []) for part in parts), key=len)
        fits = [at for at in fewest if wanted[at][-1] == parts[-1] and embeds(parts, wanted[at])]
        if len(fits) == 1:
            found[path] = fits[0]
    return pair(found, {path: path for path in wanted})


def _without_numbers(parts: Parts, counted: Set[str]) -> list[str]:
    return [numbered(part, counted)[0] for part in parts]


def _without_root(parts: Parts, root: Parts) -> Parts:
    return (_ROOT, *parts[1:]) if len(parts) > 2 and parts[:1] == root else parts


def _layers(parts: Parts) -> Parts:
    """The parts of a path without those of its suffix."""
    return tuple(part for part in parts if not part.startswith("@"))


def _owners_first(parts: Parts) -> Parts:
    """The parts of a path, those of its suffix first: they are names of layers, too."""
    return (*(part[1:] for part in parts if part.startswith("@")), *_layers(parts))


def _whole_path(entry: Named) -> Parts:
    """A weight's path with all layers that contain it; Keras' own path omits some of them."""
    owners, whole = [_ROOT, *entry.owners[1:]], list[str]()
    *parents, last = _layers(_without_root(split(inside(entry.path)), entry.owners[:1]))
    for part in parents:
        if part in owners:
            place = owners.index(part) + 1
            whole += owners[:place]
            del owners[:place]
        else:
            whole += [*owners, part]
            owners.clear()
    return (*whole, *owners, last)


@dataclass(frozen=True)
class SlotName:
    """The name of an optimizer's variable: ``adam/dense_kernel_momentum``, or ``adafactor/kernel@c.dense.kernel``."""

    front: str  # what leads to it, with the slash
    weight: str | None  # path of its weight
    end: str  # begins with "_" behind the name of a weight
    role: str | None  # of a suffix; None without

    def of(self, weight: str) -> str:
        """The path for another weight, or for the same one with another name."""
        name = flat(weight) + self.end if self.end.startswith("_") else self.end
        where = "" if self.role is None else f"@{self.role}.{dotted(weight)}"
        return self.front + name + where

    @property
    def parts(self) -> Parts:
        """What must be equal of two slots of one weight."""
        named = self.role is None or self.end.startswith("_")
        return (*self.front.split("/"), self.end if named else f"{self.end}@{self.role}")


def slot_names(paths: Iterable[str], weights: Iterable[str]) -> dict[str, SlotName]:
    """What the names of an optimizer's variables say, by the paths of the weights that it trains."""
    by_dots = {dotted(path): path for path in weights}
    by_flat = {flat(path): path for path in by_dots.values()}
    return {path: _slot_name(path, by_flat, by_dots) for path in paths}


def _slot_name(path: str, by_flat: Mapping[str, str], by_dots: Mapping[str, str]) -> SlotName:
    front, slash, last = path.rpartition("/")
    name, _, where = last.partition("@")
    role, dot, text = where.partition(".")
    weight = by_dots.get(text)
    if not dot:
        name, role = last, None
        stops = [place for place, letter in enumerate(name) if letter == "_"]
        known = (by_flat.get(name[:stop]) for stop in reversed(stops))
        weight = next(filter(None, known), None)  # the longest
    if weight is None:
        return SlotName(front + slash, None, last, None)
    end = name.removeprefix(flat(weight)) if name.startswith(f"{flat(weight)}_") else name
    return SlotName(front + slash, weight, end, role)


def _align_slots(saved: Side, wanted: Side, weights: Names, counted: Set[str]) -> Names:
    """Matches an optimizer: Keras numbers its name, and its slots contain the names of the weights."""
    old, new = {entry.path for entry in saved}, {entry.path for entry in wanted}
    if old == new:
        return {}
    before, now = slot_names(old, weights), slot_names(new, weights.values())
    ours, theirs = comparable(
        {path: pattern(slot.parts, counted) for path, slot in before.items()},
        {path: pattern(slot.parts, counted) for path, slot in now.items()},
    )
    return pair(
        {path: (parts, weights.get(before[path].weight or "")) for path, parts in ours.items()},
        {path: (parts, now[path].weight) for path, parts in theirs.items()},
    )


def _align_metrics(saved: Side, wanted: Side, counted: Set[str]) -> Names | None:
    """Matches metrics by name; None if one of them does not fit."""
    old, new = ({entry.path: entry for entry in side} for side in (saved, wanted))
    names = pair_parts({p: split(p) for p in old}, {p: split(p) for p in new}, counted)
    fits = all(
        (old[a].shape, old[a].dtype) == (new[b].shape, new[b].dtype) for a, b in names.items()
    )
    return names if fits and len(names) == len(old) == len(new) else None


Table = Sequence[tuple[str, str]]


def renamed(rename: Mapping[str, str], saved: Sequence[str]) -> Names:
    """New names of the saved paths that a dict for ``rename=`` changes; whole paths are applied first. A layer's name
    occurs in several collections, and inside the names of optimizer slots: ``{"head": "tail"}`` renames
    ``trainable_variables/head/kernel`` and ``optimizer_variables/adam/head_kernel_momentum``.
    """
    table = table_of(rename)
    parts = [tuple(inside(path).split("/")) for path in saved if _is_weight(path)]
    # The model's name, if the paths of all weights begin with it (seed generators aside).
    in_one = all(len(part) > 2 or "seed_generator_state" in part for part in parts)
    root = within_one(parts) if in_one else ()
    return with_slots(saved, _changed({path: _renamed(path, table, root) for path in saved}))


def with_slots(saved: Sequence[str], names: Names) -> Names:
    """New names of weights, and of the optimizer slots that contain their names."""
    weights = {path: names.get(path, path) for path in saved if _is_weight(path)}
    groups = (OPTIMIZER, MORE_OPTIMIZERS)
    rest = [path for path in saved if path not in names and path.partition("/")[0] in groups]
    slots = slot_names(rest, weights)
    renamed = {path: slot.of(weights[slot.weight]) for path, slot in slots.items() if slot.weight}
    return _changed(names | renamed)


def table_of(rename: Mapping[str, str]) -> Table:
    """The entries of ``rename=``, the longest first."""
    return sorted(rename.items(), key=lambda entry: -len(entry[0]))


def leading(path: str, table: Table) -> str:
    """A path with its leading parts renamed; only whole parts match."""
    for old, new in table:
        if path == old or path.startswith(f"{old}/"):
            return f"{new}{path[len(old) :]}".removeprefix("/")
    return path


def _renamed(path: str, table: Table, root: Parts) -> str:
    """A path with a leading part renamed, or a layer that follows the collection or the model's name."""
    parts = path.split("/")
    start = 2 if parts[0] == MORE_OPTIMIZERS else 1
    in_model = root and root == tuple(parts[start : start + 1])
    for front in (0, start, start + 1) if in_model else (0, start):
        rest = "/".join(parts[front:])
        new = leading(rest, table)
        if new != rest:
            return "/".join([*parts[:front], new])
    return path


def names_by_order(
    saved: Sequence[Any], wanted: Side, *, lost: Set[Parts], counted: Set[str]
) -> Names:
    """Saved paths -> those of a model of the same configuration, with layers in the same order; empty if variables differ."""
    names: Names = {}
    for collection in (TRAINABLE, NON_TRAINABLE):
        before = [leaf for leaf in saved if leaf.path.partition("/")[0] == collection]
        now = [entry for entry in wanted if entry.path.partition("/")[0] == collection]
        if len(before) != len(now):
            return {}
        for leaf, entry in zip(before, now, strict=True):
            same = (tuple(leaf.shape or ()), str(leaf.dtype)) == (entry.shape, entry.dtype)
            if not same or not _may_be(leaf.path, entry, lost, counted):
                return {}
            names[leaf.path] = entry.path
    return with_slots([leaf.path for leaf in saved], names)


def _may_be(path: str, entry: Named, lost: Set[Parts], counted: Set[str]) -> bool:
    """Whether a saved weight can be this one: all names of layers that were not lost must agree."""
    whole = _whole_path(entry)
    names = enumerate(_without_numbers(whole, counted))
    known = [None if at == 0 or whole[1 : at + 1] in lost else name for at, name in names]
    return embeds(_without_numbers(_layers(split(inside(path))), counted), known)


def inside(path: str) -> str:
    """A path without its collection."""
    return path.partition("/")[2]


def flat(path: str) -> str:
    """A weight's name as it appears in the names of its optimizer slots: Keras' path joined."""
    *parents, last = inside(path).split("/")
    return "_".join([*(_AT_NUMBER.sub("", part) for part in parents), last.partition("@")[0]])


def dotted(path: str) -> str:
    """A weight's name as it appears in the suffix of a slot."""
    return inside(path).replace("/", ".")


def split(path: str) -> Parts:
    """The parts of a path without collection; a suffix that distinguishes equal paths is a part too."""
    *parents, last = path.split("/")
    name, at, where = last.partition("@")
    return (*parents, name, *(f"@{part}" for part in where.split(".") if at))


def within_one(paths: Iterable[Parts]) -> Parts:
    """The first name, if all paths share it (seed generators aside); else empty."""
    first = {parts[0] for parts in paths if len(parts) > 2}
    return tuple(first) if len(first) == 1 else ()


def pattern(parts: Sequence[str], counted: Set[str]) -> Pattern:
    """The pattern of a path. A layer named after its numbered parent (``block_1_proj`` in ``block_1``) loses that number."""
    found: list[tuple[str, int | None]] = []
    for before, part in itertools.pairwise(["", *parts]):
        name, number = numbered(part, counted)
        parent, of_parent = numbered(before, counted)
        if number is None and of_parent and part.startswith(f"{before}_"):
            name = parent + part[len(before) :]
        found.append((name, number))
    return tuple(found)


def comparable(
    saved: Mapping[str, Pattern], wanted: Mapping[str, Pattern]
) -> tuple[dict[str, Pattern], dict[str, Pattern]]:
    """Both sides with ranks for numbers. A class of which one side has more objects keeps its numbers."""
    old, new = _ranks(saved.values()), _ranks(wanted.values())
    alike = {name for name in old if len(old[name]) == len(new.get(name, ()))}

    def ranked(one: Pattern, ranks: Mapping[str, Mapping[int, int]]) -> Pattern:
        return tuple(
            (name, number if number is None or name not in alike else ranks[name][number])
            for name, number in one
        )

    return (
        {name: ranked(one, old) for name, one in saved.items()},
        {name: ranked(one, new) for name, one in wanted.items()},
    )


def _ranks(patterns: Iterable[Pattern]) -> dict[str, dict[int, int]]:
    numbers: dict[str, set[int]] = {}
    for name, number in itertools.chain.from_iterable(patterns):
        if number is not None:
            numbers.setdefault(name, set()).add(number)
    return {
        name: {number: rank for rank, number in enumerate(sorted(found))}
        for name, found in numbers.items()
    }


def pair(saved: Mapping[str, Hashable], wanted: Mapping[str, Hashable]) -> dict[str, str]:
    """Maps saved names to the wanted ones of the same value; leaves out values that one side has twice."""
    before, after = (Counter(side.values()) for side in (saved, wanted))
    now = {value: name for name, value in wanted.items() if before[value] == after[value] == 1}
    return {name: now[value] for name, value in saved.items() if value in now}


def pair_parts(
    saved: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]], counted: Set[str]
) -> dict[str, str]:
    """Maps saved names to wanted ones, each of which comes with its parts."""
    sides = ({n: pattern(parts, counted) for n, parts in side.items()} for side in (saved, wanted))
    return pair(*comparable(*sides))


def embeds(parts: Sequence[object], whole: Sequence[object]) -> bool:
    """Whether the parts occur in a longer sequence, in this order; None in ``whole`` fits any part."""
    rest = iter(whole)
    return all(any(other is None or other == part for other in rest) for part in parts)
