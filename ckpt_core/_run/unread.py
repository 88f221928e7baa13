"""Restored values that nobody has taken yet, so that ignoring them is noticed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import RestoredValueIgnored
from ckpt_core._results import Restored
from ckpt_core._tree import flatten


class UnreadValues:
    """What the last restore brought back and nobody took: values that were not read, and items left out.

    A loop has updated its state before it saves it, so which object is saved says nothing: of an item
    whose restored value was never read, whatever is saved has grown from something else.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._read: Set[str] = frozenset()
        self._returned: set[str] = set()
        self._left_out: Set[str] = frozenset()

    def watch(self, restored: Restored, targets: Mapping[str, Any], unexpected: str) -> None:
        """Remembers the names of what a restore could not set in place, and of what it left out.

        Args:
            unexpected: the argument of the restore: with ``"ignore"`` items may be left out.
        """
        # not the result itself, which holds every restored array
        self._step, self._read = restored.step, restored.read_items
        self._returned = {name for name, target in targets.items() if _comes_back(target)}
        self._left_out = restored.saved_items - set(targets) if unexpected == "error" else set()

    def check(self, items: Mapping[str, Any]) -> None:
        """Refuses to save anything under the name of a restored value that was never taken.

        Raises:
            RestoredValueIgnored: naming the item.
        """
        self._returned -= self._read
        for name, value in items.items():
            if name in self._returned:
                raise RestoredValueIgnored(
                    f"item {name!r} was restored from step {self._step}, and its value was never read. It "
                    "cannot be set in place, so what is being saved has not grown from it: training would "
                    f"go on from a fresh state. Take the value right after the restore: {name} = "
                    f"restored[{name!r}]",
                    item=name,
                )
            if name in self._left_out and not _adapters.is_written_anew(value):
                raise RestoredValueIgnored(
                    f"step {self._step}, which was restored, holds an item {name!r} that was not restored, "
                    "and now one of that name is being saved: training would go on from a fresh one. Pass "
                    f"{name}= to the restore too, or, if it is meant to begin anew, say so there: "
                    'unexpected="ignore"',
                    item=name,
                )


def _comes_back(target: Any) -> bool:
    """Whether there is anything in a target that no adapter sets in place."""
    if _adapters.adapter_for(target) is not None:
        return False
    flat = flatten(target, expand=lambda obj: ((), list) if _adapters.adapter_for(obj) else None)
    return bool(flat.leaves)
