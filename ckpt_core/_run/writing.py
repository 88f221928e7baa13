"""Saves, deletes and closes: what a Checkpointer does to the steps of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from ckpt_core._directory.step_names import check_step
from ckpt_core._errors import CheckpointError, GraceExceeded
from ckpt_core._run.in_flight import raise_failures, settle_all, wait_for_all
from ckpt_core._run.parts import Parts
from ckpt_core._run.tiers import StepToSave
from ckpt_core._save import RecordFields


class Writing:
    """Saves and deletes steps, until it is closed.

    Attributes:
        closed: whether ``end`` was called.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.closed = False

    def refuse_unless_open(self, call: str) -> None:
        """Raises CheckpointError if this Checkpointer is closed or must not write."""
        directory = self._parts.run.path
        if self.closed:
            raise CheckpointError(f"{directory}: this Checkpointer was closed")
        if self._parts.run.read_only:
            raise CheckpointError(f"{directory}: {call}() on a Checkpointer with read_only=True")

    def step_to_save(self, step: int) -> int:
        """The number of a step that is about to be saved; raises the error of the previous save."""
        self.refuse_unless_open("save")
        raise_failures(self._parts.saves)
        self._parts.preemption.note_step(step := check_step(step))
        return step

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        fields: RecordFields,
        *,
        force: bool,
        overwrite: bool,
    ) -> bool:
        """Starts to save a step if the policy wants it; whether it did."""
        parts = self._parts
        # A failed save of this step may have left it there. A damaged step cannot be moved in a store.
        damaged = not parts.run.local and step in parts.run.damaged
        overwrite = overwrite or damaged or step in parts.saving.maybe_not_durable
        begun = {running.step for running in parts.saves}
        if not overwrite and (step in parts.run.mine or step in begun):
            parts.branch.log_repeat(step)
            return False
        parts.unread.check(items)
        if not force and not self.wants(step):
            return False
        persists = parts.local is None or force or self._persists(step)
        parts.saving.make_way(persists)
        parts.branch.make_room(step, overwrite, persists, older=force)
        what = StepToSave(step, items, fields, may_be_older=force)
        parts.saving.start(what, overwrite, persists, lambda: self._began(step, persists))
        return True

    def wants(self, step: int) -> bool:
        """Whether the policy wants this step; all processes must call it."""
        parts = self._parts
        return not parts.run.read_only and parts.decision.wants(step, parts.saves[0].running)

    def _persists(self, step: int) -> bool:
        """Whether this save also goes to the persistent directory; all processes must call it."""
        parts = self._parts
        # After a stop signal the host and its local disk may be gone before the next run starts.
        last = parts.preemption.wants(step) or parts.preemption.will_stop
        wanted = parts.persist is None or parts.persist.wants(step, parts.saving.in_flight.running)
        return wanted or last

    def _began(self, step: int, persists: bool) -> None:
        self._parts.decision.save_began(step)
        if persists and self._parts.persist is not None:
            self._parts.persist.save_began(step)

    def delete(self, step: int) -> None:
        """Deletes a step in all tiers, after running saves."""
        parts = self._parts
        self.refuse_unless_open("delete")
        step = check_step(step)
        settle_all(parts.saves)
        parts.decision.agree_on_call(f"delete step {step}")
        in_local = parts.local is not None and step in parts.local.complete
        parts.branch.before_delete(step, parts.tiers.latest)

        def delete() -> None:
            if not in_local or step in parts.run.steps.all():
                parts.retention.delete(step)

        with self._forgetting([step]):
            parts.decision.run_on_first(delete)
            if parts.local is not None:
                parts.local.delete_where(lambda other: other == step)

    def rollback_to(self, step: int) -> list[int]:
        """Deletes every step newer than ``step``; returns them."""
        parts = self._parts
        self.refuse_unless_open("rollback_to")
        step = check_step(step)
        settle_all(parts.saves)
        parts.decision.agree_on_call(f"roll back to step {step}")
        steps = parts.decision.steps_on_first(parts.tiers.all)
        parts.branch.before_delete_newer(step)
        newer = [other for other in steps if other > step]
        with self._forgetting(newer):
            parts.decision.run_on_first(lambda: parts.retention.delete_newer(step))
            if parts.local is not None:
                parts.local.delete_where(lambda other: other > step)
        return newer

    @contextlib.contextmanager
    def _forgetting(self, deleted: list[int]) -> Generator[None]:
        """Forgets those of the steps that are gone, also when the deletion fails or is interrupted."""
        mine = self._parts.run.mine
        own = mine & {*deleted}
        # Already before the deletion, as an interrupt may come during the `finally` below. A step that
        # is forgotten though it exists makes way for the next save of its number; one that is deleted
        # and not forgotten would never be saved again.
        mine -= own
        try:
            yield
        finally:
            mine |= own - set(self._parts.branch.forget(deleted))
            self._parts.decision.forget()

    def end(self) -> GraceExceeded | None:
        """Waits for running saves and releases the claims; an error if the grace period ran out."""
        parts = self._parts
        self.closed = True
        late = wait_for_all(parts.saves, parts.preemption.secs_left)
        left_secs = parts.preemption.secs_left()
        parts.preemption.close()
        if not any(running.running for running in parts.saves):
            parts.fence.leave()
            if parts.local is not None:
                parts.local.close(left_secs)
        return late

    def state(self) -> str:
        """What is going on, for ``repr``."""
        if self.closed:
            return "closed"
        saving = [str(save.step) for save in self._parts.saves if save.running]
        if saving:
            return f"saving step {saving[0]}"
        return "read only" if self._parts.run.read_only else "open"
