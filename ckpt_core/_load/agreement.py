"""Loads of several processes: none goes on before all have planned, or read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from ckpt_core import _processes
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._load.readers.broadcast import Broadcast
from ckpt_core._load.readers.lockstep import Lockstep
from ckpt_core._load.readers.pipeline import read_leaves
from ckpt_core._load.readers.wants import Reading
from ckpt_core._options import Options

T = TypeVar("T")


class LoadAgreement:
    """What the processes of one load agree on; alone, nothing.

    Args:
        options: of the load.
        tag: of the round; taken now where it is empty.
        alone: the load is a matter of this process, however many run.
        identity: says what all processes must load alike; empty where it is a matter of each.
    """

    def __init__(
        self, options: Options, identity: Callable[[], str], tag: str = "", alone: bool = False
    ) -> None:
        self._options = options
        self._identity = identity
        # a load that is a matter of one process takes no tag: the others would be one behind ever after
        self._tag = "" if alone else tag or _processes.next_tag()
        self._processes = _processes.Processes(0, 1) if alone else _processes.this_run()
        self._opened = False

    def plan(self, work: Callable[[], T], call: str) -> T:
        """Does the work; none changes anything before all could."""
        if self._processes.count == 1:
            return work()
        if self._options.broadcast:
            call = f"{call} with broadcast"
        return self._on_all(self._tag, work, self._opening(call))

    def read(self, work: Callable[[Reading], T], call: str) -> T:
        """Does the work with what reads leaves; none goes on before all have read.

        Args:
            call: what is done, for processes that do something else at that moment.
        """
        if self._processes.count == 1:
            return work(read_leaves)
        first = not self._opened
        call = self._opening(call)
        if not self._options.broadcast:
            tag = self._tag if first else f"{self._tag}/load"
            return self._on_all(tag, lambda: work(read_leaves), call)
        timeout_secs = self._options.timeout_secs
        if first:  # before the first transfer: those who do something else would never come to it
            self._processes.gather_decide(
                self._tag, "", lambda _: "", timeout_secs, f"{call} with broadcast"
            )
        lockstep = Lockstep(self._processes, self._tag, timeout_secs, _cannot_load)
        return self._on_all(
            f"{self._tag}/load", lambda: lockstep.run(lambda: work(Broadcast(lockstep)))
        )

    def _opening(self, call: str) -> str:
        """The call, for the first agreement of the round; nothing for those that follow."""
        first, self._opened = not self._opened, True
        return call if first else ""

    def _on_all(self, tag: str, work: Callable[[], T], call: str = "") -> T:
        return self._processes.run_on_all(
            tag,
            work,
            self._options.timeout_secs,
            _cannot_load,
            tell=lambda _: self._identity(),
            hear=_refuse_different,
            call=call,
        )


def identity_of(path: str, attempt: str, leaves: str) -> str:
    """What ``_refuse_different`` compares.

    Args:
        path: of the checkpoint, for messages.
        attempt: names the save that it is from.
        leaves: a digest of what is loaded of it into arrays that processes share.
    """
    return json.dumps([path, attempt, leaves])


def _refuse_different(texts: list[str]) -> None:
    """Raises CheckpointError where processes load different checkpoints, or other leaves of one.

    Each would hold parts of another array than its neighbours, and nobody would see it.
    """
    told = [(index, *json.loads(text)) for index, text in enumerate(texts) if text]
    for index, path, attempt, leaves in told[1:]:
        first, other, before, these = told[0]
        if attempt != before:
            raise CheckpointError(
                f"process {first} loads {other} and process {index} {path}, which are different checkpoints: all "
                "processes must load the same step of one directory"
            )
        if leaves != these:
            raise CheckpointError(
                f"{path}: process {index} loads other leaves, or into other dtypes, than process {first}: all "
                "processes must load the same"
            )


def _cannot_load(index: int, text: str) -> Exception:
    """The error of another process, of the same kind where callers tell kinds apart."""
    kinds = {"CheckpointCorrupt": CheckpointCorrupt, "CheckpointNotFound": CheckpointNotFound}
    kind, _, message = text.partition(": ")
    return kinds.get(kind, CheckpointError)(f"process {index} cannot load it: {kind}: {message}")
