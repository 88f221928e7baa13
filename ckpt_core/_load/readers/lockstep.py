"""Rounds of a load with ``broadcast=True``: all processes continue to each round, or all raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ckpt_core._processes import Processes

Failed = Callable[[int, str], Exception]


class Lockstep:
    """Keeps the processes of one load in step, so that none waits in a collective for a failed one.

    Args:
        processes: all processes of the run.
        tag: tag of the load, equal on all processes.
        timeout_secs: how long each agreement waits for the slowest process.
        failed: makes the error to raise on the other processes, as for ``Processes.run_on_all``.
    """

    def __init__(self, processes: Processes, tag: str, timeout_secs: float, failed: Failed) -> None:
        self.processes = processes
        self._tag = tag
        self._timeout_secs = timeout_secs
        self._failed = failed
        self._count = 0
        self._over = False

    def run(self, work: Callable[[], Any]) -> Any:
        """Calls ``work``, and tells the other processes if it fails.

        All processes must call ``agree`` equally often in ``work``.
        """
        try:
            result = work()
        except BaseException as error:
            if not self._over:
                self.agree("", f"{type(error).__name__}: {error}")
            raise
        self.agree("end")
        return result

    def agree(self, what: str, error: str = "") -> None:
        """Returns when all processes have called it with equal ``what`` and no error.

        Args:
            what: names this point of the load; a digest where the processes compare what they load.
            error: why this process failed, to tell the others; then this returns without raising.

        Raises:
            CheckpointError: another process failed, or called with a different ``what``.
            BarrierTimeout: a process did not call it in time.
        """
        tag = f"{self._tag}/lockstep/{self._count}"
        self._count += 1
        self._over = True  # if this raises, the others know already: run() must not tell them again
        mine = json.dumps([what, error])
        answer = json.loads(
            self.processes.gather_decide(tag, mine, _same_for_all, self._timeout_secs)
        )
        if error:
            return
        if answer:
            raise self._failed(*answer)
        self._over = False


def _same_for_all(texts: list[str]) -> str:
    """Called on process 0: index and error of the first process that failed or differs, as JSON."""
    said = [json.loads(text) for text in texts]
    for index, (_, error) in enumerate(said):
        if error:
            return json.dumps([index, error])
    for index, (what, _) in enumerate(said):
        if what != said[0][0]:
            text = (
                "CheckpointError: it loads other leaves, or onto other shardings, than process 0: with "
                "Options(broadcast=True) all processes must load the same"
            )
            return json.dumps([index, text])
    return "null"
