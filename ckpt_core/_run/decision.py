"""Whether to save a step: a policy is asked once for all processes, and a file asks from outside.

That file, beside the steps, asks a running job for a step, whatever its policy wants. Process 0 looks for it every few
seconds, when a step is asked about. Several processes learn its answer in one round, at a step that the answer before
named: the steps between cost no message. It goes with the commit; the next job answers what a killed one left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckpt_core._errors import CheckpointError
from ckpt_core._format.untrusted import SHORT_BYTES
from ckpt_core._operation import logger
from ckpt_core._run.in_flight import SaveSlot
from ckpt_core._run.policies import when
from ckpt_core._run.preemption import Preemption
from ckpt_core._run.steps import SAVE_NOW_FILE, RunSteps

Newest = Callable[[], int | None]
"""Lists the newest step on disk, if there is one."""
_NOT_LOOKED = -1
LOOK_SECS, STORE_LOOK_SECS = 5.0, 30.0
"""Between two looks for that file in a file system, and in an object store, where each is a request."""
_MOST_STEPS = 100  # between two looks of several processes: after fast steps may come slow ones
_WAIT_SECS = 0.2  # training waits no longer for a look: a directory that hangs must not stop it


class SaveDecision:
    """Asks a save policy; process 0 decides for all if the policy depends on a clock or the disk."""

    def __init__(
        self,
        steps: RunSteps,
        preemption: Preemption,
        policy: when.Decision,
        save_now: SaveNow | None = None,
    ) -> None:
        self._policy = policy.decide if isinstance(policy, when.SavePolicy) else policy
        self._listens = bool(getattr(policy, "listens", False))
        self._processes = steps.processes
        self._preemption = preemption
        self._save_now = save_now
        self._by_step = bool(getattr(policy, "by_step", False))
        if not self._by_step:  # else a process may open a run alone
            self._together = steps.round("decide whether to save a step")
        self._last: tuple[int, bool] | None = None
        self._newest: int | None = _NOT_LOOKED
        self._last_save_secs = float("-inf")

    def wants(self, step: int, saving: bool, newest: Newest) -> bool:
        """Whether the policy wants this step; with several processes, all must call it."""
        agreed = self._processes.count > 1 and not self._by_step
        if agreed and self._last is not None and self._last[0] == step:
            return self._last[1]  # process 0 has already decided about this step
        # before the policy, which may raise in one process alone
        asked = self._save_now is not None and self._save_now.asks(step)
        context = when.SaveContext(
            newest_step=None if self._newest == _NOT_LOOKED else self._newest,
            secs_since_save=time.monotonic() - self._last_save_secs,
            saving=saving,
            preempted=(self._listens or not self._by_step) and self._preemption.wants(step),
        )
        if self._by_step:
            wanted = bool(self._policy(step, context)) or asked
        else:
            wanted = self._agreed(step, context, newest) or asked
        self._last = (step, wanted)
        if self._listens:
            self._preemption.decided(wanted, context.preempted)
        return wanted

    def _agreed(self, step: int, context: when.SaveContext, newest: Newest) -> bool:
        """The policy's answer on process 0; asked on all, since a policy may count its calls."""
        wanted, failed = False, None
        if self._processes.index > 0:
            try:
                wanted = bool(self._policy(step, context))
            except Exception as error:  # process 0 may answer all the same, and the next question comes after this one
                failed = error

        def decide() -> tuple[int, bool]:
            if self._newest == _NOT_LOOKED:
                self._newest = newest()
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


@dataclass(eq=False)
class SaveNow:
    """What one Checkpointer knows of requests to save now."""

    steps: RunSteps
    slot: SaveSlot  # of the saves in it
    due: float  # when to look again: monotonic seconds; with several processes a step
    last: int = -1  # the step that was asked about last
    step: int | None = None  # the same, if it is to be saved for a request
    _looked: tuple[int, float] = (0, 0.0)  # step and monotonic seconds of the last look
    _thread: threading.Thread | None = None
    _found: bytes | None = None  # the last request that was seen
    granted: tuple[bytes, int] | None = None  # a request, and the step that is saved for it
    _done: bytes | None = None  # its step is committed

    def asks(self, step: int) -> bool:
        """Whether this step is saved for a request; all processes must look for one at the same step."""
        self.step = step if self.step == step else None
        now = step if self.steps.processes.count > 1 else time.monotonic()
        if now >= self.due or step < self.last:
            call = "look for a request to save now"
            found, self.due = self.steps.on_first(call, lambda: self._look(step))
            self.step = step if found else None
        self.last = step
        return self.step is not None

    def _look(self, step: int) -> tuple[bool, float]:
        """On process 0: whether this step is saved for a request, and when to look again."""
        (last, looked), now = self._looked, time.monotonic()
        self._looked = step, now
        secs = LOOK_SECS if self.steps.local else STORE_LOOK_SECS
        due = now + secs
        if self.steps.processes.count > 1:
            steps = (step - last) * secs / max(now - looked, 1e-3)
            due = step + max(1, min(_MOST_STEPS, int(steps)))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(None, self._read, "ckpt-save-now", daemon=True)
            self._thread.start()
        self._thread.join(_WAIT_SECS)
        found, granted = self._found, self.granted
        # a second save would be one too many; with on_pending="fail" it would stop the job
        fails = self.steps.options.on_pending == "fail"
        busy = self.slot.running and (fails or (granted is not None and granted[0] == found))
        if found is None or found == self._done or busy:
            return False, due
        self.granted = found, step
        logger.info("%s: step %d is saved, as `ckpt save-now` asks", self.steps.directory, step)
        return True, due

    def _read(self) -> None:
        found, self._found = None, None
        try:
            found = self.steps.backend.read(self.steps.directory, SAVE_NOW_FILE, SHORT_BYTES)
        except (OSError, CheckpointError) as error:  # it is no reason to stop
            logger.info("%s: a request to save was not looked for: %s", self.steps.directory, error)
        self._found = found

    def committed(self, step: int) -> None:
        """On process 0: removes the request that this step was saved for."""
        if self.granted is None or self.granted[1] != step:
            return
        backend, path = self.steps.backend, self.steps.directory
        self._done = self.granted[0]
        try:
            if backend.read(path, SAVE_NOW_FILE, SHORT_BYTES) == self._done:
                backend.remove(path, SAVE_NOW_FILE)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "%s/%s could not be deleted, so the next start of this run saves a step for it once more: %s",
                *(path, SAVE_NOW_FILE, error),
            )
