"""The leaves of all steps as one table: what steps have in common is held once. Pure.

A run of 1,000 steps with 5,000 leaves each has five million leaves, of which most often 5,000 differ.
A leaf is (item, path, type); a type is (kind, dtype, shape, bytes, sharding); a structure is the
list of a step's leaves, as ranges of their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ckpt_core._results import ItemInfo
from ckpt_core.report._sharding import drawing_of


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


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Table:
    """The position of each distinct item, type, leaf, sharding (as JSON) and structure of some steps."""

    _items: dict[str, int] = field(default_factory=dict[str, int])
    _types: dict[LeafType, int] = field(default_factory=dict[LeafType, int])
    _leaves: dict[Leaf, int] = field(default_factory=dict[Leaf, int])
    _shardings: dict[str, int] = field(default_factory=dict[str, int])
    _structures: dict[Ranges, int] = field(default_factory=dict[Ranges, int])

    @property
    def leaves(self) -> list[Leaf]:
        """All leaves, by their numbers."""
        return list(self._leaves)

    def add(self, items: Mapping[str, ItemInfo]) -> int:
        """Takes in the leaves of a step; returns the position of their structure."""
        numbers = [self._leaf(name, leaf) for name, item in items.items() for leaf in item.leaves]
        return _position(self._structures, ranges_of(numbers))

    def _leaf(self, item: str, leaf: Any) -> int:
        sharding = None
        if leaf.sharding:
            key = json.dumps(leaf.sharding, sort_keys=True, default=str)
            sharding = _position(self._shardings, key)
        type_ = LeafType(leaf.kind, leaf.dtype, tuple(leaf.shape), leaf.bytes, sharding)
        places = _position(self._items, item), leaf.path, _position(self._types, type_)
        return _position(self._leaves, Leaf(*places))

    def numbers_in(self, structure: int | None) -> Iterator[tuple[tuple[str, str], int]]:
        """Item and path, and number, of each leaf of a structure."""
        leaves, items = self.leaves, list(self._items)
        for first, end in list(self._structures)[structure] if structure is not None else ():
            for number in range(first, end):
                yield (items[leaves[number].item], leaves[number].path), number

    def as_json(self) -> dict[str, Any]:
        """The same as plain values: positions are those in lists, and leaves are columns."""
        drawings = [drawing_of(json.loads(text)) for text in self._shardings]
        return {
            "items": list(self._items),
            "types": list(self._types),
            "leaves": {
                name: [getattr(leaf, name) for leaf in self._leaves] for name in Leaf._fields
            },
            "shardings": [{**asdict(one), "parts": one.parts} for one in drawings],
            "structures": list(self._structures),
        }


def _position(among: dict[Any, int], value: Any) -> int:
    """The position of a value, which is added if it is new."""
    return among.setdefault(value, len(among))


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Numbers as ranges (first, one after the last), in their order: 0, 1, 2, 7, 8 are (0, 3), (7, 9)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        first = found.pop()[0] if found and found[-1][1] == number else number
        found.append((first, number + 1))
    return tuple(found)
