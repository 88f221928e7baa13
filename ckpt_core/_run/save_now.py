"""Save now, from outside: a file beside the steps asks a job that runs for a step, whatever its policy wants.

Process 0 looks for the file every few seconds, when ``save`` or ``should_save`` asks about a step. Several processes
learn its answer in one round, at a step that the answer before named: the steps between cost no message, and no two
processes wait for each other. The file goes once that step is committed. The next job answers what a killed one left.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ckpt_core._errors import CheckpointError
from ckpt_core._format.untrusted import SHORT_BYTES
from ckpt_core._operation import logger
from ckpt_core._run.in_flight import SaveSlot
from ckpt_core._run.steps import SAVE_NOW_FILE, RunDirectory

LOOK_SECS, STORE_LOOK_SECS = 5.0, 30.0
"""Between two looks in a file system, and in an object store, where each is a request."""
_MOST_STEPS = 100
"""Between two looks of several processes: after fast steps may come slow ones."""
_WAIT_SECS = 0.2
"""Training waits no longer for a look: a directory that hangs must not stop it."""


@dataclass(eq=False)
class SaveNow:
    """What one Checkpointer knows of requests to save now."""

    directory: RunDirectory
    slot: SaveSlot  # of the saves in it
    due: float  # when to look again: monotonic seconds; with several processes a step
    last: int = -1  # the step that was asked about last
    step: int | None = None  # the same, if it is to be saved for a request
    _looked: tuple[int, float] = (0, 0.0)  # step and monotonic seconds of the last look
    _thread: threading.Thread | None = None
    _found: bytes | None = None  # the last request that was seen
    granted: tuple[bytes, int] | None = None  # a request, and the step that is saved for it
    _done: bytes | None = None  # its step is committed

    def look_for_request(self, step: int) -> None:
        """Looks for a request, which this step is then saved for; all processes must call it at the same step."""
        processes, timeout_secs = self.directory.processes, self.directory.options.timeout_secs
        if processes.count == 1:
            found, self.due = self._look_for_request(step)
        else:
            together = processes.round("look for a request to save now", timeout_secs)
            found, self.due = together.first(lambda: self._look_for_request(step))
        self.step = step if found else None

    def _look_for_request(self, step: int) -> tuple[bool, float]:
        """On process 0: whether this step is saved for a request, and when to look again."""
        (last, looked), now = self._looked, time.monotonic()
        self._looked = step, now
        secs = LOOK_SECS if self.directory.local else STORE_LOOK_SECS
        due = now + secs
        if self.directory.processes.count > 1:
            steps = (step - last) * secs / max(now - looked, 1e-3)
            due = step + max(1, min(_MOST_STEPS, int(steps)))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(None, self._read, "ckpt-save-now", daemon=True)
            self._thread.start()
        self._thread.join(_WAIT_SECS)
        found, granted = self._found, self.granted
        # a second save would be one too many; with on_pending="fail" it would stop the job
        fails = self.directory.options.on_pending == "fail"
        busy = self.slot.running and (fails or (granted is not None and granted[0] == found))
        if found is None or found == self._done or busy:
            return False, due
        self.granted = found, step
        logger.info("%s: step %d is saved, as `ckpt save-now` asks", self.directory.path, step)
        return True, due

    def _read(self) -> None:
        found, self._found = None, None
        try:
            found = self.directory.backend.read(self.directory.path, SAVE_NOW_FILE, SHORT_BYTES)
        except (OSError, CheckpointError) as error:  # it is no reason to stop
            logger.info("%s: a request to save was not looked for: %s", self.directory.path, error)
        self._found = found

    def committed(self, step: int) -> None:
        """On process 0: removes the request that this step was saved for."""
        if self.granted is None or self.granted[1] != step:
            return
        backend, path = self.directory.backend, self.directory.path
        self._done = self.granted[0]
        try:
            if backend.read(path, SAVE_NOW_FILE, SHORT_BYTES) == self._done:
                backend.remove(path, SAVE_NOW_FILE)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "%s/%s could not be deleted, so the next start of this run saves a step for it once more: %s",
                *(path, SAVE_NOW_FILE, error),
            )
