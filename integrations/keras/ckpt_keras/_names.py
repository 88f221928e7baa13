"""Names of variables: their parts, and what of them comes from the counters of Keras. Pure.

Keras numbers unnamed objects by counters of the process: the second ``Dense`` is
``dense_1``. In another process, or later in a notebook, the same code gets other numbers in the same
order. So among names that differ only in such numbers, the k-th of one side is
the k-th of the other (``pair``). Any other difference comes from a name in the user's code, and means another
variable.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

_TAKEN = re.compile(r"@\d+$")
_COUNTED = re.compile(r"(.+)_([1-9]\d*)")

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Named:
    """A saved or live variable."""

    path: str  # begins with the collection
    shape: tuple[int, ...]
    dtype: str
    owners: tuple[str, ...] = ()  # layers of a live weight, from the model inwards
    weight: str | None = None  # of a live optimizer's slot, the path of its weight


def inside(path: str) -> str:
    """A path without its collection."""
    return path.partition("/")[2]


def apart(path: str) -> tuple[str, str, str]:
    """What leads to the last part of a path; that part; its suffix, which distinguishes equal paths."""
    front, slash, last = path.rpartition("/")
    bare, _, where = last.partition("@")
    return front + slash, bare, where


def flat(path: str) -> str:
    """A weight's name as it appears in the names of its optimizer slots: Keras' path joined."""
    *parents, last = inside(path).split("/")
    return "_".join([*(_TAKEN.sub("", part) for part in parents), last.partition("@")[0]])


def dotted(path: str) -> str:
    """A weight's name as it appears in the suffix of a slot."""
    return inside(path).replace("/", ".")


def split(path: str) -> tuple[str, ...]:
    """The parts of a path without collection; a suffix that distinguishes equal paths is a part too."""
    *parents, last = path.split("/")
    name, at, where = last.partition("@")
    return (*parents, name, *(f"@{part}" for part in where.split(".") if at))


def within_one(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The first name, if all paths share it (seed generators aside); else empty."""
    first = {parts[0] for parts in paths if len(parts) > 2}
    return tuple(first) if len(first) == 1 else ()


def pattern(part: str, counted: Set[str], parent: str = "") -> tuple[str, int]:
    """A part of a path without its counter, and the counter; 0 for the first, which has none. A layer named after its
    numbered ``parent`` (``block_1_proj`` in ``block_1``) also loses that number, and has 0: the parent counts it.
    """
    if part in counted:
        return part, 0
    found = _COUNTED.fullmatch(part)
    if found is not None and found[1] in counted:
        return found[1], int(found[2])
    base, number = pattern(parent, counted) if parent else ("", 0)
    if number and part.startswith(f"{parent}_"):
        return base + part[len(parent) :], 0
    return part, 0


def patterns(parts: Sequence[str], counted: Set[str]) -> tuple[tuple[str, ...], Numbers]:
    """Every part of a path without its counter, and the counters."""
    found = [pattern(part, counted, before) for before, part in itertools.pairwise(["", *parts])]
    return tuple(name for name, _ in found), tuple(number for _, number in found)


def flat_pattern(name: str, counted: Set[str]) -> tuple[str, Numbers]:
    """The same for a path that was joined with ``_``, whose parts are ambiguous."""
    bases = "|".join(re.escape(base) for base in sorted(counted, key=len, reverse=True))
    counter = re.compile(rf"(?:(?<=_)|^)({bases})(?:_([1-9]\d*))?(?=_|$)")
    return counter.sub(r"\1", name), tuple(int(m[2] or 0) for m in counter.finditer(name))


def pair(
    saved: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]], counted: Set[str]
) -> dict[str, str]:
    """Maps saved names to wanted ones, each of which comes with its parts; see ``pair_by_rank``."""
    return pair_by_rank(
        {name: patterns(parts, counted) for name, parts in saved.items()},
        {name: patterns(parts, counted) for name, parts in wanted.items()},
    )


def pair_by_rank(
    saved: Mapping[str, tuple[object, Numbers]], wanted: Mapping[str, tuple[object, Numbers]]
) -> dict[str, str]:
    """Maps saved names to wanted ones, by pattern and the order of the counters. Unless its names are the same, a pattern
    is ambiguous and left out if one side has it more often than the other, or twice with the same number.
    """
    pairs: dict[str, str] = {}
    old, new = _by_pattern(saved), _by_pattern(wanted)
    for key in old.keys() & new.keys():
        before, after = old[key], new[key]
        if {name for _, name in before} == {name for _, name in after}:
            pairs |= {name: name for _, name in before}
        elif len(before) == len(after) and _unique(before) and _unique(after):
            pairs |= {a: b for (_, a), (_, b) in zip(before, after, strict=True)}
    return pairs


def _by_pattern(
    names: Mapping[str, tuple[object, Numbers]],
) -> dict[object, list[tuple[Numbers, str]]]:
    groups: dict[object, list[tuple[Numbers, str]]] = {}
    for name, (key, numbers) in names.items():
        groups.setdefault(key, []).append((numbers, name))
    return {key: sorted(group) for key, group in groups.items()}


def _unique(group: Sequence[tuple[Numbers, str]]) -> bool:
    return len({numbers for numbers, _ in group}) == len(group)


def embed(parts: Sequence[str], whole: Sequence[str | None]) -> tuple[int, ...] | None:
    """The positions of the parts in a longer sequence, as near to its end as they fit; None if they do not. None in
    ``whole`` fits any part.
    """
    places: list[int] = []
    end = len(whole)
    for part in reversed(parts):
        while end and whole[end - 1] not in (None, part):
            end -= 1
        if not end:
            return None
        end -= 1
        places.append(end)
    return tuple(reversed(places))
