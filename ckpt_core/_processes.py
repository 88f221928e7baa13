"""Agreement of all processes over jax.distributed's coordination service; nothing to do alone.

No device collective is used, so every call is safe from a background thread.
"""

from __future__ import annotations

import collections
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ckpt_core._errors import BarrierTimeout

logger = logging.getLogger("ckpt_core")
_rounds = itertools.count()
_REPORT_SECS = 5.0
"""How often a process that waits says for whom."""
_KEPT_KEYS = 256
"""So many of its keys a process leaves at the coordination service."""
_mine: collections.deque[str] = collections.deque()


@dataclass(frozen=True)
class Processes:
    """The processes of one run.

    Attributes:
        index: of this process.
        count: of all.
    """

    index: int
    count: int

    def exchange(self, tag: str, value: str, timeout_secs: float) -> list[str]:
        """The values of all processes, by index; returns when all have called it.

        Args:
            tag: names the agreement; the same on all processes, never used twice.
            value: what this process contributes.
            timeout_secs: how long to wait for the slowest.

        Raises:
            BarrierTimeout: with the indices of those that did not come.
        """
        if self.count == 1:
            return [value]
        client = _client()
        _put(client, f"ckpt/{tag}/{self.index}", value)
        began = time.monotonic()
        values: dict[int, str] = {}
        while True:
            left_secs = began + timeout_secs - time.monotonic()
            absent = [process for process in range(self.count) if process not in values]
            try:
                for process in absent:
                    wait_secs = min(max(left_secs, 0.001), _REPORT_SECS)
                    key = f"ckpt/{tag}/{process}"
                    values[process] = client.blocking_key_value_get(key, int(wait_secs * 1000) or 1)
                return [values[process] for process in range(self.count)]
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            absent = [process for process in absent if not _arrived(client, tag, process, values)]
            waited_secs = time.monotonic() - began
            if absent and waited_secs >= timeout_secs:
                raise BarrierTimeout(
                    f"process {self.index} waited {timeout_secs:g} s at {tag!r} for processes {absent} "
                    f"of {self.count}: they are late, stuck or dead (Options(timeout_secs=) sets the wait)",
                    absent=absent,
                )
            if absent:
                logger.warning(
                    "process %d has waited %.0f s for processes %s at %r",
                    self.index,
                    waited_secs,
                    absent,
                    tag,
                )

    def together(
        self,
        tag: str,
        work: Callable[[], Any],
        timeout_secs: float,
        failed: Callable[[int, str], Exception],
    ) -> Any:
        """Does the work and agrees that all did it; a failure of one is a failure of all.

        Args:
            tag, timeout_secs: as for ``exchange``.
            failed: the error for those that did not fail, from the index of the process that did
                and what its error says, type first.
        """
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        if self.count > 1:
            mine = "" if error is None else f"{type(error).__name__}: {error}"
            for index, text in enumerate(self.exchange(tag, mine, timeout_secs)):
                if text and error is None:
                    raise failed(index, text)
        if error is not None:
            raise error
        return result


def _arrived(client: Any, tag: str, process: int, values: dict[int, str]) -> bool:
    """Takes the value of a process that has come meanwhile, without waiting for it."""
    if process not in values:
        try:
            values[process] = client.key_value_try_get(f"ckpt/{tag}/{process}")
        except jax.errors.JaxRuntimeError:
            return False
    return True


def _put(client: Any, key: str, value: str) -> None:
    """Sets a key, and deletes this process's oldest: whoever should have read it has long done so."""
    client.key_value_set(key, value)
    _mine.append(key)
    if len(_mine) > _KEPT_KEYS:
        client.key_value_delete(_mine.popleft())


def decided_by_first(processes: Processes, tag: str, value: str, timeout_secs: float) -> str:
    """What process 0 says; the others wait for it.

    Args:
        tag: names the decision; the same on all processes, never used twice.
        value: of process 0; that of the others does not count.

    Raises:
        BarrierTimeout: process 0 said nothing in time.
    """
    if processes.count == 1:
        return value
    client = _client()
    if processes.index == 0:
        _put(client, f"ckpt/{tag}", value)
        return value
    try:
        return client.blocking_key_value_get(f"ckpt/{tag}", int(timeout_secs * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise BarrierTimeout(
            f"process {processes.index} waited {timeout_secs:g} s at {tag!r} for process 0, which decides: all "
            "processes must make the same calls",
            absent=[0],
        ) from error


def this_run() -> Processes:
    """The processes of this run; one where jax.distributed was not initialized."""
    client = _client()
    if client is None:
        return Processes(0, 1)
    return Processes(jax.process_index(), jax.process_count())


def preemption_sync_point(step: int) -> bool:
    """Whether all processes agreed, through jax's preemption service, to stop at this step."""
    if _client() is None:
        return False
    from jax.experimental import multihost_utils

    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:  # the service is not on
        return False


def next_round() -> str:
    """A tag that all processes share, if all make the same calls in the same order."""
    return str(next(_rounds))


def _client() -> Any:
    # jax offers no public handle on the coordination service; Orbax takes it from here too
    from jax._src import distributed

    return distributed.global_state.client


def join_from_environment(environment: Mapping[str, str]) -> bool:
    """Joins the other processes of the run where the usual variables name them; whether they do.

    JAX_COORDINATOR_ADDRESS (with the port, or JAX_COORDINATOR_PORT beside it), JAX_NUM_PROCESSES
    and JAX_PROCESS_ID. For programs that own the process, such as the command line.

    Raises:
        ValueError: some of the variables are there, and not all.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    missing = [name for name in names if not environment.get(name)]
    if len(missing) == len(names) or _client() is not None:
        return _client() is not None
    if missing:
        raise ValueError(f"{', '.join(names)} go together; missing: {', '.join(missing)}")
    address = environment[names[0]]
    port = environment.get("JAX_COORDINATOR_PORT")
    if port and ":" not in address.rpartition("]")[2]:
        address = f"{address}:{port}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, num_processes=int(environment[names[1]]), process_id=int(environment[names[2]])
    )
    return True
