"""Agreement of all processes over jax.distributed's coordination service; nothing to do alone.

No device collective is used, so every call is safe from a background thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ckpt_core._errors import BarrierTimeout

_rounds = itertools.count()


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
        client.key_value_set(f"ckpt/{tag}/{self.index}", value)
        deadline = time.monotonic() + timeout_secs
        values: list[str] = []
        absent: list[int] = []
        for process in range(self.count):
            left_ms = max(1, int((deadline - time.monotonic()) * 1000))
            try:
                values.append(client.blocking_key_value_get(f"ckpt/{tag}/{process}", left_ms))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                absent.append(process)
        if absent:
            raise BarrierTimeout(
                f"process {self.index} waited {timeout_secs:g} s at {tag!r} for processes {absent} "
                f"of {self.count}: they are late, stuck or dead (Options(timeout_secs=) sets the wait)",
                absent=absent,
            )
        return values


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
        client.key_value_set(f"ckpt/{tag}", value)
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
