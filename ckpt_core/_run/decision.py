"""Whether to save a step: a policy is asked once for all processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ckpt_core._errors import CheckpointError
from ckpt_core._processes import Processes
from ckpt_core._run.policies import when
from ckpt_core._run.preemption import Preemption
from ckpt_core._run.save_now import SaveNow

_NOT_LOOKED = -1


class SaveDecision:
    """Asks a save policy; process 0 decides for all if the policy depends on a clock or the disk."""

    def __init__(
        self,
        policy: when.Decision,
        newest_on_disk: Callable[[], int | None],
        processes: Processes,
        preemption: Preemption,
        timeout_secs: float,
        save_now: SaveNow | None = None,
    ) -> None:
        self._policy = policy.decide if isinstance(policy, when.SavePolicy) else policy
        self._listens = bool(getattr(policy, "listens", False))
        self._processes = processes
        self._preemption = preemption
        self._save_now = save_now
        self._newest_on_disk = newest_on_disk
        self._by_step = bool(getattr(policy, "by_step", False))
        self._agree = processes.count > 1 and not self._by_step
        if self._agree:
            self._together = processes.round("decide whether to save a step", timeout_secs)
        self._last: tuple[int, bool] | None = None
        self._newest: int | None = _NOT_LOOKED
        self._last_save_secs = float("-inf")

    def wants(self, step: int, saving: bool) -> bool:
        """Whether the policy wants this step; with several processes, all must call it."""
        if self._agree and self._last is not None and self._last[0] == step:
            return self._last[1]  # process 0 has already decided about this step
        # before the policy, which may raise in one process alone
        if (save_now := self._save_now) is not None:
            save_now.step = step if save_now.step == step else None
            now = step if self._processes.count > 1 else time.monotonic()
            if now >= save_now.due or step < save_now.last:
                save_now.look_for_request(step)
            save_now.last = step
        # A listing that fails in one process must not keep that one out of a call that the others make.
        if self._newest == _NOT_LOOKED and not self._agree and not self._by_step:
            self._newest = self._newest_on_disk()
        context = when.SaveContext(
            newest_step=None if self._newest == _NOT_LOOKED else self._newest,
            secs_since_save=time.monotonic() - self._last_save_secs,
            saving=saving,
            preempted=(self._listens or not self._by_step) and self._preemption.wants(step),
        )
        if self._agree:
            wanted = self._agreed(step, context)
        else:
            wanted = bool(self._policy(step, context))
        if save_now is not None and save_now.step is not None:
            wanted = True
        self._last = (step, wanted)
        if self._listens and not self._agree:
            self._preemption.decided(wanted, context.preempted)
        return wanted

    def _agreed(self, step: int, context: when.SaveContext) -> bool:
        """The policy's answer on process 0; asked on all, since a policy may count its calls."""
        wanted, failed = False, None
        if self._processes.index > 0:
            try:
                wanted = bool(self._policy(step, context))
            except Exception as error:  # process 0 may answer all the same, and the next question comes after this one
                failed = error

        def decide() -> tuple[int, bool]:
            if self._newest == _NOT_LOOKED:
                self._newest = self._newest_on_disk()
            here = replace(context, newest_step=self._newest)
            return step, bool(self._policy(step, here))

        asked, wanted = self._together.first(decide)
        if failed is not None:
            raise failed
        if asked != step:
            raise CheckpointError(
                f"process 0 asks whether to save step {asked}, and process {self._processes.index} "
                f"step {step}: all processes must ask about the same steps, in one order"
            )
        return wanted

    def save_began(self, step: int) -> None:
        """Notes that a save of this step begins now."""
        self._newest = step
        self._last_save_secs = time.monotonic()

    def forget(self) -> None:
        """Drops what is cached of the directory, after steps were deleted."""
        self._newest = _NOT_LOOKED
        self._last = None
