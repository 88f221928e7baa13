"""Loads of several processes: after planning and after reading, each waits until all succeeded."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

from ckpt_core import _processes
from ckpt_core._devices.shardings import where_text
from ckpt_core._errors import (
    CheckpointNotFound,
    known_to_all,
    mark_known_to_all,
    raised_by_another,
)
from ckpt_core._format.part import runs_of
from ckpt_core._load.plans import ItemPlan
from ckpt_core._options import Options
from ckpt_core._read import Broadcast, Lockstep, Reading, read_leaves
from ckpt_core._saved import MOST_TRIES, Checkpoint, Replaced, replaced

_SETS = "sets"


class LoadAgreement:
    """The agreements of one load between all processes; does nothing if only one takes part. The load is a block of it: if the
    block fails, the other processes get the error where they wait next. Processes agree once after reading. A restore without
    ``atomic_restore`` also agrees after planning, so that none changes an object while another cannot match the checkpoint. So
    does a load that sends arrays between processes: who makes another call would never join a collective. If any process sets
    live objects, they agree last that all have: else one would train from a step that another did not get. If the checkpoint is
    replaced meanwhile, all processes begin the load anew, or none does.
    """

    def __init__(
        self,
        options: Options,
        call: str = "load",  # shown to a process that does something else at that moment
        tag: str = "",  # of the round; empty: the next tag is taken here
        alone: bool = False,  # only this process loads, however many run (``as_numpy=True``)
        alike: bool = False,  # as for ``identity_of``
    ) -> None:
        self._options, self._alike = options, alike
        self._restores = call != "load"
        self._plans_first = call == "restore" or options.broadcast
        self._call = f"{call} with broadcast" if options.broadcast else call
        # every process counts tags; if one took a tag alone, it would be one ahead from then on
        self._processes = _processes.Processes(0, 1) if alone else _processes.this_run()
        self._round = tag if tag or self._processes.count == 1 else _processes.next_tag()
        self._tag, self._tries = self._round, 1
        self._found: Sequence[str] = ()
        self._identity = ""
        self._sets = False  # whether any process sets live objects; known after the first agreement
        self._next: str | None = None  # where the others wait next, relative to the tag

    def __enter__(self) -> None:
        self._next = "" if self._processes.count > 1 else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if self._next is None:
            return
        try:
            self._agree(error)
        except BaseException as raised:
            if raised is not error:
                raise

    def begins_anew(self, error: BaseException) -> bool:
        """Whether all processes begin the load anew after this error."""
        if not isinstance(error, Replaced) or self._tries == MOST_TRIES:
            return False
        self._tag = f"{self._round}/again/{self._tries}"
        self._tries += 1
        return self._processes.count == 1 or known_to_all(error)

    def planned(
        self, checkpoint: Checkpoint, plans: Sequence[ItemPlan]
    ) -> contextlib.AbstractContextManager[Reading]:
        """Waits, if need be, until all processes have planned; gives the block in which leaves are read its function."""
        if self._processes.count == 1:
            return contextlib.nullcontext(read_leaves)
        sets = self._restores and any(plan.live_objects for plan in plans)
        self._identity = identity_of(checkpoint.path, checkpoint.attempt, plans, self._alike, sets)
        if self._plans_first:
            self._agree()
            self._next = "/load"
        return self._in_step() if self._options.broadcast else contextlib.nullcontext(read_leaves)

    @contextlib.contextmanager
    def _in_step(self) -> Generator[Reading]:
        secs = self._options.timeout_secs
        with Lockstep(self._processes, self._tag, secs, _cannot_load) as lockstep:
            yield Broadcast(lockstep)

    def read(self) -> None:
        """Waits until all processes have read; the rest of the block sets live objects, and is waited for, too."""
        if self._processes.count > 1:
            self._agree()
            self._next = "/set" if self._sets and self._restores else None

    def _agree(self, error: BaseException | None = None) -> None:
        """Waits until all processes are here; raises the error of this process, or else what another one reported."""
        at, self._next = self._next, None
        compares = at != "/set"

        def outcome() -> BaseException | None:
            if error is None or (compares and isinstance(error, Replaced)):
                return error  # no failure, unless another process has one: all begin anew
            raise error

        def report(result: Any) -> str:  # what this process loads; text alone, if that was replaced
            if not compares:
                return ""
            return self._identity if result is None else json.dumps(str(result))

        self._processes.run_on_all(
            f"{self._tag}{at}",
            outcome,
            self._options.timeout_secs,
            _cannot_load,
            report=report,
            check=self._judged if compares else lambda _: None,
            call=self._call if self._tag == self._round and not at else "",
            accept=self._accept if compares else lambda _: None,
        )

    def _judged(self, texts: list[str]) -> str:
        """On process 0, from what all reported: ``_SETS`` if any sets live objects, or why all begin anew, else nothing. Raises
        as ``_refuse_different`` does.
        """
        reports = [json.loads(text) for text in texts]
        if said := next((one for one in reports if isinstance(one, str)), ""):
            return said
        same = [Identity(*one) for one in reports]
        before, self._found = self._found, [one.found for one in same]
        if _is_one_path(same) and len({*self._found}) > 1 and self._found != before:
            return str(replaced(same[0].path))  # one opened the old one, the other the new one
        _refuse_different(same)
        return _SETS if any(one.sets for one in same) else ""

    def _accept(self, answer: str) -> None:
        """Called with what ``_judged`` gave; raises Replaced on all processes if they begin anew."""
        self._sets = answer == _SETS
        if answer and not self._sets:
            error = Replaced(answer)
            mark_known_to_all(error, CheckpointNotFound.__name__)
            raise error


class Identity(NamedTuple):
    """What one process loads, as it tells process 0 before any proceeds."""

    path: str  # for messages
    attempt: str  # token of the save that wrote the checkpoint; empty if each may load another one
    everything: str  # digest of all leaves that have a sharding, with their dtypes and shardings
    beyond: str  # the same of those that lie on other processes, too, or on others alone
    on: Sequence[Sequence[int]]  # processes that hold these, as runs, so that messages stay short
    sets: bool = False  # live objects
    found: str = ""  # token of the save, never left out


def identity_of(
    path: str, attempt: str, plans: Iterable[ItemPlan], alike: bool, sets: bool = False
) -> str:
    """The ``Identity`` of this process as text, for process 0. With ``alike`` all must load this checkpoint, even if no array
    lies on several processes: a step of a Checkpointer.
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
    digests = everything.hexdigest(), beyond.hexdigest()
    return json.dumps([path, sent, *digests, runs_of(sorted(on)), sets, attempt])


def _is_one_path(same: Sequence[Identity]) -> bool:
    """Whether all opened one path; between two renames, the old checkpoint has a hidden name beside it."""
    places = [one.path.rpartition("/") for one in same]
    shown = {name for _, _, name in places if not name.startswith(".ckpt-")}
    return len(shown) <= 1 and len({folder for folder, _, _ in places}) == 1


def _refuse_different(identities: Sequence[Identity]) -> None:
    """Raises CheckpointError on process 0, before any proceeds, if processes load different checkpoints or leaves. A global
    array would then be made of shards of different arrays, without an error. What a process places on its own devices alone is
    its own, unless another process counts on these devices. Otherwise all must name the same leaves with the same dtypes and
    shardings: all of them, as one program of several stages does, or at least those that others share.
    """
    indexed = [*enumerate(identities)]
    same = [(index, one) for index, one in indexed if one.attempt]
    for index, one in same[1:]:
        first, other = same[0]
        if one.attempt != other.attempt:
            raise _processes.NotTogether(
                f"process {first} loads {other.path} and process {index} {one.path}, which are different "
                "checkpoints: all processes must load the same step of one directory"
            )
    runs = sorted({(first, last) for _, one in indexed for first, last in one.on})
    named, end = set[int](), 0
    for first, last in runs:
        named.update(range(max(first, end), last + 1))
        end = max(end, last + 1)
    sharing = [(index, one) for index, one in indexed if one.on or index in named]
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
    kind = _processes.kind_of(text)
    if kind == Replaced.__name__:
        return Replaced(text.partition(": ")[2])
    return raised_by_another(kind, f"process {index} cannot load it: {text}")
