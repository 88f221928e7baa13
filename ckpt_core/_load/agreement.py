"""Loads of several processes: after planning and after reading, each waits until all succeeded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ckpt_core import _processes
from ckpt_core._devices.shardings import where_text
from ckpt_core._errors import told_by_another
from ckpt_core._format.part import runs_of
from ckpt_core._load.outcomes import ItemPlan
from ckpt_core._load.readers.broadcast import Broadcast, Lockstep
from ckpt_core._load.readers.pipeline import read_leaves
from ckpt_core._load.readers.wants import Reading
from ckpt_core._options import Options

T = TypeVar("T")


class LoadAgreement:
    """The agreements of one load between all processes; does nothing if only one takes part.

    Args:
        options: options of the load.
        tag: tag of the round; if empty, the next tag is taken here.
        alone: only this process loads, however many run (``as_numpy=True``).

    Attributes:
        alone: whether this process agrees with no other.
    """

    def __init__(self, options: Options, tag: str = "", alone: bool = False) -> None:
        self._options = options
        # every process counts tags; if one took a tag alone, it would be one ahead from then on
        self._processes = _processes.Processes(0, 1) if alone else _processes.this_run()
        self.alone = self._processes.count == 1
        self._tag = tag if tag or self._processes.count == 1 else _processes.next_tag()
        self._opened = False

    def plan(self, work: Callable[[], T], identity: Callable[[], str], call: str) -> T:
        """Calls ``work``, and waits until all processes succeeded.

        A restore plans here, so that no process changes an object before all could match.

        Args:
            work: the work of this process.
            identity: gives, after the work, the text of what all processes must load alike; see ``Identity``.
            call: what this process does, such as ``restore``, told to a process that does something
                else at that moment.
        """
        if self._processes.count == 1:
            return work()
        if self._options.broadcast:
            call = f"{call} with broadcast"
        return self._on_all(self._tag, work, identity, self._opening(call))

    def read(self, work: Callable[[Reading], T], identity: Callable[[], str], call: str) -> T:
        """Calls ``work`` with the function that reads leaves; waits until all processes succeeded.

        Args:
            work: the work of this process.
            identity, call: as for ``plan``.
        """
        if self._processes.count == 1:
            return work(read_leaves)
        first = not self._opened
        call = self._opening(call)
        if not self._options.broadcast:
            tag = self._tag if first else f"{self._tag}/load"
            return self._on_all(tag, lambda: work(read_leaves), identity, call)
        timeout_secs = self._options.timeout_secs
        if first:  # a process that makes another call would never join the first collective
            self._processes.gather_decide(
                self._tag, "", lambda _: "", timeout_secs, f"{call} with broadcast"
            )
        lockstep = Lockstep(self._processes, self._tag, timeout_secs, _cannot_load)
        return self._on_all(
            f"{self._tag}/load",
            lambda: lockstep.run(lambda: work(Broadcast(lockstep))),
            identity,
        )

    def _opening(self, call: str) -> str:
        """``call`` at the first agreement of the round, empty at later ones."""
        first, self._opened = not self._opened, True
        return call if first else ""

    def _on_all(
        self, tag: str, work: Callable[[], T], identity: Callable[[], str], call: str = ""
    ) -> T:
        return self._processes.run_on_all(
            tag,
            work,
            self._options.timeout_secs,
            _cannot_load,
            tell=lambda _: identity(),
            hear=_refuse_different,
            call=call,
        )


class Identity(NamedTuple):
    """What one process loads, as it tells process 0 before any proceeds.

    Attributes:
        path: path of the checkpoint, for messages.
        attempt: token of the save that wrote the checkpoint; empty if each may load another one.
        everything: digest of all leaves that have a sharding, with their dtypes and shardings.
        beyond: the same of those that lie on other processes, too, or on others alone.
        on: the processes on whose devices these lie, as runs: a message must not grow with their number.
    """

    path: str
    attempt: str
    everything: str
    beyond: str
    on: Sequence[Sequence[int]]


def identity_of(path: str, attempt: str, plans: Iterable[ItemPlan], alike: bool) -> str:
    """The text that each process sends for ``_refuse_different`` to compare.

    Args:
        path, attempt: as in ``Identity``.
        plans: what this process loads.
        alike: all must load this checkpoint, even if no array lies on several processes.
    """
    everything, beyond, on = hashlib.sha256(), hashlib.sha256(), set[int]()
    known: dict[Any, tuple[str, bool]] = {}  # a sharding may have 100,000 devices
    for plan in plans:
        for result, target in plan.targets.items():
            sharding: Any = target.sharding
            if sharding is None:
                continue
            key = sharding, target.spec.shape
            if key not in known:
                text = where_text(sharding, True, target.spec.shape, own=False)
                known[key] = text, sharding.is_fully_addressable
                if not sharding.is_fully_addressable:
                    on |= {device.process_index for device in sharding.device_set}
            where, is_own = known[key]
            leaf = (plan.item.name, plan.positions[result], target.spec.dtype, where)
            data = repr(leaf).encode(errors="surrogatepass")
            everything.update(data)
            if not is_own:
                beyond.update(data)
    sent = attempt if alike or on else ""
    return json.dumps([path, sent, everything.hexdigest(), beyond.hexdigest(), runs_of(sorted(on))])


def _refuse_different(texts: list[str]) -> None:
    """Called on process 0 with every process's identity before any proceeds.

    What a process places on its own devices alone is its own, as long as no other process counts on
    these devices. Otherwise all must name the same leaves with the same dtypes and shardings: either
    all of them, which is one program of several stages, or at least those that others share.

    Raises:
        CheckpointError: processes load different checkpoints or different leaves. A global array
            would then be made of shards of different arrays, and no error would say so.
    """
    told = [(index, Identity(*json.loads(text))) for index, text in enumerate(texts)]
    same = [(index, one) for index, one in told if one.attempt]
    for index, one in same[1:]:
        first, other = same[0]
        if one.attempt != other.attempt:
            raise _processes.NotTogether(
                f"process {first} loads {other.path} and process {index} {one.path}, which are different "
                "checkpoints: all processes must load the same step of one directory"
            )
    runs = sorted({(first, last) for _, one in told for first, last in one.on})
    named, end = set[int](), 0
    for first, last in runs:
        named.update(range(max(first, end), last + 1))
        end = max(end, last + 1)
    sharing = [(index, one) for index, one in told if one.on or index in named]
    if len({one.beyond for _, one in sharing}) > 1 and len({o.everything for _, o in sharing}) > 1:
        first, other = sharing[0]
        index, one = next(
            (index, one) for index, one in sharing if one.everything != other.everything
        )
        raise _processes.NotTogether(
            f"{one.path}: process {index} loads other leaves, or into other dtypes or onto other shardings, than "
            f"process {first}: all processes must load the same"
        )


def _cannot_load(index: int, text: str) -> Exception:
    """The error to raise here for a failure on process ``index``, of a class that callers catch."""
    return told_by_another(text.partition(": ")[0], f"process {index} cannot load it: {text}")
