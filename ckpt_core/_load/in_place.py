"""How a restore sets live objects, and what becomes of them if it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core._errors import SET, CheckpointError, drop_locals, mark_of_target
from ckpt_core._lazy import jax
from ckpt_core._load.plans import ItemPlan
from ckpt_core._options import MIB

_BATCH_BYTES = 128 * MIB


@dataclass(eq=False)
class InPlace:
    """Sets the live objects of one restore: those of NNX, Keras and torchax while arrays are being read, the others at the end. An
    array that is set frees the one that it replaces: memory holds one state, and of the other at most ``limit_bytes`` and
    128 MiB. The price: if the restore fails midway, the object holds parts of two states; ``give_up`` then deletes its new
    arrays, so that jax refuses to train on the mix. Objects that were set as a whole stay, and the error names them.
    """

    limit_bytes: int
    # arrays that were read but not set: by name of the item its plan, and by position the arrays
    _waiting: dict[str, tuple[ItemPlan, dict[int, Any]]] = field(
        default_factory=dict[str, tuple[ItemPlan, dict[int, Any]]]
    )
    _waiting_bytes: int = 0
    _new: list[Any] = field(default_factory=list[Any])  # set in parts: deleted if the restore fails
    _begun: dict[str, ItemPlan] = field(default_factory=dict[str, ItemPlan])  # set in part, by name
    _early: dict[str, Any] = field(default_factory=dict[str, Any])  # values of what begin() has set
    _setting: bool = False  # an object is being set
    _set: list[ItemPlan] = field(default_factory=list[ItemPlan])  # set as a whole

    def begin(self, plans: Sequence[ItemPlan]) -> None:
        """Sets the data pipelines, before arrays are read."""
        for plan in plans:
            if plan.is_pipeline:
                self._set.append(plan)
                self._setting = True
                self._early[plan.item.name] = plan.make([])
                self._setting = False

    def take(self, plan: ItemPlan, result: int, value: Any, size_bytes: int) -> None:
        """Takes the array that was read for position ``result``; sets all waiting arrays once they reach the limit."""
        if plan.set_parts is None or not isinstance(value, jax.Array):
            return
        if plan.item.name not in self._waiting:
            self._waiting[plan.item.name] = plan, {}
        self._waiting[plan.item.name][1][result] = value
        self._waiting_bytes += size_bytes
        if self._waiting_bytes >= min(self.limit_bytes, _BATCH_BYTES):
            for one, values in self._waiting.values():
                self._set_waiting(one, values)
            self._waiting, self._waiting_bytes = {}, 0

    def _set_waiting(self, plan: ItemPlan, values: Mapping[int, Any]) -> None:
        """Sets arrays of one object, by position; an object that can set none now is set as a whole at the end."""
        assert plan.set_parts is not None
        name, first = plan.item.name, plan.item.name not in self._begun
        self._new += values.values()
        self._begun[name] = plan
        self._setting = True
        held = plan.set_parts({plan.paths[result]: value for result, value in values.items()})
        self._setting = False
        self._new += held
        if held:
            for result in values:
                plan.kept[result] = None  # else the plan would keep the old arrays in memory
        elif first:
            del self._begun[name]

    def finish(self, plans: Sequence[ItemPlan], leaves: Sequence[list[Any]]) -> list[Any]:
        """The value of each item, after the last step of a restore: sets all live objects that are not set yet."""
        values: list[Any] = []
        for plan, read in zip(plans, leaves, strict=True):
            if plan.item.name in self._early:
                values.append(self._early[plan.item.name])
                continue
            if plan.live and plan.item.name not in self._begun:
                self._set.append(plan)
            self._setting = True
            values.append(plan.make(read))
            self._setting = False
        return values

    def give_up(self, error: BaseException) -> None:
        """After a failure, makes objects that hold parts of two states unusable; notes on the error say what became of each."""
        if self._setting:
            mark_of_target(error)
        try:
            self._delete_new(error)
        except Exception as failure:
            error.add_note(f"ckpt: cleaning up after the failed restore failed, too: {failure}")
        if self._set:
            names = ", ".join(plan.name for plan in self._set)
            error.add_note(
                f"ckpt: {names} {'was' if len(self._set) == 1 else 'were'} {SET}, or while it did: restore again, "
                "or create it again"
            )
        if self._begun:
            drop_locals(error)  # a caller that keeps the error must not keep the old arrays alive
        # the error's traceback keeps this object alive, so it must release the old arrays
        self._begun, self._new, self._set, self._waiting, self._early = {}, [], [], {}, {}

    def _delete_new(self, error: BaseException) -> None:
        """Deletes the new arrays of objects set in parts, so that jax refuses to use them."""
        if not self._begun:
            return
        for array in self._new:
            array.delete()
        names: list[str] = []
        for plan in self._begun.values():
            old = {id(leaf) for leaf in plan.kept if leaf is not None}
            try:
                for array in _arrays(plan):  # the adapter may have set copies of the new arrays
                    if id(array) not in old:
                        array.delete()
                if any(array.is_deleted() for array in _arrays(plan)):
                    names.append(plan.name)
            except CheckpointError:  # the adapter refuses to read deleted arrays
                names.append(plan.name)
        if names:
            error.add_note(
                f"ckpt: {', '.join(names)} held parts of two states when the restore failed, so "
                "its new arrays were deleted and it cannot be used. Restore another step "
                "into it, or create it again. Options(atomic_restore=True) changes nothing before all is "
                "read and verified, for twice the memory"
            )


def _arrays(plan: ItemPlan) -> list[Any]:
    """The jax arrays that the item's objects hold at present."""
    return [leaf for leaf in plan.leaves_now() if isinstance(leaf, jax.Array)]
