"""Agreement of all processes through jax.distributed's coordination service, and what jax offers them there.

With one process, all calls return at once. No device collective is used: every call is safe in a background thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ckpt_core._errors import BarrierTimeout, CheckpointError
from ckpt_core._lazy import jax
from ckpt_core._processes import wire
from ckpt_core._processes.wire import NotTogether, Said

logger = logging.getLogger("ckpt_core")
_REPORT_SECS = 5.0  # interval at which a waiting process logs which processes it waits for
_LOOK_SECS = 1.0
_absent: dict[str, Sequence[int]] = {}
"""Tag of an agreement -> the processes that have not arrived there."""


def awaited() -> tuple[int, ...]:
    """The processes that this one waits for now, at any agreement."""
    return tuple(sorted({process for absent in [*_absent.values()] for process in absent}))


@dataclass(frozen=True)
class Processes:
    """The processes of one run."""

    index: int  # of this process, from 0
    count: int

    def round(self, call: str, timeout_secs: float, where: str = "") -> Round:
        """The agreements of one call. All processes begin the same rounds in the same order, and ``call``, what they are
        about to do, is the same on all. ``where`` begins the message of an error of another process.
        """
        client = coordination().client if self.count > 1 else None
        tag = "" if client is None else str(next(wire.rounds(client).numbers))
        return Round(self, call, timeout_secs, where, tag)

    def put(self, name: str, text: str) -> None:
        """Sets a key, which any process may get; does nothing where the service has ended."""
        if (client := coordination().client) is not None:
            with self.service_errors(name):
                client.key_value_set(f"ckpt/{name}", text, allow_overwrite=True)

    def get(self, name: str) -> str | None:
        """The text of a key that a process has put; None if there is none, or the service has ended."""
        client = coordination().client
        with self.service_errors(name):
            return None if client is None else wire.try_get(client, f"ckpt/{name}")

    def drop(self, name: str) -> None:
        """Deletes a key and all below it; does nothing where the service has ended."""
        if (client := coordination().client) is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                client.key_value_delete(f"ckpt/{name}")

    @contextlib.contextmanager
    def service_errors(self, tag: str) -> Generator[None]:
        """Raises BarrierTimeout for process 0 if the service, which runs there, does not answer."""
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


@dataclass(frozen=True)
class Round:
    """The agreements of one call, one after the other, the same on all processes; from any thread, but from one at a time."""

    processes: Processes
    call: str
    timeout_secs: float
    where: str
    _tag: str
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def decide(
        self,
        value: str,
        judge: Callable[[list[str]], str | None],
        *,
        error: BaseException | None = None,
        waits: bool = True,
    ) -> str:
        """Blocks until all processes have called it; gives what ``judge`` on process 0 makes of their values, ordered by
        process. A process that failed brings its ``error``: it raises that, and the others one of its class. What
        ``judge`` raises, all raise. If process 0 ``waits`` for nobody, ``judge`` gets its value alone. BarrierTimeout
        names the ``absent`` processes; NotTogether is for another call.
        """
        index = self.processes.index
        if self.processes.count == 1:
            if error is not None:
                raise error
            return judge([value]) or ""
        mine = Said(self.call, value) if error is None else Said.error_of(index, self.call, error)
        client, tag = coordination().client, f"{self._tag}/{next(self._numbers)}"
        _absent[tag] = [0] if index else []
        try:
            with self.processes.service_errors(tag):
                if index == 0:
                    answer, error = self._answer(client, tag, mine, judge, error, waits)
                else:
                    client.key_value_set(f"{wire.values_folder(tag)}{index}", mine.dump())
                    answer = Said.parse(self._fetch(client, tag))
        except BarrierTimeout as late:
            late.__cause__ = late.__cause__ or error  # it may be why the others did not come
            raise
        except BaseException as raised:
            if index and not isinstance(raised, Exception):
                self.refuse(raised)  # the others may go on to another agreement
            raise
        finally:
            _absent.pop(tag, None)
        if answer.failed >= 0:
            if error is None or answer.absent:
                raise answer.raised_here(self.where) from error
            answer.mark(error)
            raise error
        if answer.call != self.call:
            raise wire.different_calls(answer.call, self.call, "here")
        return answer.text

    def all(
        self,
        work: Callable[[], Any],
        report: Callable[[Any], str] = lambda _: "",
        judge: Callable[[list[str]], str | None] = lambda _: None,
    ) -> Any:
        """Runs ``work`` on all, waits for all; its result here. All raise if one fails, or ``judge`` refuses the reports."""
        if self.processes.count == 1:
            return work()
        result, error, text = None, None, ""
        try:
            result = work()
            text = report(result)
        except BaseException as caught:
            error = caught
        try:
            self.decide(text, judge, error=error)
        finally:
            error = None  # its traceback refers to this frame
        return result

    def first(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` on process 0, which does not wait, and returns its JSON result on all; if it fails, all raise."""
        if self.processes.count == 1:
            return work()
        found: list[Any] = []

        def judge(_: list[str]) -> str:
            found.append(work())
            return json.dumps(found[0])

        answer = self.decide("", judge, waits=False)
        return found[0] if found else json.loads(answer)

    def refuse(self, error: BaseException) -> None:
        """Brings an error to the next agreement without waiting for the others, who raise there."""
        if self.processes.count == 1:
            return
        client, tag = coordination().client, f"{self._tag}/{next(self._numbers)}"
        index = self.processes.index
        text = Said.error_of(index, self.call, error).dump()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if index == 0:
                wire.rounds(client).put(client, tag, text, False)
            else:
                client.key_value_set(f"{wire.values_folder(tag)}{index}", text)

    def _answer(
        self,
        client: Any,
        tag: str,
        mine: Said,
        judge: Callable[[list[str]], str | None],
        error: BaseException | None,
        waits: bool,
    ) -> tuple[Said, BaseException | None]:
        """On process 0: publishes the answer; returns it, and the error of this process if there is one."""
        rounds = wire.rounds(client)
        waits = waits or rounds.ahead >= wire.MOST_AHEAD
        try:
            client.key_value_set(f"{wire.values_folder(tag)}0", mine.dump())
            everyone = self._everyone(client, tag) if waits else [mine]
            answer = wire.failure_of(everyone)
            if answer is None:
                texts = [one.text for one in everyone]
                answer = Said(self.call, judge(texts) or "")
        except BaseException as raised:
            error = raised
            answer = Said.error_of(0, self.call, raised)
        rounds.put(client, tag, answer.dump(), waits)
        if waits:
            # One delete for the values of all processes, which are no longer needed.
            client.key_value_delete(wire.values_folder(tag))
        return answer, error

    def _everyone(self, client: Any, tag: str) -> list[Said]:
        """On process 0: blocks until the values of all processes have arrived."""
        began = time.monotonic()
        report_secs = _REPORT_SECS
        while True:
            listed = time.monotonic()
            values = wire.arrived(client, tag)
            now = time.monotonic()
            _absent[tag] = absent = [n for n in range(self.processes.count) if n not in values]
            if not absent:
                return [Said.parse(values[process]) for process in range(self.processes.count)]
            waited_secs = now - began
            if waited_secs >= self.timeout_secs:
                raise self._timed_out(client, tag, absent)
            if waited_secs >= report_secs:
                self._report(client, tag, waited_secs, absent)
                report_secs = waited_secs + _REPORT_SECS
            wait_secs = min(min(self.timeout_secs, report_secs) - waited_secs, _LOOK_SECS)
            wire.wait_for(client, f"{wire.values_folder(tag)}{absent[-1]}", wait_secs)
            # Values may arrive one by one; one listing for each would take quadratic time.
            time.sleep(now - listed)

    def _fetch(self, client: Any, tag: str) -> str:
        """On the other processes: blocks until process 0 answers."""
        began, report_secs = time.monotonic(), _REPORT_SECS
        while True:
            left_secs = began + self.timeout_secs - time.monotonic()
            wait_secs = max(0.0, min(left_secs, _LOOK_SECS))
            found = wire.wait_for(client, wire.answer_key(tag), wait_secs)
            if found is not None:
                return found
            waited_secs = time.monotonic() - began
            if left_secs > _LOOK_SECS and waited_secs < report_secs:
                continue
            report_secs = waited_secs + _REPORT_SECS
            there = wire.arrived(client, tag)
            absent = [n for n in range(self.processes.count) if n not in there] or [0]
            if left_secs <= _LOOK_SECS:
                found = wire.try_get(client, wire.answer_key(tag))  # it came after the wait
                if found is None:
                    raise self._timed_out(client, tag, absent)
                return found
            if absent[0] == 0:  # once it has arrived, it says itself which others are late
                self._report(client, tag, waited_secs, [0])

    def _report(self, client: Any, tag: str, waited_secs: float, absent: list[int]) -> None:
        me, calls = self.processes.index, wire.waiting_elsewhere(client, absent)
        text = f"process {me} has waited {waited_secs:.0f} s for processes {absent} at {tag!r}"
        logger.warning("%s%s", text, calls)

    def _timed_out(self, client: Any, tag: str, absent: list[int]) -> BarrierTimeout:
        return BarrierTimeout(
            f"process {self.processes.index} waited {self.timeout_secs:g} s at {tag!r} to {self.call} for processes "
            f"{absent} of {self.processes.count}: they are late, stuck or dead (Options(timeout_secs=) sets the wait)"
            f"{wire.waiting_elsewhere(client, absent)}",
            absent=absent,
        )


def this_run() -> Processes:
    """The processes of this run; a single one if jax.distributed was not initialized."""
    if coordination().client is None:
        return Processes(0, 1)
    return Processes(jax.process_index(), jax.process_count())


def coordination() -> Any:
    """``client``, ``preemption_sync_manager`` and ``address`` of jax's distributed service, which has no public API;
    Orbax uses it, too. Where jax has moved it, one process needs none, and several raise CheckpointError.
    """
    if sys.modules.get("jax") is not None:  # whoever has not imported it has joined nobody
        try:
            from jax._src import distributed

            state = distributed.global_state
            return SimpleNamespace(
                client=state.client,
                preemption_sync_manager=state.preemption_sync_manager,
                address=getattr(state, "coordinator_address", None),
            )
        except (ImportError, AttributeError) as error:
            if (count := jax.process_count()) > 1:
                raise CheckpointError(
                    f"jax {jax.__version__} has no coordination service where ckpt looks for it, so its {count} processes "
                    "cannot agree on a checkpoint: upgrade ckpt-core, or use an older jax"
                ) from error
    return SimpleNamespace(client=None, preemption_sync_manager=None, address=None)


def coordinator_host() -> str:
    """Name or IP address of the coordination service's host, as this process was given it; or empty."""
    return (coordination().address or "").rpartition(":")[0].strip("[]")


def preemption_service_listens() -> bool:
    """Whether jax's preemption service is on, which hears SIGTERM in each process and tells the others."""
    state = coordination()
    return state.client is not None and state.preemption_sync_manager is not None


def preemption_sync_point(step: int) -> bool | None:
    """Whether all agreed, by jax's preemption service, to stop at this step; None if it is off. All ask at every step."""
    if not preemption_service_listens():
        return None
    from jax.experimental import multihost_utils

    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:  # the coordinator is gone; the next agreement reports that more clearly
        return False


def join_from_environment(environment: Mapping[str, str]) -> bool:
    """Calls ``jax.distributed.initialize`` if the environment has JAX_COORDINATOR_ADDRESS (with a port, or
    JAX_COORDINATOR_PORT), JAX_NUM_PROCESSES and JAX_PROCESS_ID, or ValueError for only some; whether it is initialized
    then. For programs that own the process, like the command line.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    missing = [name for name in names if not environment.get(name)]
    joined = coordination().client is not None
    if len(missing) == len(names) or joined:
        return joined
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
