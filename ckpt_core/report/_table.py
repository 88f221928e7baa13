"""The leaves of all steps as one table: what steps have in common is held once. Pure.

A run of 1,000 steps with 5,000 leaves each has five million leaves, of which most often 5,000 differ.
A leaf is (item, path, type); a type is (kind, dtype, shape, bytes, position of the sharding or None); a structure is the
list of a step's leaves, as ranges of their numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._results import ItemInfo

_MOST_DEVICES = 65_536
"""A page lists the ids of no more."""


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
    _types: dict[tuple[Any, ...], int] = field(default_factory=dict[tuple[Any, ...], int])
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
        described = (leaf.kind, leaf.dtype, tuple(leaf.shape), leaf.bytes, sharding)
        places = _position(self._items, item), leaf.path, _position(self._types, described)
        return _position(self._leaves, Leaf(*places))

    def numbers_in(self, structure: int | None) -> Iterator[tuple[tuple[str, str], int]]:
        """Item and path, and number, of each leaf of a structure."""
        leaves, items = self.leaves, list(self._items)
        for first, end in list(self._structures)[structure] if structure is not None else ():
            for number in range(first, end):
                yield (items[leaves[number].item], leaves[number].path), number

    def as_json(self) -> dict[str, Any]:
        """The same as plain values: positions are those in lists, and leaves are columns."""
        return {
            "items": list(self._items),
            "types": list(self._types),
            "leaves": {
                name: [getattr(leaf, name) for leaf in self._leaves] for name in Leaf._fields
            },
            "shardings": [drawing_of(json.loads(text)) for text in self._shardings],
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


def drawing_of(sharding: Mapping[str, Any]) -> dict[str, Any]:
    """How an array lies over a mesh, from the sharding that a checkpoint has in JSON: its ``kind``; name and size of the ``axes``
    of the mesh; ``spec``, for each dimension of the array the axes that it is split over, and ``parts``, into how many;
    ``devices``, for each part, in C order, the ids of those that hold it. A ``note`` says why there is no drawing.
    """
    kind = str(sharding.get("sharding_type", "")) or "unknown"
    drawing = {"kind": kind, "axes": (), "spec": (), "devices": (), "note": "", "parts": ()}
    if kind != "NamedSharding":
        device = sharding.get("device_str")
        note = f"all of it on {device}" if device else f"{kind}: its parts are not described"
        return drawing | {"note": note}
    try:
        return drawing | _over_a_mesh(sharding)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        return drawing | {"note": f"cannot be drawn: {error}"}


def _over_a_mesh(sharding: Mapping[str, Any]) -> dict[str, Any]:
    names = [str(name) for name in sharding["axis_names"]]
    sizes = [int(size) for size in sharding["shape"]]
    axes = dict(zip(names, sizes, strict=True))
    entries = sharding["partition_spec"]
    each = [one if isinstance(one, list | tuple) else [one] for one in entries]
    spec = [[str(name) for name in split if name is not None] for split in each]
    split = [name for one in spec for name in one]
    if unknown := {*split} - {*names}:
        raise ValueError(f"no axis of the mesh is called {min(unknown)}")
    parts = [math.prod(axes[name] for name in one) for one in spec]
    found = {"axes": list(axes.items()), "spec": spec, "parts": parts}
    if math.prod(sizes) > _MOST_DEVICES:
        return found | {"note": "too many devices to draw"}
    # a part is on the devices whose place on the split axes is its own; the first axis is the slowest
    order = [*split, *(name for name in names if name not in split)]
    # a device whose id was not saved is called by its number in the mesh
    mesh = (sharding.get("device_mesh") or {}).get("mesh")
    flat = range(math.prod(sizes)) if mesh is None else np.array(mesh, dtype=object).reshape(-1)
    ids = np.array([int(one["id"] if isinstance(one, dict) else one) for one in flat])
    placed = ids.reshape(sizes).transpose([names.index(name) for name in order])
    return found | {"devices": placed.reshape(math.prod(parts), -1).tolist()}
