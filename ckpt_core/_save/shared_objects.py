"""Objects that stand in several items of one save, and that their owner can change."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ckpt_core._tree.leaves import CHANGEABLE_KINDS, LeafSpec


class SharedObjects:
    """Finds them while the items are prepared, one after the other."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], list[tuple[str, int]]]] = {}

    def note(self, item: str, leaves: Iterable[Any], specs: Iterable[LeafSpec]) -> None:
        """Notes the leaves of an item.

        Arrays are not kept alive: an adapter may have made them for this save. So another one may have the same id.
        """
        for position, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
            if spec.kind not in CHANGEABLE_KINDS:
                continue
            known = self._known.get(id(leaf))
            if known is None or known[0]() is not leaf:
                # numpy's generators, which are small, take no weak references
                is_array = spec.kind == "numpy"
                held = weakref.ref(leaf) if is_array else functools.partial(_same, leaf)
                known = self._known[id(leaf)] = held, []
            known[1].append((item, position))

    def groups(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """For each object in several items, all places of it: item, and position of the leaf."""
        found = (places for _, places in self._known.values())
        return tuple(tuple(places) for places in found if len({item for item, _ in places}) > 1)


def _same(leaf: Any) -> Any:
    return leaf
