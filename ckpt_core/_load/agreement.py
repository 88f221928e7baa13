"""Loads of several processes: after planning and after reading, each waits until all succeeded."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckpt_core._devices.shardings import where_text
from ckpt_core._format.part import runs_of
from ckpt_core._load.plans import ItemPlan
from ckpt_core._load.request import Request
from ckpt_core._processes import NotTogether, Processes
from ckpt_core._read import Reading, read_and_send, read_leaves
from ckpt_core._saved import Checkpoint, DerivedItem, replaced

_SETS = "sets"


class LoadAgreement:
    """The agreements of one load between several processes, as a block around it: if the block fails, the others get the
    error where they wait next. Processes agree once after reading. A restore without ``atomic_restore`` also agrees after
    planning, so that none changes an object while another cannot match the checkpoint. So does a load that sends arrays between
    processes: who makes another call would never join a collective. If any process sets live objects, they agree last that all
    have: else one would train from another step.
    """

    def __init__(self, request: Request, processes: Processes, step: int | None) -> None:
        options, call = request.options, "load"
        if request.restores:
            call = "restore with atomic_restore" if options.atomic_restore else "restore"
        self._plans_first = call == "restore" or options.broadcast
        call = f"{call} with broadcast" if options.broadcast else call
        self._round = request.together or processes.round(call, options.timeout_secs)
        self._options = options
        self._alike = step is not None  # all load this checkpoint, even if no array lies on several
        self._identity = ""
        self._waits = False  # whether the others wait for this process once more

    def __enter__(self) -> None:
        self._waits = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if self._waits:
            self._waits = False
            try:
                self._round.decide("", lambda _: "", error=error)
            except BaseException as raised:
                if raised is not error:
                    raise

    def planned(self, checkpoint: Checkpoint, plans: Sequence[ItemPlan]) -> Reading:
        """Waits, if need be, until all processes have planned; returns the function that reads leaves."""
        self._identity = self._identity_of(checkpoint, plans)
        if self._plans_first:
            self._agree(self._identity, _judged)
        if not self._options.broadcast:
            return read_leaves
        process = self._round.processes.index
        return functools.partial(read_and_send, lambda: self._agree("", lambda _: ""), process)

    def read(self, sets_objects: bool) -> None:
        """Waits until all processes have read; if any then ``sets_objects``, the rest of the block is waited for, too."""
        self._waits = self._agree(self._identity, _judged) == _SETS and sets_objects

    def _agree(self, text: str, judge: Callable[[list[str]], str]) -> str:
        """Waits until all processes are here; returns what ``judge`` makes of their texts on process 0."""
        self._waits = False  # if this raises, the others raise, too
        answer = self._round.decide(text, judge)
        self._waits = True
        return answer

    def _identity_of(self, checkpoint: Checkpoint, plans: Sequence[ItemPlan]) -> str:
        """What this process loads, for process 0: of leaves on one process alone nothing. With broadcast every leaf counts, and
        the size of the rounds in which leaves are sent; of what lies on one process alone only that it is loaded.
        """
        in_rounds = self._options.max_host_bytes if self._options.broadcast else 0
        beyond, on = hashlib.sha256(str(in_rounds).encode()), set[int]()

        @functools.cache  # a sharding may have 100,000 devices
        def placed(sharding: Any, shape: tuple[int, ...]) -> tuple[str, set[int]]:
            if sharding is None:
                return "", set()
            holders = {device.process_index for device in sharding.device_set}
            return where_text(sharding, True, shape, own=False), holders

        for plan in plans:
            for _, want in sorted(plan.wants.items()):  # not in the order of reading
                if want.sharding is None and not in_rounds:
                    continue
                spec = want.spec or plan.item.specs[want.leaf]
                where, holders = placed(want.sharding, spec.shape)
                if len(holders) > 1:
                    on |= holders
                elif not in_rounds:
                    continue
                leaf = plan.item.name, want.leaf, spec.dtype, where if len(holders) > 1 else ""
                if isinstance(plan.item, DerivedItem):
                    leaf = *leaf, plan.item.recipes[want.leaf]
                beyond.update(repr(leaf).encode(errors="surrogatepass"))
        sent = checkpoint.attempt if self._alike or on else ""
        if in_rounds:
            on.update(range(self._round.processes.count))
        return json.dumps(
            Identity(
                checkpoint.path,
                sent,
                beyond.hexdigest(),
                runs_of(sorted(on)),
                any(plan.live for plan in plans),
                checkpoint.attempt,
            )
        )


class Identity(NamedTuple):
    """What one process loads, as it tells process 0 before any proceeds."""

    path: str  # for messages
    attempt: str  # token of the save that wrote the checkpoint; empty if each may load another one
    beyond: str  # digest of the leaves that lie on several processes, with dtypes and shardings
    on: Sequence[Sequence[int]]  # processes that hold these, as runs, so that messages stay short
    sets: bool  # live objects
    found: str  # token of the save, never left out


def _judged(texts: list[str]) -> str:
    """On process 0, before any proceeds, from what all load: whether any sets live objects. Raises CheckpointError if they load
    different checkpoints or leaves: a global array would be made of shards of different arrays. All must name the same leaves
    with the same dtypes and shardings, or at least those that others share; what a process places on its own devices alone is
    its own.
    """
    all_of = [Identity(*json.loads(one)) for one in texts]
    places = [one.path.rpartition("/") for one in all_of]
    # between two renames, the old checkpoint has a hidden name beside it
    shown = {name for _, _, name in places if not name.startswith(".ckpt-")}
    one_path = len(shown) <= 1 and len({folder for folder, _, _ in places}) == 1
    if one_path and len({one.found for one in all_of}) > 1:
        raise replaced(all_of[0].path)  # one opened the old one, the other the new one
    same = [(index, one) for index, one in enumerate(all_of) if one.attempt]
    for index, one in same[1:]:
        first, other = same[0]
        if one.attempt != other.attempt:
            raise NotTogether(
                f"process {first} loads {other.path} and process {index} {one.path}, which are different "
                "checkpoints: all processes must load the same step of one directory"
            )
    runs = {(first, last) for one in all_of for first, last in one.on}
    named = {index for first, last in runs for index in range(first, last + 1)}
    sharing = [(index, one) for index, one in enumerate(all_of) if one.on or index in named]
    for index, one in sharing[1:]:
        first, other = sharing[0]
        if one.beyond != other.beyond:
            raise NotTogether(
                f"{one.path}: process {index} loads other leaves, or into other dtypes or onto other shardings, than "
                f"process {first}: all processes must load the same"
            )
    return _SETS if any(one.sets for one in all_of) else ""
