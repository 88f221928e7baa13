"""Agreement of all processes over jax.distributed's coordination service; nothing to do alone.

No device collective is used, so every call is safe from a background thread.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping
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

    def agree(
        self, tag: str, value: str, judge: Callable[[list[str]], str], timeout_secs: float
    ) -> str:
        """What process 0 makes of the values of all; returns when all have called it.

        A process sends one value and fetches one answer, however many there are.

        Args:
            tag: names the agreement; the same on all processes, never used twice.
            value: what this process contributes.
            judge: makes the answer of the values, by index; called on process 0 alone.
            timeout_secs: how long to wait for the slowest.

        Raises:
            BarrierTimeout: with the indices of those that did not come.
        """
        if self.count == 1:
            return judge([value])
        client = _client()
        with self._lost(tag):
            client.key_value_set(f"ckpt/{tag}/{self.index}", value)
            if self.index > 0:
                return self._fetch(client, tag, timeout_secs)
            answer = judge(self._collect(client, tag, timeout_secs))
            _put(client, f"ckpt/{tag}.answer", answer)
            client.key_value_delete(f"ckpt/{tag}/")  # all values at once: nobody needs them now
            return answer

    def exchange(self, tag: str, value: str, timeout_secs: float) -> list[str]:
        """The values of all processes, by index; arguments and errors as for ``agree``.

        For few and small values: every process receives what every other one sent.
        """
        return json.loads(self.agree(tag, value, json.dumps, timeout_secs))

    def _collect(self, client: Any, tag: str, timeout_secs: float) -> list[str]:
        """Process 0: waits for the values of all."""
        began = time.monotonic()
        report_secs = _REPORT_SECS
        while True:
            listing = time.monotonic()
            values = self._arrived(client, tag)
            now = time.monotonic()
            absent = [process for process in range(self.count) if process not in values]
            if not absent:
                return [values[process] for process in range(self.count)]
            waited_secs = now - began
            if waited_secs >= timeout_secs:
                raise self._late(tag, timeout_secs, absent)
            if waited_secs >= report_secs:
                self._report(tag, waited_secs, absent)
                report_secs = waited_secs + _REPORT_SECS
            wait_secs = min(timeout_secs, report_secs) - waited_secs
            _wait_for(client, f"ckpt/{tag}/{absent[-1]}", wait_secs)
            # where they arrive one by one, a listing for each would be quadratic
            time.sleep(now - listing)

    def _fetch(self, client: Any, tag: str, timeout_secs: float) -> str:
        """The others: wait for the answer of process 0."""
        began = time.monotonic()
        while True:
            left_secs = began + timeout_secs - time.monotonic()
            found = _wait_for(client, f"ckpt/{tag}.answer", min(left_secs, _REPORT_SECS))
            if found is not None:
                return found
            waited_secs = time.monotonic() - began
            if waited_secs < timeout_secs:
                # process 0 tells of all others that are late
                if _try_get(client, f"ckpt/{tag}/0") is None:
                    self._report(tag, waited_secs, [0])
                continue
            values = self._arrived(client, tag)
            found = _try_get(client, f"ckpt/{tag}.answer")
            if found is not None:
                return found
            absent = [process for process in range(self.count) if process not in values]
            raise self._late(tag, timeout_secs, absent or [0])

    def _arrived(self, client: Any, tag: str) -> dict[int, str]:
        """The values that have come, by process."""
        entries = client.key_value_dir_get(f"ckpt/{tag}/")
        return {int(key.rpartition("/")[2]): value for key, value in entries}

    def _report(self, tag: str, waited_secs: float, absent: list[int]) -> None:
        logger.warning(
            "process %d has waited %.0f s for processes %s at %r",
            self.index,
            waited_secs,
            absent,
            tag,
        )

    def _late(self, tag: str, timeout_secs: float, absent: list[int]) -> BarrierTimeout:
        return BarrierTimeout(
            f"process {self.index} waited {timeout_secs:g} s at {tag!r} for processes {absent} of "
            f"{self.count}: they are late, stuck or dead (Options(timeout_secs=) sets the wait)",
            absent=absent,
        )

    @contextlib.contextmanager
    def _lost(self, tag: str) -> Generator[None]:
        """Names process 0 where the service, which runs in it, does not answer any more."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith(("UNAVAILABLE", "CANCELLED")):
                raise
            raise BarrierTimeout(
                f"process {self.index} lost the coordination service at {tag!r}: processes [0] of "
                f"{self.count}, where it runs, are dead or out of reach",
                absent=[0],
            ) from error

    def together(
        self,
        tag: str,
        work: Callable[[], Any],
        timeout_secs: float,
        failed: Callable[[int, str], Exception],
        hear: Callable[[list[str]], None] | None = None,
    ) -> Any:
        """Does the work and agrees that all did it; a failure of one is a failure of all.

        Args:
            tag, timeout_secs: as for ``exchange``.
            failed: the error for those that did not fail, from the index of the process that did
                and what its error says, type first.
            hear: gets, on process 0 and before any goes on, what the work gave on each process,
                which must be text then; not called where one runs alone.
        """
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        if self.count > 1:
            good = "" if hear is None else str(result)
            mine = f"={good}" if error is None else f"!{type(error).__name__}: {error}"

            def judge(texts: list[str]) -> str:
                failure = _first_failure(texts)
                if hear is not None and not failure:
                    hear([text[1:] for text in texts])
                return failure

            try:
                first = self.agree(tag, mine, judge, timeout_secs)
            except BarrierTimeout as late:
                if error is not None:  # what went wrong here may be why the others do not come
                    late.__cause__ = error
                raise
            if first and error is None:
                raise failed(*json.loads(first))
        if error is not None:
            raise error
        return result


def _first_failure(texts: list[str]) -> str:
    """Index and text of the first that tells of an error, as JSON; empty where none does."""
    failed = [(index, text[1:]) for index, text in enumerate(texts) if text.startswith("!")]
    return json.dumps(failed[0]) if failed else ""


def _wait_for(client: Any, key: str, wait_secs: float) -> str | None:
    """The value of a key as soon as it is set; None where it is not set in time."""
    try:
        return client.blocking_key_value_get(key, max(1, int(wait_secs * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
    return None


def _try_get(client: Any, key: str) -> str | None:
    """The value of a key, or None where it is not set."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
    return None


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
    with processes._lost(tag):  # pyright: ignore[reportPrivateUsage]
        if processes.index == 0:
            _put(client, f"ckpt/{tag}", value)
            return value
        found = _wait_for(client, f"ckpt/{tag}", timeout_secs)
    if found is not None:
        return found
    raise BarrierTimeout(
        f"process {processes.index} waited {timeout_secs:g} s at {tag!r} for process 0, which decides: "
        "all processes must make the same calls",
        absent=[0],
    )


def this_run() -> Processes:
    """The processes of this run; one where jax.distributed was not initialized."""
    client = _client()
    if client is None:
        return Processes(0, 1)
    return Processes(jax.process_index(), jax.process_count())


def preemption_sync_point(step: int) -> bool | None:
    """Whether all processes agreed, through jax's preemption service, to stop at this step.

    None where the service is off, so that they cannot agree.
    """
    if _client() is None:
        return None
    from jax._src import distributed
    from jax.experimental import multihost_utils

    if distributed.global_state.preemption_sync_manager is None:
        return None
    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:  # the coordinator is gone, which every barrier tells better
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
