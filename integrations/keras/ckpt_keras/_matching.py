"""Matches saved names with those of a live object: by path, or by Keras' counters. Pure.

Equal names match. Names that Keras numbered (``_names``) are matched in the order
of the numbers, all variables of a layer to those of one layer. All other names stay as saved, so
that the resulting error names both sides: guessing could put weights into the wrong layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ckpt_keras._names import (
    Named,
    embed,
    flat,
    flat_pattern,
    inside,
    pair_by_rank,
    patterns,
    split,
    within_one,
)
from ckpt_keras._slots import METRICS, MORE_OPTIMIZERS, NON_TRAINABLE, TRAINABLE

Names = dict[str, str]
"""Saved path -> path now."""


def align_model(
    saved: Sequence[Named], wanted: Sequence[Named], *, counted: Set[str]
) -> tuple[Names, set[str]]:
    """Changed names (saved -> live), and paths of either side that are ignored.

    Metrics are ignored if they do not fit: they count the running epoch, and Keras
    resets them at the next.

    Args:
        saved: the variables in the checkpoint.
        wanted: the variables of the live model, with owners and weights.
        counted: the class names that Keras numbers.
    """
    old, new = _by_collection(saved), _by_collection(wanted)
    weights = _align_weights(old, new, counted)
    names = dict(weights)
    origins = {now: (flat(before), _dotted(before)) for before, now in weights.items()}
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


Origins = Mapping[str, tuple[str, str | None]]
"""Path of a live weight -> the saved weight's name in slot names, and the suffix that distinguishes
slots with the same name, if known."""


def _dotted(path: str) -> str:
    return inside(path).replace("/", ".")


def _changed(names: Names) -> Names:
    return {old: new for old, new in names.items() if old != new}


def _by_collection(entries: Sequence[Named]) -> dict[str, list[Named]]:
    groups: dict[str, list[Named]] = {}
    for entry in entries:
        parts = entry.path.split("/")
        group = "/".join(parts[:2]) if parts[0] == MORE_OPTIMIZERS else parts[0]
        groups.setdefault(group, []).append(entry)
    return groups


# --------------------------------------------------------------------------------------- weights


def _align_weights(
    old: Mapping[str, list[Named]], new: Mapping[str, list[Named]], counted: Set[str]
) -> Names:
    """Matches weights and random state; freezing moves a variable between collections."""
    saved = [entry for group in (TRAINABLE, NON_TRAINABLE) for entry in old.get(group, [])]
    wanted = [entry for group in (TRAINABLE, NON_TRAINABLE) for entry in new.get(group, [])]
    names = _by_number(saved, wanted)
    saved = [entry for entry in saved if entry.path not in names]
    known = set(names.values())
    wanted = [entry for entry in wanted if entry.path not in known]
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
    names: Names = {}
    families: dict[str, list[str]] = {}
    for entry in saved:
        families.setdefault(_family(entry.path), []).append(entry.path)
    now: dict[str, list[str]] = {}
    for entry in wanted:
        now.setdefault(_family(entry.path), []).append(entry.path)
    for family, paths in families.items():
        others = now.get(family, [])
        numbers = [path.rpartition("@")[2] if "@" in path else "1" for path in paths]
        told_apart = all("@" in path for path in others) and set(paths).isdisjoint(others)
        if len(others) == len(paths) and told_apart and all(map(str.isdigit, numbers)):
            in_order = sorted(
                paths, key=lambda path: int(path.rpartition("@")[2] if "@" in path else 1)
            )
            names |= dict(zip(in_order, others, strict=True))
    return names


def _family(path: str) -> str:
    parent, slash, last = path.rpartition("/")
    return f"{parent}{slash}{last.partition('@')[0]}"


def _pair_layers(saved: Mapping[str, str], wanted: Mapping[str, Named], counted: Set[str]) -> Names:
    """Maps saved paths to live paths inside the model; leaves out those whose layer is ambiguous."""
    old = {path: split(path) for path in saved}
    new = {path: split(path) for path in wanted}
    root = next(iter(wanted.values())).owners[:1] if wanted else ()
    if within_one(new.values()) == root and within_one(old.values()):
        # Replace the model's own name, which does not distinguish layers.
        old = {p: (*root, *parts[1:]) if len(parts) > 2 else parts for p, parts in old.items()}
    pairs = pair_by_rank(
        {path: patterns(parts, counted) for path, parts in old.items()},
        {path: patterns(parts, counted) for path, parts in new.items()},
    )
    taken = set(pairs.values())
    rest = {path: parts for path, parts in old.items() if path not in pairs}
    owned = {path: whole_path(wanted[path], new[path]) for path in wanted}
    free = {path: parts for path, parts in owned.items() if path not in taken}
    pairs |= _pair_by_owners(rest, free, counted)
    return _consistent(pairs, old, owned, counted)


def whole_path(entry: Named, parts: tuple[str, ...]) -> tuple[str, ...]:
    """A weight's path with all layers that contain it; Keras' own path omits some of them."""
    owners, whole = list(entry.owners), list[str]()
    name = [part for part in parts if not part.startswith("@")]
    for part in name[:-1]:
        if part in owners:
            place = owners.index(part) + 1
            whole += owners[:place]
            del owners[:place]
        else:
            whole += [*owners, part]
            owners.clear()
    return (*whole, *owners, name[-1])


def _pair_by_owners(
    saved: Mapping[str, tuple[str, ...]], wanted: Mapping[str, tuple[str, ...]], counted: Set[str]
) -> Names:
    """Matches paths that omit different layers: models made in code and from a configuration.

    A saved path fits a weight if it names layers that contain the weight, in that order. It must
    fit the weights of one pattern only.
    """
    now = {path: patterns(parts, counted) for path, parts in wanted.items()}
    old: dict[str, tuple[object, tuple[int, ...]]] = {}
    new: dict[str, tuple[object, tuple[int, ...]]] = {}
    for path, parts in saved.items():
        told = [part[1:] for part in parts if part.startswith("@")]
        named = [part for part in parts if not part.startswith("@")]
        mine, numbers = patterns([*told, *named], counted)
        fits = {key for key, _ in now.values() if embed(mine, key) is not None}
        if len(fits) == 1:
            (key,) = fits
            old[path] = ((key, mine), numbers)
            places = embed(mine, key)
            assert places is not None
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
    places: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
    for path, now in pairs.items():
        parts = [part for part in saved[path] if not part.startswith("@")]
        whole = owned[now]
        found = embed(patterns(parts, counted)[0], patterns(whole, counted)[0]) or ()
        # If equal paths were distinguished, there are several layers with one name.
        inner = [] if len(parts) < len(saved[path]) else list(enumerate(found))[:-1]
        places[path] = [(tuple(parts[: i + 1]), whole[: place + 1]) for i, place in inner]
        for before, after in places[path]:
            homes.setdefault(before, set()).add(after)
    torn = {before for before, after in homes.items() if len(after) > 1}
    return {
        path: now
        for path, now in pairs.items()
        if path == now or not any(before in torn for before, _ in places[path])
    }


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
            found = name and _told_apart(families.get(path, []), entry, origins, index)
            if found:
                names.setdefault(found, entry.path)
    taken = set(names.values())
    rest = pair_by_rank(
        {e.path: patterns(split(e.path), counted) for e in saved if e.path not in names},
        {
            e.path: patterns(split(e.path), counted)
            for e in wanted
            if e.path not in taken and e.weight is None
        },
    )
    return names | rest


def _families(entries: Sequence[Named]) -> dict[str, list[Named]]:
    families: dict[str, list[Named]] = {}
    for entry in entries:
        families.setdefault(_family(entry.path), []).append(entry)
    return families


def _saved_slot_name(bare: str, entry: Named, origins: Origins) -> str | None:
    """The saved name of a live slot, without the suffix that distinguishes equal names."""
    if entry.weight is None:
        return bare
    if entry.weight not in origins:
        return None
    mine, theirs = flat(entry.weight), origins[entry.weight][0]
    # Adafactor names slots by the last part of the weight's name alone.
    return theirs + bare[len(mine) :] if bare.startswith(f"{mine}_") else bare


def _told_apart(family: Sequence[Named], entry: Named, origins: Origins, index: int) -> str | None:
    """The saved slot of this weight, out of several with the same name."""
    where = [one.path.rpartition("/")[2].partition("@")[2] for one in family]
    bare, _, mine = entry.path.rpartition("/")[2].partition("@")
    role = mine.partition(".")[0]
    named = entry.weight is not None and bare.startswith(f"{flat(entry.weight)}_")
    if len(family) == 1 and (named or not role):
        return family[0].path
    name, dotted = origins.get(entry.weight or "", (None, None))
    for one, text in zip(family, where, strict=True):
        its_role, _, weight = text.partition(".")
        same = weight == dotted if dotted else flat(f"/{weight.replace('.', '/')}") == name
        if weight and same and (not role or role == its_role):
            return one.path
    # Older checkpoints, and those of optimizers without a model, only number them.
    counted = all(not text or text.isdigit() for text in where)
    return family[index].path if counted and index < len(family) else None


def _pair_tops(
    saved: Sequence[Named], wanted: Sequence[Named], group: str, counted: Set[str]
) -> dict[str, str] | None:
    """Maps live optimizer names to saved ones: one optimizer, or a wrapper and the wrapped one."""
    old, new = _tops(saved, group), _tops(wanted, group)
    pairs = pair_by_rank(
        {top: patterns(top.split("/"), counted) for top in old},
        {top: patterns(top.split("/"), counted) for top in new},
    )
    return {now: before for before, now in pairs.items()} if len(pairs) == len(new) else None


def _tops(entries: Sequence[Named], group: str) -> list[str]:
    prefix = f"{group}/" if group else ""
    owners = [entry.path.removeprefix(prefix).rpartition("/")[0] for entry in entries]
    return [owner for owner in dict.fromkeys(owners) if owner]


def _origins_of_slots(
    saved: Sequence[Named], wanted: Sequence[Named], counted: Set[str]
) -> dict[str, tuple[str, str | None]]:
    """Derives the weights of an optimizer that was saved without a model from its slot names."""
    ends: set[str] = set()
    mine: dict[str, str] = {}
    for entry in wanted:
        bare = entry.path.rpartition("/")[2].partition("@")[0]
        if entry.weight is not None and bare.startswith(f"{flat(entry.weight)}_"):
            mine[flat(entry.weight)] = entry.weight
            ends.add(bare[len(flat(entry.weight)) :])
    theirs: set[str] = set()
    for entry in saved:
        bare = entry.path.rpartition("/")[2].partition("@")[0]
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
    known = set(names.values())
    names |= pair_by_rank(
        {e.path: patterns(split(e.path), counted) for e in saved if e.path not in names},
        {e.path: patterns(split(e.path), counted) for e in wanted if e.path not in known},
    )
    kinds = {entry.path: (entry.shape, entry.dtype) for entry in wanted}
    fits = all(kinds[names[e.path]] == (e.shape, e.dtype) for e in saved if e.path in names)
    return names if fits and len(names) == len(saved) == len(wanted) else None
