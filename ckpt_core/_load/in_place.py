"""Live objects set while a restore reads, so that memory never holds their old and new state whole."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator
from typing import Any

import jax

from ckpt_core._load.wants import Planned
from ckpt_core._options import MIB
from ckpt_core._tree import Path

_BATCH_BYTES = 128 * MIB


class InPlace:
    """Sets arrays on live objects as they come, instead of all at the end.

    Each array that is set frees the one that it takes the place of, so that beside one state no
    more than a batch of the other is in memory. What was begun cannot be undone: where the restore
    fails, the objects hold parts of two states, and ``giving_up`` sees to it that nobody trains on
    that.

    Args:
        limit_bytes: how much may wait to be set.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = min(limit_bytes, _BATCH_BYTES)
        self._waiting: dict[Path, Any] = {}
        self._waiting_bytes = 0
        self._late_bytes = 0
        self._set: list[Any] = []
        self._begun: dict[str, None] = {}

    def take(self, planned: Planned, result: int, value: Any, size_bytes: int) -> None:
        """Takes one array that was read, and sets those that wait once they are enough."""
        if planned.set_leaves is None or not isinstance(value, jax.Array):
            return
        self._waiting[planned.paths[result]] = value
        self._waiting_bytes += size_bytes
        planned.kept[result] = None  # or the old array would live on in the plan
        # never few bytes at a time: to set some leaves is to walk through all of an object
        room_bytes = max(self._limit_bytes - self._late_bytes, self._limit_bytes // 16)
        if self._waiting_bytes >= room_bytes:
            was_set = planned.set_leaves(self._waiting)
            if was_set:
                self._begun[planned.item.name] = None
                self._set += was_set
            self._waiting, self._waiting_bytes = {}, 0

    def end_of_item(self) -> None:
        """Leaves the rest of an item to be set at the end; it counts towards what may wait."""
        self._late_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    @contextlib.contextmanager
    def giving_up(self) -> Generator[None]:
        """Where the block fails, makes what was set unusable, and says so."""
        try:
            yield
        except BaseException as error:
            if self._begun:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        for array in self._set:
            array.delete()
        error.add_note(
            f"ckpt: {', '.join(name or 'the target' for name in self._begun)} held parts of two states, and "
            "the new parts were deleted, so that nothing goes on with them. Restore another step "
            "into it, or make it anew. Options(atomic_restore=True) changes nothing before all is "
            "read, for twice the memory"
        )
        # whoever keeps the error, to restore an older step meanwhile, must not keep the old arrays
        seen: set[int] = set()
        chain: list[BaseException | None] = [error]
        while chain:
            link = chain.pop()
            if link is not None and id(link) not in seen:
                seen.add(id(link))
                traceback.clear_frames(link.__traceback__)
                chain += [link.__cause__, link.__context__]
