"""The leaves of all steps as one table: what steps have in common is held once. Pure.

A run of 1,000 steps with 5,000 leaves each has five million leaves, of which most often 5,000 differ.
A leaf is (item, path, type); a type is (kind, dtype, shape, bytes, sharding); a structure is the
list of a step's leaves, as ranges of their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_core._results import ItemInfo
from ckpt_core.report._sharding import Drawing, drawing_of


class LeafType(NamedTuple):
    """What leaves may have in common; ``sharding`` is a position in ``Table.shardings`` or None."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    sharding: int | None


class Leaf(NamedTuple):
    """A leaf that some steps have: positions of its item and type in the table, and its path."""

    item: int
    path: str
    type: int


@dataclass
class Table:
    """The distinct items, leaves, types, shardings and structures of some steps."""

    items: list[str] = field(default_factory=list[str])
    types: list[LeafType] = field(default_factory=list[LeafType])
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    shardings: list[Drawing] = field(default_factory=list[Drawing])
    structures: list[tuple[tuple[int, int], ...]] = field(
        default_factory=list[tuple[tuple[int, int], ...]]
    )
    _known: dict[Any, int] = field(default_factory=dict[Any, int])

    def add(self, items: Mapping[str, ItemInfo]) -> int:
        """Takes in the leaves of a step; returns the position of their structure."""
        numbers = [
            self.leaf(name, leaf.path, self._type(leaf))
            for name, item in items.items()
            for leaf in item.leaves
        ]
        return self._number(self.structures, ranges_of(numbers))

    def leaf(self, item: str, path: str, type_: int) -> int:
        """The number of a leaf."""
        return self._number(self.leaves, Leaf(self._number(self.items, item), path, type_))

    def _type(self, leaf: Any) -> int:
        sharding = None
        if leaf.sharding:
            key = json.dumps(leaf.sharding, sort_keys=True, default=str)
            sharding = self._known.get(key)
            if sharding is None:
                sharding = self._known[key] = len(self.shardings)
                self.shardings.append(drawing_of(leaf.sharding))
        found = LeafType(leaf.kind, leaf.dtype, tuple(leaf.shape), leaf.bytes, sharding)
        return self._number(self.types, found)

    def _number(self, among: list[Any], value: Any) -> int:
        """The position of a value in a list, to which it is added if it is new."""
        key = (id(among), value)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(among)
            among.append(value)
        return found


def ranges_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as ranges (first, one after the last), in their order: 0, 1, 2, 7, 8 are (0, 3), (7, 9)."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return tuple((first, end) for first, end in found)


def shortened(paths: Sequence[str]) -> list[tuple[int, str]]:
    """Each path as how many UTF-16 code units (as in JavaScript's strings) it shares with the one before it, and the
    rest: half of a page with 5,000 leaves would be repeated beginnings of paths.
    """
    found: list[tuple[int, str]] = []
    before = ""
    for path in paths:
        shared = 0
        for ours, theirs in zip(path, before, strict=False):
            if ours != theirs:
                break
            shared += 1
        units = shared + sum(character > "\uffff" for character in path[:shared])
        found.append((units, path[shared:]))
        before = path
    return found
