"""Saved names against those of a live object: by path, by rank of the numbers, by position. Pure.

Keras numbers what has no name of its own by counters of the process: the second ``Dense`` is
``dense_1``, the second Adam ``adam_1``, and its slots carry the names of the layers. The same code
has other names in another process or in the second half of a notebook. Each collection is matched
as a whole, or not at all: half a match by name and half by guess is how weights end up in the
wrong layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_keras._slots import (
    METRICS,
    MORE_OPTIMIZERS,
    NON_TRAINABLE,
    TRAINABLE,
    without_count,
)

_NUMBER = re.compile(r"_\d+(?=/|_|@|$)")


@dataclass(frozen=True)
class Named:
    """A variable as both sides know it: full path, and what it holds."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        """What must agree for one to stand for another."""
        return self.shape, self.dtype


Names = dict[str, str]
"""Saved path -> path now."""


def align_model(
    saved: Sequence[Named], wanted: Sequence[Named], *, ordered: bool
) -> tuple[Names, set[str]]:
    """Names that changed, and paths of either side that are left alone.

    Metrics are left alone where they do not fit: they count the epoch that is running, and Keras
    resets them at the next. Everything else that does not fit keeps its name, so that the error
    which follows names both sides.
    """
    names: Names = {}
    old, new = _by_collection(saved), _by_collection(wanted)
    weights = _align_weights(old, new, ordered)
    names.update(weights)
    for group in sorted({*old, *new} - {TRAINABLE, NON_TRAINABLE, METRICS}):
        names.update(
            _align_optimizer(old.get(group, []), new.get(group, []), group, weights, ordered)
        )
    metrics = _align_whole(old.get(METRICS, []), new.get(METRICS, []), _last, ordered)
    if metrics is not None:
        names.update(metrics)
        return _changed(names), set()
    left_alone = {entry.path for side in (old, new) for entry in side.get(METRICS, [])}
    return _changed(names), left_alone


def align_plain(saved: Sequence[Named], wanted: Sequence[Named], *, ordered: bool) -> Names:
    """Names that changed in an optimizer, a metric or a seed generator of its own."""
    return _changed(_align_optimizer(saved, wanted, "", {}, ordered))


def _changed(names: Names) -> Names:
    return {old: new for old, new in names.items() if old != new}


def _by_collection(entries: Sequence[Named]) -> dict[str, list[Named]]:
    groups: dict[str, list[Named]] = {}
    for entry in entries:
        parts = entry.path.split("/")
        group = "/".join(parts[:2]) if parts[0] == MORE_OPTIMIZERS else parts[0]
        groups.setdefault(group, []).append(entry)
    return groups


def _align_weights(
    old: Mapping[str, list[Named]], new: Mapping[str, list[Named]], ordered: bool
) -> Names:
    """Weights and random state; freezing moves a variable from one collection to the other."""
    saved = [entry for group in (TRAINABLE, NON_TRAINABLE) for entry in old.get(group, [])]
    wanted = [entry for group in (TRAINABLE, NON_TRAINABLE) for entry in new.get(group, [])]
    by_path = {_inside(entry.path): entry.path for entry in wanted}
    if by_path.keys() != {_inside(entry.path) for entry in saved}:
        names: Names = {}
        for group in (TRAINABLE, NON_TRAINABLE):
            part = _align_whole(old.get(group, []), new.get(group, []), _last, ordered)
            if part is None:
                break
            names.update(part)
        else:
            return names
        joint = _by_rank(saved, wanted)
        if joint is not None:
            return joint
    return {
        entry.path: by_path[_inside(entry.path)]
        for entry in saved
        if _inside(entry.path) in by_path
    }


def _align_optimizer(
    saved: Sequence[Named], wanted: Sequence[Named], group: str, weights: Names, ordered: bool
) -> Names:
    """An optimizer: its own name is numbered, and its slots carry the names of the weights."""
    if {entry.path for entry in saved} == {entry.path for entry in wanted}:
        return {}
    old_tops, new_tops = _tops(saved, group), _tops(wanted, group)
    if [_unnumbered(top) for top in old_tops] != [_unnumbered(top) for top in new_tops]:
        return {}  # Adam's state is not SGD's, even where shapes agree
    flat = {_flat(old): _flat(new) for old, new in weights.items()}
    tops = dict(zip(old_tops, new_tops, strict=True))
    names = {entry.path: _slot_name(entry.path, group, tops, flat) for entry in saved}
    if set(names.values()) == {entry.path for entry in wanted}:
        return names
    known_old, known_new = set(flat), set(flat.values())

    def last(path: str) -> str:
        name = _last(path)
        for known in (known_old, known_new):
            fits = [prefix for prefix in known if name.startswith(prefix + "_")]
            if fits:
                return name[len(max(fits, key=len)) :]
        return _NUMBER.sub("", name)

    by_position = _align_whole(saved, wanted, last, ordered)
    # what is left over is reported under the nearest names there are
    return by_position if by_position is not None else names


def _unnumbered(name: str) -> str:
    return _NUMBER.sub("", name)


def _tops(entries: Sequence[Named], group: str) -> list[str]:
    """The names of the optimizers in a group (one, or a wrapper and what it wraps), in order."""
    parts = [entry.path.removeprefix(group + "/").split("/") for entry in entries]
    return list(dict.fromkeys(names[0] for names in parts if len(names) > 1))


def _slot_name(path: str, group: str, tops: Mapping[str, str], flat: Mapping[str, str]) -> str:
    """What a slot is called once its optimizer and its weight have their new names."""
    prefix = f"{group}/" if group else ""
    *owners, last = path.removeprefix(prefix).split("/")  # Nadam has a slot without an owner
    fits = [old for old in flat if last.startswith(old + "_")]
    if fits:
        old = max(fits, key=len)
        last = flat[old] + last[len(old) :]
    return prefix + "/".join([*(tops.get(owner, owner) for owner in owners), last])


def _flat(path: str) -> str:
    return _inside(path).replace("/", "_")


def _inside(path: str) -> str:
    """A path without its collection."""
    return path.partition("/")[2]


def _last(path: str) -> str:
    return without_count(path.rpartition("/")[2])


def _align_whole(
    saved: Sequence[Named], wanted: Sequence[Named], last: Any, ordered: bool
) -> Names | None:
    """A whole collection by path, by rank or by position; None where none of them fits."""
    if len(saved) != len(wanted):
        return None
    if {entry.path for entry in saved} == {entry.path for entry in wanted}:
        kinds = {entry.path: entry.kind for entry in wanted}
        if all(kinds[entry.path] == entry.kind for entry in saved):
            return {entry.path: entry.path for entry in saved}
        return None
    if not ordered:
        return _by_rank(saved, wanted)
    pairs = list(zip(saved, wanted, strict=True))
    if all(old.kind == new.kind and last(old.path) == last(new.path) for old, new in pairs):
        return {old.path: new.path for old, new in pairs}
    return _by_rank(saved, wanted)


def _by_rank(saved: Sequence[Named], wanted: Sequence[Named]) -> Names | None:
    """By the order of the counters: the k-th of a sort there is the k-th of that sort here.

    For trees whose order was lost, such as those that Orbax wrote: names must be the same but for
    their numbers and, as Sequential adds and drops one, a first part that all of them share.
    """
    for strip in (lambda path: path, _without_first):
        old, new = _ranked(saved, strip), _ranked(wanted, strip)
        if old is None or new is None:
            continue
        if [key for key, _ in old] == [key for key, _ in new]:
            return {
                before.path: after.path for (_, before), (_, after) in zip(old, new, strict=True)
            }
    return None


def _without_first(path: str) -> str:
    """Without the name of the model; ``sequential/dense/kernel`` and ``dense/kernel`` are one."""
    parts = path.split("/")
    return "/".join(parts[-2:])


def _ranked(entries: Sequence[Named], strip: Any) -> list[tuple[Any, Named]] | None:
    """Entries sorted by pattern and then number; None where two cannot be told apart."""
    keyed: list[tuple[Any, Any, Named]] = []
    for entry in entries:
        path = strip(_inside(entry.path))
        pattern = _NUMBER.sub("", path)
        keyed.append(((pattern, entry.kind), _numbers(path), entry))
    keyed.sort(key=lambda row: row[:2])
    for one, other in itertools.pairwise(keyed):
        if one[:2] == other[:2]:
            return None
    return [(key, entry) for key, _, entry in keyed]


def _numbers(path: str) -> tuple[tuple[int, ...], ...]:
    """The counters in each part of a path; no counter comes before ``_1``."""
    return tuple(tuple(int(n[1:]) for n in _NUMBER.findall(part)) for part in path.split("/"))
