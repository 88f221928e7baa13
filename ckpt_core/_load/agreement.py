"""Loads of several processes: after planning and after reading, each waits until all succeeded."""

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
    """The agreements of one load between all processes; does nothing if only one takes part.

    Args:
        options: options of the load.
        identity: gives the digest of what all processes must load alike; empty if they may differ.
        tag: tag of the round; if empty, the next tag is taken here.
        alone: only this process loads, however many run (``as_numpy=True``).
    """

    def __init__(
        self, options: Options, identity: Callable[[], str], tag: str = "", alone: bool = False
    ) -> None:
        self._options = options
        self._identity = identity
        # every process counts tags; if one took a tag alone, it would be one ahead from then on
        self._tag = "" if alone else tag or _processes.next_tag()
        self._processes = _processes.Processes(0, 1) if alone else _processes.this_run()
        self._opened = False

    def plan(self, work: Callable[[], T], call: str) -> T:
        """Calls ``work``, and waits until all processes succeeded.

        A restore plans here, so that no process changes an object before all could match.

        Args:
            work: the work of this process.
            call: what this process does, such as ``restore``, told to a process that does something
                else at that moment.
        """
        if self._processes.count == 1:
            return work()
        if self._options.broadcast:
            call = f"{call} with broadcast"
        return self._on_all(self._tag, work, self._opening(call))

    def read(self, work: Callable[[Reading], T], call: str) -> T:
        """Calls ``work`` with the function that reads leaves; waits until all processes succeeded.

        Args:
            work: the work of this process.
            call: as for ``plan``.
        """
        if self._processes.count == 1:
            return work(read_leaves)
        first = not self._opened
        call = self._opening(call)
        if not self._options.broadcast:
            tag = self._tag if first else f"{self._tag}/load"
            return self._on_all(tag, lambda: work(read_leaves), call)
        timeout_secs = self._options.timeout_secs
        if first:  # a process that makes another call would never join the first collective
            self._processes.gather_decide(
                self._tag, "", lambda _: "", timeout_secs, f"{call} with broadcast"
            )
        lockstep = Lockstep(self._processes, self._tag, timeout_secs, _cannot_load)
        return self._on_all(
            f"{self._tag}/load", lambda: lockstep.run(lambda: work(Broadcast(lockstep)))
        )

    def _opening(self, call: str) -> str:
        """``call`` at the first agreement of the round, empty at later ones."""
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
    """The text that each process sends for ``_refuse_different`` to compare.

    Args:
        path: path of the checkpoint, for messages.
        attempt: token of the save that wrote the checkpoint.
        leaves: digest of the leaves that are loaded into arrays spanning several processes.
    """
    return json.dumps([path, attempt, leaves])


def _refuse_different(texts: list[str]) -> None:
    """Called on process 0 with every process's identity before any proceeds.

    Raises:
        CheckpointError: processes load different checkpoints or different leaves. A global array
            would then be made of shards of different arrays, and no error would say so.
    """
    told = [(index, *json.loads(text)) for index, text in enumerate(texts) if text]
    for index, path, attempt, leaves in told[1:]:
        first, other, before, these = told[0]
        if attempt != before:
            raise _processes.NotTogether(
                f"process {first} loads {other} and process {index} {path}, which are different checkpoints: all "
                "processes must load the same step of one directory"
            )
        if leaves != these:
            raise _processes.NotTogether(
                f"{path}: process {index} loads other leaves, or into other dtypes, than process {first}: all "
                "processes must load the same"
            )


def _cannot_load(index: int, text: str) -> Exception:
    """The error to raise here for a failure on process ``index``, of a class that callers catch."""
    kinds = {"CheckpointCorrupt": CheckpointCorrupt, "CheckpointNotFound": CheckpointNotFound}
    kind, _, message = text.partition(": ")
    return kinds.get(kind, CheckpointError)(f"process {index} cannot load it: {kind}: {message}")
