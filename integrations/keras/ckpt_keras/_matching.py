"""Saved variables, and which of a live object they are: by name, by rename=, by counters, or by order. Pure.

1. Equal paths are one variable; ``rename=`` (``renamed``) changes saved paths before they are compared.
2. Weights come first. Paths that differ only in Keras' counters (``_names``) are matched in the order of the
   numbers, all variables of a layer to those of one layer. A path that omits layers is matched by those that it has.
3. An optimizer's slots follow the weights whose names they contain; metrics are matched by name, or ignored.
4. Only in a model that was just made from the checkpoint's configuration are names that it lost matched by order.

All other names stay as saved, so that the resulting error names both sides: guessing could put weights into the wrong layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from ckpt_keras._names import (
    Named,
    apart,
    dotted,
    embed,
    flat,
    flat_pattern,
    inside,
    pair,
    pair_by_rank,
    pattern,
    patterns,
    split,
    within_one,
)
from ckpt_keras._slots import METRICS, MORE_OPTIMIZERS, NON_TRAINABLE, OPTIMIZER, TRAINABLE

Names = dict[str, str]
"""Saved path -> path now."""

Owners = tuple[str, ...]

Origins = Mapping[str, tuple[str, str | None]]
"""Path of a live weight -> the saved weight's name in slot names, and in the suffix that distinguishes
slots with the same name, if known."""


def align_model(
    saved: Sequence[Named], wanted: Sequence[Named], *, counted: Set[str]
) -> tuple[Names, set[str]]:
    """Changed names (saved -> live), and paths of either side that are ignored. Metrics are ignored if they do not fit:
    they count the running epoch, and Keras resets them at the next. ``counted`` are the class names that Keras numbers.
    """
    old, new = _by_collection(saved), _by_collection(wanted)
    weights = _align_weights(old, new, counted)
    names = dict(weights)
    origins = {now: (flat(before), dotted(before)) for before, now in weights.items()}
    for group in sorted({*old, *new} - {TRAINABLE, NON_TRAINABLE, METRICS}):
        names |= _align_optimizer(old.get(group, []), new.get(group, []), group, origins, counted)
    metrics, others = old.get(METRICS, []), new.get(METRICS, [])
    paired = _align_metrics(metrics, others, counted)
    if paired is not None:
        return _changed(names | paired), set()
    return _changed(names), {entry.path for entry in (*metrics, *others)}


def align_plain(saved: Sequence[Named], wanted: Sequence[Named], *, counted: Set[str]) -> Names:
    """Changed names in an optimizer, a metric or a seed generator that is saved without a model."""
    origins = _origins_of_slots(saved, wanted, counted)
    return _changed(_align_optimizer(saved, wanted, "", origins, counted))


def _changed(names: Names) -> Names:
    return {old: new for old, new in names.items() if old != new}


def _by_collection(entries: Iterable[Named]) -> dict[str, list[Named]]:
    def collection(entry: Named) -> str:
        parts = entry.path.split("/")
        return "/".join(parts[:2]) if parts[0] == MORE_OPTIMIZERS else parts[0]

    return _grouped(entries, collection)


def _families(entries: Iterable[Named]) -> dict[str, list[Named]]:
    """Variables by their path without the suffix that distinguishes equal paths."""
    return _grouped(entries, lambda entry: "".join(apart(entry.path)[:2]))


def _grouped(entries: Iterable[Named], key: Callable[[Named], str]) -> dict[str, list[Named]]:
    groups: dict[str, list[Named]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def _without(entries: Iterable[Named], paths: Iterable[str]) -> list[Named]:
    known = set(paths)
    return [entry for entry in entries if entry.path not in known]


def _pair_paths(saved: Iterable[Named], wanted: Iterable[Named], counted: Set[str]) -> Names:
    old, new = ({each.path: split(each.path) for each in side} for side in (saved, wanted))
    return pair(old, new, counted)


# --------------------------------------------------------------------------------------- weights


def _align_weights(
    old: Mapping[str, list[Named]], new: Mapping[str, list[Named]], counted: Set[str]
) -> Names:
    """Matches weights and random state; freezing moves a variable between collections."""
    saved = [entry for group in (TRAINABLE, NON_TRAINABLE) for entry in old.get(group, [])]
    wanted = [entry for group in (TRAINABLE, NON_TRAINABLE) for entry in new.get(group, [])]
    names = _by_number(saved, wanted)
    saved, wanted = _without(saved, names), _without(wanted, names.values())
    before = {inside(entry.path): entry.path for entry in saved}
    now = {inside(entry.path): entry for entry in wanted}
    if len(before) < len(saved) or len(now) < len(wanted):
        return names  # duplicate names, in an old checkpoint that did not distinguish them
    pairs = {path: path for path in before}
    if before.keys() != now.keys():
        pairs = _pair_layers(before, now, counted)
    return names | {before[a]: now[b].path for a, b in pairs.items() if b in now}


def _by_number(saved: Sequence[Named], wanted: Sequence[Named]) -> Names:
    """Pairs equal paths by their order, if an older checkpoint distinguished them only by ``@2``."""

    def number(path: str) -> str:
        return path.rpartition("@")[2] if "@" in path else "1"

    names: Names = {}
    now = _families(wanted)
    for family, entries in _families(saved).items():
        paths = [entry.path for entry in entries]
        others = [entry.path for entry in now.get(family, [])]
        distinguished = all("@" in path for path in others) and set(paths).isdisjoint(others)
        numbered = all(number(path).isdigit() for path in paths)
        if len(others) == len(paths) and distinguished and numbered:
            in_order = sorted(paths, key=lambda path: int(number(path)))
            names |= dict(zip(in_order, others, strict=True))
    return names


def _pair_layers(saved: Mapping[str, str], wanted: Mapping[str, Named], counted: Set[str]) -> Names:
    """Maps saved paths to live paths inside the model; leaves out those whose layer is ambiguous."""
    old = {path: split(path) for path in saved}
    new = {path: split(path) for path in wanted}
    root = next(iter(wanted.values())).owners[:1] if wanted else ()
    if within_one(new.values()) == root and within_one(old.values()):
        # Replace the model's own name, which does not distinguish layers.
        old = {p: (*root, *parts[1:]) if len(parts) > 2 else parts for p, parts in old.items()}
    pairs = pair(old, new, counted)
    taken = set(pairs.values())
    rest = {path: parts for path, parts in old.items() if path not in pairs}
    owned = {path: _whole_path(wanted[path], new[path]) for path in wanted}
    free = {path: parts for path, parts in owned.items() if path not in taken}
    pairs |= _pair_by_owners(rest, free, counted)
    return _consistent(pairs, old, owned, counted)


def _layers(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts of a path without those of its suffix."""
    return tuple(part for part in parts if not part.startswith("@"))


def _whole_path(entry: Named, parts: tuple[str, ...]) -> tuple[str, ...]:
    """A weight's path with all layers that contain it; Keras' own path omits some of them."""
    owners, whole = list(entry.owners), list[str]()
    *parents, last = _layers(parts)
    for part in parents:
        if part in owners:
            place = owners.index(part) + 1
            whole += owners[:place]
            del owners[:place]
        else:
            whole += [*owners, part]
            owners.clear()
    return (*whole, *owners, last)


def _pair_by_owners(
    saved: Mapping[str, tuple[str, ...]], wanted: Mapping[str, tuple[str, ...]], counted: Set[str]
) -> Names:
    """Matches paths that omit different layers: models made in code and from a configuration. A saved path fits a weight
    if it names layers that contain the weight, in that order. It must fit the weights of one pattern only.
    """
    now = {path: patterns(parts, counted) for path, parts in wanted.items()}
    old: dict[str, tuple[object, tuple[int, ...]]] = {}
    new: dict[str, tuple[object, tuple[int, ...]]] = {}
    for path, parts in saved.items():
        suffix = [part[1:] for part in parts if part.startswith("@")]
        mine, numbers = patterns([*suffix, *_layers(parts)], counted)
        fits = {key: places for key, _ in now.values() if (places := embed(mine, key)) is not None}
        if len(fits) != 1:
            continue
        ((key, places),) = fits.items()
        old[path] = ((key, mine), numbers)
        for other, (its, its_numbers) in now.items():
            if its == key:
                new[other] = ((key, mine), tuple(its_numbers[place] for place in places))
    return pair_by_rank(old, new)


def _consistent(
    pairs: Names,
    saved: Mapping[str, tuple[str, ...]],
    owned: Mapping[str, tuple[str, ...]],
    counted: Set[str],
) -> Names:
    """Drops pairs that would split a layer: all variables of a saved layer must be in one layer now."""
    homes: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    layers: dict[str, list[tuple[str, ...]]] = {}
    for path, now in pairs.items():
        parts, whole = _layers(saved[path]), owned[now]
        found = embed(patterns(parts, counted)[0], patterns(whole, counted)[0]) or ()
        # If equal paths were distinguished, there are several layers with one name.
        inner = [] if len(parts) < len(saved[path]) else list(enumerate(found))[:-1]
        layers[path] = [parts[: i + 1] for i, _ in inner]
        for i, place in inner:
            homes.setdefault(parts[: i + 1], set()).add(whole[: place + 1])
    torn = {before for before, after in homes.items() if len(after) > 1}
    return {a: b for a, b in pairs.items() if a == b or torn.isdisjoint(layers[a])}


# ------------------------------------------------------------------------- optimizers and metrics


def _align_optimizer(
    saved: Sequence[Named],
    wanted: Sequence[Named],
    group: str,
    origins: Origins,
    counted: Set[str],
) -> Names:
    """Matches an optimizer: Keras numbers its name, and its slots contain the names of the weights."""
    old = {entry.path for entry in saved}
    if old == {entry.path for entry in wanted}:
        return {path: path for path in old}
    tops = _pair_tops(saved, wanted, group, counted)
    if tops is None:
        return {}  # Adam's state is not SGD's, even where shapes agree
    names: Names = {}
    prefix = f"{group}/" if group else ""
    families = _families(saved)
    for entries in _families(wanted).values():
        for index, entry in enumerate(entries):
            owner, slash, last = entry.path.removeprefix(prefix).rpartition("/")
            name = _saved_slot_name(last.partition("@")[0], entry, origins)
            path = f"{prefix}{tops.get(owner, owner)}{slash}{name}"
            found = name and _slot_of(entry, families.get(path, []), origins, index)
            if found:
                names.setdefault(found, entry.path)
    of_no_weight = [entry for entry in wanted if entry.weight is None]
    rest = _without(saved, names), _without(of_no_weight, names.values())
    return names | _pair_paths(*rest, counted)


def _for_weight(slot: str, table: Mapping[str, str]) -> str:
    """A slot's name with the flat name of its weight replaced: old -> new, for all that may be it."""
    fits = [old for old in table if slot.startswith(f"{old}_")]
    old = max(fits, key=len, default="")
    return table[old] + slot[len(old) :] if fits else slot


def _saved_slot_name(bare: str, entry: Named, origins: Origins) -> str | None:
    """The saved name of a live slot, without the suffix that distinguishes equal names."""
    if entry.weight is None:
        return bare
    if entry.weight not in origins:
        return None
    # Adafactor names slots by the last part of the weight's name alone.
    return _for_weight(bare, {flat(entry.weight): origins[entry.weight][0]})


def _slot_of(entry: Named, family: Sequence[Named], origins: Origins, index: int) -> str | None:
    """The saved slot of this weight, out of several with the same name."""
    suffixes = [apart(one.path)[2] for one in family]
    _, bare, mine = apart(entry.path)
    role = mine.partition(".")[0]
    named = entry.weight is not None and bare.startswith(f"{flat(entry.weight)}_")
    if len(family) == 1 and (named or not role):
        return family[0].path
    name, with_dots = origins.get(entry.weight or "", (None, None))
    for one, text in zip(family, suffixes, strict=True):
        its_role, _, weight = text.partition(".")
        its_name = flat(f"/{weight.replace('.', '/')}")
        same = weight == with_dots if with_dots else its_name == name
        if weight and same and (not role or role == its_role):
            return one.path
    # Older checkpoints, and those of optimizers without a model, only number them.
    numbered = all(not text or text.isdigit() for text in suffixes)
    return family[index].path if numbered and index < len(family) else None


def _pair_tops(
    saved: Sequence[Named], wanted: Sequence[Named], group: str, counted: Set[str]
) -> dict[str, str] | None:
    """Maps live optimizer names to saved ones: one optimizer, or a wrapper and the wrapped one."""

    def tops(entries: Sequence[Named]) -> dict[str, list[str]]:
        prefix = f"{group}/" if group else ""
        owners = [entry.path.removeprefix(prefix).rpartition("/")[0] for entry in entries]
        return {owner: owner.split("/") for owner in owners if owner}

    new = tops(wanted)
    pairs = pair(tops(saved), new, counted)
    return {now: before for before, now in pairs.items()} if len(pairs) == len(new) else None


def _origins_of_slots(
    saved: Sequence[Named], wanted: Sequence[Named], counted: Set[str]
) -> Origins:
    """Derives the weights of an optimizer that was saved without a model from its slot names."""
    ends: set[str] = set()
    mine: dict[str, str] = {}
    for entry in wanted:
        bare = apart(entry.path)[1]
        if entry.weight is not None and bare.startswith(f"{flat(entry.weight)}_"):
            mine[flat(entry.weight)] = entry.weight
            ends.add(bare[len(flat(entry.weight)) :])
    theirs: set[str] = set()
    for entry in saved:
        bare = apart(entry.path)[1]
        fits = [end for end in ends if bare.endswith(end)]
        if fits:
            theirs.add(bare.removesuffix(max(fits, key=len)))
    pairs = pair_by_rank(
        {name: flat_pattern(name, counted) for name in theirs},
        {name: flat_pattern(name, counted) for name in mine},
    )
    return {mine[now]: (before, None) for before, now in pairs.items()}


def _align_metrics(
    saved: Sequence[Named], wanted: Sequence[Named], counted: Set[str]
) -> Names | None:
    """Matches metrics by name; None if one of them does not fit."""
    names = _by_number(saved, wanted)
    names |= _pair_paths(_without(saved, names), _without(wanted, names.values()), counted)
    kinds = {entry.path: (entry.shape, entry.dtype) for entry in wanted}
    fits = all(kinds[names[e.path]] == (e.shape, e.dtype) for e in saved if e.path in names)
    return names if fits and len(names) == len(saved) == len(wanted) else None


# ---------------------------------------------------------------------------------------- rename=

Table = Sequence[tuple[str, str]]


def renamed(rename: Mapping[str, str], saved: Sequence[str]) -> Names:
    """New names of the saved paths that a dict for ``rename=`` changes; whole paths are applied first. A layer's name
    occurs in several collections, and inside the names of optimizer slots: ``{"head": "tail"}`` renames
    ``trainable_variables/head/kernel`` and ``optimizer_variables/adam/head_kernel_momentum``.
    """
    table = table_of(rename)
    parts = [tuple(inside(path).split("/")) for path in _weights(saved)]
    # The model's name, if the paths of all weights begin with it (seed generators aside).
    in_one = all(len(part) > 2 or "seed_generator_state" in part for part in parts)
    root = within_one(parts) if in_one else ()
    names = {path: leading(path, table) for path in saved}
    inner = {path: _in_collection(path, table, root) for path in saved if names[path] == path}
    return with_slots(saved, _changed(names | inner))


def with_slots(saved: Sequence[str], names: Names) -> Names:
    """New names of weights, and of the optimizer slots that contain their names."""
    weights = {path: names.get(path, path) for path in _weights(saved)}
    flats = {flat(old): flat(new) for old, new in weights.items()}
    by_dots = {dotted(path): path for path in weights}
    slots: Names = {}
    for path in saved:
        if path in names or path.partition("/")[0] not in (OPTIMIZER, MORE_OPTIMIZERS):
            continue
        front, bare, where = apart(path)
        role, dot, weight = where.partition(".")
        old = by_dots.get(weight)
        if old is None:
            bare = _for_weight(bare, flats)
        else:
            bare = _for_weight(bare, {flat(old): flat(weights[old])})
            where = f"{role}{dot}{dotted(weights[old])}"
        slots[path] = f"{front}{bare}@{where}" if "@" in path[len(front) :] else front + bare
    return _changed(names | slots)


def _weights(saved: Iterable[str]) -> list[str]:
    return [path for path in saved if path.partition("/")[0] in (TRAINABLE, NON_TRAINABLE)]


def table_of(rename: Mapping[str, str]) -> Table:
    """The entries of ``rename=``, the longest first."""
    return sorted(rename.items(), key=lambda entry: -len(entry[0]))


def leading(path: str, table: Table) -> str:
    """A path with its leading parts renamed; only whole parts match."""
    for old, new in table:
        if path == old or path.startswith(f"{old}/"):
            return f"{new}{path[len(old) :]}".removeprefix("/")
    return path


def _in_collection(path: str, table: Table, root: Owners) -> str:
    """A path with a layer renamed that follows the collection, or the model's name."""
    parts = path.split("/")
    start = 2 if parts[0] == MORE_OPTIMIZERS else 1
    in_model = root and root == tuple(parts[start : start + 1])
    for front in (start, start + 1) if in_model else (start,):
        rest = "/".join(parts[front:])
        new = leading(rest, table)
        if new != rest:
            return "/".join([*parts[:front], new])
    return path


# ------------------------------------------------------------- names that a configuration has lost


def names_by_order(
    saved: Iterable[Any], wanted: Sequence[Named], *, lost: Set[Owners], counted: Set[str]
) -> Names:
    """Maps saved paths to those of a model made from the same configuration, which has the same order of layers; empty if
    names suffice or the variables differ. ``lost`` are the layers that have lost their names (``_slots.nameless``).
    """
    if not lost:
        return {}
    leaves = list(saved)
    names: Names = {}
    for collection in (TRAINABLE, NON_TRAINABLE):
        before = [leaf for leaf in leaves if leaf.path.partition("/")[0] == collection]
        now = [entry for entry in wanted if entry.path.partition("/")[0] == collection]
        if len(before) != len(now):
            return {}
        for leaf, entry in zip(before, now, strict=True):
            same = (tuple(leaf.shape or ()), str(leaf.dtype)) == (entry.shape, entry.dtype)
            if not same or not _fits(leaf.path, entry, lost, counted):
                return {}
            names[leaf.path] = entry.path
    return with_slots([leaf.path for leaf in leaves], names)


def _fits(path: str, entry: Named, lost: Set[Owners], counted: Set[str]) -> bool:
    """Whether a saved weight can belong to this variable: all names except lost ones must agree."""
    whole = _whole_path(entry, split(inside(entry.path)))
    known = [
        None if at == 0 or whole[1 : at + 1] in lost else pattern(part, counted)[0]
        for at, part in enumerate(whole)
    ]
    mine = [pattern(part, counted)[0] for part in _layers(split(inside(path)))]
    return embed(mine, known) is not None


def same_places(
    saved: Mapping[str, str], now: Mapping[str, str], lost: Set[Owners], counted: Set[str]
) -> bool:
    """Whether both sides have the same names by place, except those that were lost."""
    if not lost or saved.keys() != now.keys():
        return False
    for place, name in now.items():
        parts, others = tuple(name.split("/")), saved[place].split("/")
        known = [
            None if parts[: at + 1] in lost else pattern(part, counted)[0]
            for at, part in enumerate(parts)
        ]
        if len(parts) != len(others):
            return False
        if embed([pattern(other, counted)[0] for other in others], known) is None:
            return False
    return True
