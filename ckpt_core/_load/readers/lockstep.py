"""The rounds of a load that broadcasts: all processes go on to each, or all raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ckpt_core._processes import Processes

Failed = Callable[[int, str], Exception]


class Lockstep:
    """The processes of one load: all go on to each round, or all raise.

    Args:
        processes: of the run.
        tag: of the load, the same on all.
        timeout_secs: at each agreement.
        failed: the error for those that did not fail, as for ``Processes.run_on_all``.
    """

    def __init__(self, processes: Processes, tag: str, timeout_secs: float, failed: Failed) -> None:
        self.processes = processes
        self._tag = tag
        self._timeout_secs = timeout_secs
        self._failed = failed
        self._count = 0
        self._over = False

    def run(self, work: Callable[[], Any]) -> Any:
        """Does the work, in which all processes agree equally often unless one of them fails."""
        try:
            result = work()
        except BaseException as error:
            if not self._over:
                self.agree("", f"{type(error).__name__}: {error}")
            raise
        self.agree("end")
        return result

    def agree(self, what: str, error: str = "") -> None:
        """Returns when all are here, for the same thing and without an error.

        Raises:
            CheckpointError: another process failed, or came for something else.
            BarrierTimeout: one did not come.
        """
        tag = f"{self._tag}/lockstep/{self._count}"
        self._count += 1
        self._over = True  # but for what follows, nobody waits for this process any more
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
    """Index and error of the first process that failed or differs from process 0, as JSON."""
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
