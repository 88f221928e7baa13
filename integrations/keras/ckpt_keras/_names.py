"""Names of variables, and what of them comes from the counters of Keras. Pure.

Keras numbers unnamed objects by counters of the process: the second ``Dense`` is ``dense_1``. In another process, or later
in a notebook, the same code gets other numbers in the same order. ``comparable`` therefore puts the rank of a number in its
place. Any other difference comes from a name in the user's code, and means another variable.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

_TAKEN = re.compile(r"@\d+$")
_COUNTED = re.compile(r"(.+)_([1-9]\d*)")

Parts = tuple[str, ...]

Pattern = tuple[tuple[str, int | None], ...]
"""Parts of a name without their numbers, each with its number if its class is one that Keras numbers."""


@dataclass(frozen=True)
class Named:
    """A saved or live variable."""

    path: str  # begins with the collection
    shape: tuple[int, ...]
    dtype: str
    owners: Parts = ()  # layers of a live weight, from the model inwards


def inside(path: str) -> str:
    """A path without its collection."""
    return path.partition("/")[2]


def flat(path: str) -> str:
    """A weight's name as it appears in the names of its optimizer slots: Keras' path joined."""
    *parents, last = inside(path).split("/")
    return "_".join([*(_TAKEN.sub("", part) for part in parents), last.partition("@")[0]])


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


# ----------------------------------------------------------------------------------- numbers


def numbered(part: str, counted: Set[str]) -> tuple[str, int | None]:
    """A part of a path without its number, and the number: 0 for the first, which has none; None if Keras counts no such."""
    found = _COUNTED.fullmatch(part)
    if found is not None and found[1] in counted and part not in counted:
        return found[1], int(found[2])
    return part, 0 if part in counted else None


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


def pattern_of_text(text: str, counted: frozenset[str]) -> Pattern:
    """The same where names are joined with ``_``, so that the parts are ambiguous."""
    counter = _counter_in_text(counted)
    numbers = ((found[1], int(found[2] or 0)) for found in counter.finditer(text))
    return (counter.sub(r"\1", text), None), *numbers


@functools.cache
def _counter_in_text(counted: frozenset[str]) -> re.Pattern[str]:
    bases = "|".join(re.escape(base) for base in sorted(counted, key=len, reverse=True))
    return re.compile(rf"(?:(?<=[_@.])|^)({bases})(?:_([1-9]\d*))?(?=[_@.]|$)")


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
    counts = [Counter(side.values()) for side in (saved, wanted)]
    now = {
        value: name for name, value in wanted.items() if counts[0][value] == counts[1][value] == 1
    }
    return {name: now[value] for name, value in saved.items() if value in now}


def pair_parts(
    saved: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]], counted: Set[str]
) -> dict[str, str]:
    """Maps saved names to wanted ones, each of which comes with its parts."""
    old, new = (
        {n: pattern(parts, counted) for n, parts in side.items()} for side in (saved, wanted)
    )
    return pair(*comparable(old, new))


def embeds(parts: Sequence[object], whole: Sequence[object]) -> bool:
    """Whether the parts occur in a longer sequence, in this order; None in ``whole`` fits any part."""
    rest = iter(whole)
    return all(any(other is None or other == part for other in rest) for part in parts)
