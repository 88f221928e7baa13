"""Whether to save a step: the policy, asked once for each, with one answer for all processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from ckpt_core._errors import CheckpointError
from ckpt_core._policies import when
from ckpt_core._preemption import Preemption
from ckpt_core._processes import Processes, decided_by_first, next_round

_NOT_LOOKED = -1


class SaveDecision:
    """Asks a save policy; what depends on a clock or on the disk is decided by process 0.

    Args:
        policy: of the Checkpointer.
        newest_on_disk: looks at the directory.
        timeout_secs: how long to wait for process 0.
    """

    def __init__(
        self,
        policy: when.Decision,
        processes: Processes,
        preemption: Preemption,
        newest_on_disk: Callable[[], int | None],
        timeout_secs: float,
    ) -> None:
        self._policy = policy
        self._processes = processes
        self._preemption = preemption
        self._newest_on_disk = newest_on_disk
        self._timeout_secs = timeout_secs
        self._agree = processes.count > 1 and not getattr(policy, "by_step", False)
        self._tag = next_round() if self._agree else ""
        self._asked = 0
        self._last: tuple[int, bool] | None = None
        self._newest: int | None = _NOT_LOOKED
        self._last_save_secs = float("-inf")

    def wants(self, step: int, saving: bool) -> bool:
        """Whether the policy wants this step; all processes must ask, where several run."""
        if self._agree and self._last is not None and self._last[0] == step:
            return self._last[1]  # process 0 has decided about this one
        if self._newest == _NOT_LOOKED:
            self._newest = self._newest_on_disk()
        context = when.SaveContext(
            newest_step=self._newest,
            secs_since_save=time.monotonic() - self._last_save_secs,
            saving=saving,
            preempted=self._preemption.wants(step),
        )
        wanted = bool(self._policy(step, context))
        if self._agree:
            self._asked += 1
            tag = f"{self._tag}/when/{self._asked}"
            said = decided_by_first(self._processes, tag, f"{step} {wanted}", self._timeout_secs)
            wanted = said == f"{step} True"
            self._last = (step, wanted)
        return wanted

    def steps_of_first(self, steps: list[int]) -> list[int]:
        """The steps that process 0 sees; where several processes run, all must ask."""
        if self._processes.count == 1:
            return steps
        text = json.dumps(steps)
        tag = f"{next_round()}/steps"
        return json.loads(decided_by_first(self._processes, tag, text, self._timeout_secs))

    def done_by_first(self, work: Callable[[], None]) -> None:
        """Process 0 does the work and the others wait; a failure of it is one of all."""
        mine = work if self._processes.index == 0 else lambda: None
        tag = f"{next_round()}/first"
        self._processes.together(tag, mine, self._timeout_secs, _failed_elsewhere)

    def save_began(self, step: int) -> None:
        """A save of this step begins now."""
        self._newest = step
        self._last_save_secs = time.monotonic()

    def forget(self) -> None:
        """Steps were deleted: what was known of the directory no longer holds."""
        self._newest = _NOT_LOOKED
        self._last = None


def _failed_elsewhere(index: int, text: str) -> Exception:
    return CheckpointError(f"process {index}: {text}")
