"""Whether to save a step: the policy, asked once for each, with one answer for all processes."""

from __future__ import annotations

import contextlib
import functools
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
        if not self._agree:
            return bool(self._policy(step, context))
        wanted = self._agreed(step, context)
        self._last = (step, wanted)
        return wanted

    def _agreed(self, step: int, context: when.SaveContext) -> bool:
        """What the policy says on process 0; it is asked on all, as it may count."""
        # first: where the policy fails in one process alone, the next question is still the same
        self._asked += 1
        tag, call = f"{self._tag}/when/{self._asked}", "ask whether to save a step"
        decided = functools.partial(
            decided_by_first, self._processes, tag, timeout_secs=self._timeout_secs, call=call
        )
        try:
            wanted = bool(self._policy(step, context))
        except Exception as error:
            with contextlib.suppress(CheckpointError):  # the others hear of it from process 0
                decided(f"{step} {type(error).__name__}: {error}")
            raise
        said = decided(f"{step} {wanted}")
        asked, _, verdict = said.partition(" ")
        if asked != str(step):
            raise CheckpointError(
                f"process 0 asks whether to save step {asked}, and process {self._processes.index} "
                f"step {step}: all processes must ask about the same steps, in one order"
            )
        if verdict not in ("True", "False"):
            raise CheckpointError(f"process 0 could not decide whether to save {step}: {verdict}")
        return verdict == "True"

    def steps_of_first(self, steps: list[int]) -> list[int]:
        """The steps that process 0 sees; where several processes run, all must ask."""
        if self._processes.count == 1:
            return steps
        text = json.dumps(steps)
        said = decided_by_first(
            self._processes, next_round(), text, self._timeout_secs, "go through the steps"
        )
        return json.loads(said)

    def done_by_first(self, work: Callable[[], None]) -> None:
        """Process 0 does the work and the others wait; a failure of it is one of all."""
        mine = work if self._processes.index == 0 else lambda: None
        self._processes.together(
            next_round(),
            mine,
            self._timeout_secs,
            _failed_elsewhere,
            call="remove or set aside steps",
        )

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
