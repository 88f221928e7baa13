"""Restored values that nobody has read yet, so that ignoring them is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

from ckpt_core import _adapters
from ckpt_core._errors import RestoredValueIgnored
from ckpt_core._results import Restored
from ckpt_core._tree import flatten


class UnreadValues:
    """The immutable targets of the last restore, and whether their new values were taken."""

    def __init__(self) -> None:
        self._read: Set[str] = frozenset()
        self._step: int | None = None
        self._old: dict[str, list[Any]] = {}

    def watch(self, restored: Restored, targets: Mapping[str, Any]) -> None:
        """Remembers the arrays of targets that could not be set in place."""
        # not the result itself, which holds every restored array
        self._read, self._step = restored.read_items, restored.step
        self._old = {
            name: arrays for name, target in targets.items() if (arrays := _arrays(target))
        }

    def check(self, items: Mapping[str, Any]) -> None:
        """Refuses to save an item's old arrays while its restored value was never read.

        Raises:
            RestoredValueIgnored: naming the item.
        """
        for name, references in list(self._old.items()):
            if name in self._read:
                del self._old[name]
            elif name in items:
                old = {id(array) for reference in references if (array := reference()) is not None}
                if any(id(array) in old for array in _plain_arrays(items[name])):
                    raise RestoredValueIgnored(
                        f"item {name!r} was restored from step {self._step}, its value was never "
                        "read, and the object from before the restore is being saved: training would go on "
                        f"from a fresh state. Take the value first: {name} = restored[{name!r}]",
                        item=name,
                    )


def _arrays(target: Any) -> list[Any]:
    return [weakref.ref(array) for array in _plain_arrays(target)]


def _plain_arrays(tree: Any) -> list[Any]:
    """The arrays of a tree that no adapter sets in place."""
    if _adapters.adapter_for(tree) is not None:
        return []
    flat = flatten(tree, expand=lambda obj: ((), list) if _adapters.adapter_for(obj) else None)
    return [leaf for leaf in flat.leaves if isinstance(leaf, (jax.Array, np.ndarray))]
