"""Live objects set by a restore: while it reads, so that memory never holds their old and new state
whole, and at its end; and what becomes of them where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_core._errors import drop_locals
from ckpt_core._lazy import jax
from ckpt_core._load.outcomes import LiveOutcome, LiveTree, Undo
from ckpt_core._load.planned import ItemPlan
from ckpt_core._options import MIB

_BATCH_BYTES = 128 * MIB


class InPlace:
    """Sets the live objects of one restore.

    Each array that is set while others are read frees the one that it takes the place of, so that
    beside one state no more than a batch of the other is in memory. What was begun so cannot be
    undone: where the restore fails, the objects hold parts of two states, and ``give_up`` sees to
    it that nobody trains on that. What is set at the end is set back instead. Whatever is about to
    change is noted first, since an exception may come from a signal's handler at any moment.

    Args:
        limit_bytes: how much may wait to be set.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = min(limit_bytes, _BATCH_BYTES)
        self._waiting: dict[int, Any] = {}
        self._waiting_bytes = 0
        self._late_bytes = 0
        self._new: list[Any] = []
        self._begun: dict[str, ItemPlan] = {}
        self._early: dict[str, Any] = {}
        self._undos: list[tuple[ItemPlan, Undo | None]] = []

    def begin(self, plan: ItemPlan) -> None:
        """Sets an item whose objects are set before the others are read."""
        outcome = plan.outcome
        if isinstance(outcome, LiveOutcome) and outcome.early:
            self._undos.append((plan, outcome.undo()))
            self._early[plan.item.name] = outcome.make([])

    def take(self, plan: ItemPlan, result: int, value: Any, size_bytes: int) -> None:
        """Takes one array that was read, and sets those that wait once they are enough."""
        if _set_parts(plan) is None or not isinstance(value, jax.Array):
            return
        self._waiting[result] = value
        self._waiting_bytes += size_bytes
        # never few bytes at a time: to set some leaves is to walk through all of an object
        room_bytes = max(self._limit_bytes - self._late_bytes, self._limit_bytes // 16)
        if self._waiting_bytes >= room_bytes:
            self._set_waiting(plan, plan.outcome)

    def _set_waiting(self, plan: ItemPlan, outcome: Any) -> None:
        name, first = plan.item.name, plan.item.name not in self._begun
        self._new += self._waiting.values()
        self._begun[name] = plan
        held = outcome.set_parts(
            {outcome.paths[result]: value for result, value in self._waiting.items()}
        )
        self._new += held
        if held:
            plan.forget(list(self._waiting))  # or the old arrays would live on in the plan
        elif first:
            del self._begun[name]  # it takes nothing but at the end
        self._waiting, self._waiting_bytes = {}, 0

    def end_of_item(self) -> None:
        """Leaves the rest of an item to be set at the end; it counts towards what may wait."""
        self._late_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self, plans: Sequence[ItemPlan], leaves: Sequence[list[Any]]) -> list[Any]:
        """The values of all items, live objects set; the last that a restore does."""
        values: list[Any] = []
        for plan, read in zip(plans, leaves, strict=True):
            if plan.item.name in self._early:
                values.append(self._early[plan.item.name])
                continue
            if isinstance(plan.outcome, LiveOutcome):
                begun = plan.item.name in self._begun
                self._undos.append((plan, None if begun else plan.outcome.undo()))
            values.append(plan.outcome.make(read))
        return values

    def give_up(self, error: BaseException) -> None:
        """Sets back what can be, makes the rest unusable, and adds to the error what became of it."""
        interrupt: BaseException | None = None
        for work in (self._delete_new, self._set_back):
            for _ in range(2):  # who interrupts this, too, is heard when it is done
                try:
                    work(error)
                    break
                except Exception as failure:
                    error.add_note(f"ckpt: giving up the restore failed, too: {failure}")
                    break
                except BaseException as another:
                    interrupt = another
        if self._begun:
            drop_locals(error)  # who keeps the error must not keep the old arrays
        # the error's traceback holds this object, which must not hold the old arrays
        self._begun, self._new, self._undos, self._waiting, self._early = {}, [], [], {}, {}
        if interrupt is not None:
            raise interrupt from error

    def _delete_new(self, error: BaseException) -> None:
        """Of objects that were set in parts: deletes what is new, so that jax refuses to use it."""
        if not self._begun:
            return
        for array in self._new:
            array.delete()
        names: list[str] = []
        for plan in self._begun.values():
            old = {id(leaf) for leaf in plan.kept if leaf is not None}
            for array in _arrays(plan):  # an adapter may have set copies of what it was given
                if id(array) not in old:
                    array.delete()
            if any(array.is_deleted() for array in _arrays(plan)):
                names.append(plan.name)
        if names:
            error.add_note(
                f"ckpt: {', '.join(names)} held parts of two states, and "
                "the new parts were deleted, so that nothing goes on with them. Restore another step "
                "into it, or make it anew. Options(atomic_restore=True) changes nothing before all is "
                "read, for twice the memory"
            )

    def _set_back(self, error: BaseException) -> None:
        while self._undos:
            plan, undo = self._undos[-1]
            try:
                if undo is not None:
                    undo()
                elif plan.item.name not in self._begun:
                    why = "what it held was too large to be kept, or is not known"
                    error.add_note(_mixed(plan.name, why))
            except Exception as failure:
                why = f"setting it back failed: {type(failure).__name__}: {failure}"
                error.add_note(_mixed(plan.name, why))
            self._undos.pop()


def _set_parts(plan: ItemPlan) -> Any:
    """What sets some leaves of the item's one live object; None where it is set as a whole only."""
    return plan.outcome.set_parts if isinstance(plan.outcome, LiveTree) else None


def _arrays(plan: ItemPlan) -> list[Any]:
    """The arrays that the item's objects hold now."""
    assert isinstance(plan.outcome, LiveTree)
    return [leaf for leaf in plan.outcome.held_now() if isinstance(leaf, jax.Array)]


def _mixed(name: str, why: str) -> str:
    return (
        f"ckpt: {name} may hold parts of two states: it was being set when this happened, and {why}. "
        "Make it anew, or restore into it again, before it is used"
    )
