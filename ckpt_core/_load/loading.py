"""The steps that every load and restore takes: open, match, plan, read, assemble, apply. After planning and after reading,
several processes wait until all succeeded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_core._adapters import introduce, refuse_twice
from ckpt_core._devices.shardings import where_text
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ckpt_core._format import orbax_files
from ckpt_core._format.part import runs_of
from ckpt_core._format.untrusted import refuse_deep
from ckpt_core._layout.regions import region_size
from ckpt_core._lazy import jax
from ckpt_core._load import constants
from ckpt_core._load.matching import item_meant, plan_item
from ckpt_core._load.plans import InPlace, ItemPlan
from ckpt_core._load.renames import refuse_mismatches
from ckpt_core._load.request import NOT_PASSED, Request
from ckpt_core._load.targets import value_of
from ckpt_core._operation import Operation
from ckpt_core._options import Options
from ckpt_core._processes import NotTogether, Processes, this_run
from ckpt_core._read import Reading, read_and_send, read_leaves
from ckpt_core._saved import (
    MOST_TRIES,
    Checkpoint,
    DerivedItem,
    NativeCheckpoint,
    Replaced,
    SavedItem,
    replaced,
    with_path,
)
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import CHANGEABLE_KINDS, TEXT_KINDS, LeafSpec, from_text
from ckpt_core._tree.patterns import advice_on_pattern, unmatched_patterns
from ckpt_core._words import some

Opening = Callable[[], Checkpoint]


def run(
    opening: Opening, request: Request, step: int | None = None
) -> tuple[Checkpoint, dict[str, Any], Sequence[ItemPlan]]:
    """The checkpoint that was loaded or restored; the values by item name; and the plans, for the report. On every process that
    takes part: opens, matches and plans; reads and assembles; applies. If the checkpoint is replaced meanwhile, a process that
    is alone loads the new one. ``step`` is None outside of a Checkpointer.
    """
    options = request.options
    # every process counts rounds; if one took a round alone, it would be one ahead from then on
    processes = Processes(0, 1) if request.as_numpy else this_run()
    agreement = LoadAgreement(request, processes, step) if processes.count > 1 else None
    tries = 0
    while True:
        tries += 1
        in_place = InPlace(options.max_host_bytes) if request.restores else None
        named, plans, leaves, values = dict[str, ItemPlan](), [], [], []
        try:
            with agreement or contextlib.nullcontext():
                checkpoint = opening()
                with _watched(checkpoint, options, step) as operation:
                    named = _match(checkpoint, request)
                    plans = [*named.values()]
                    reading: Reading = read_leaves
                    if agreement is not None:
                        reading = agreement.planned(checkpoint, plans)
                    if operation.listener is not None:
                        operation.total_bytes = sum(plan.stored_bytes for plan in plans)
                    if in_place is not None:
                        in_place.begin(plans)
                    how = request, operation, reading, in_place
                    leaves = [_read(checkpoint, plan, *how) for plan in plans]
                    if checkpoint.shared or any(plan.item.shared for plan in plans):
                        _share(checkpoint, plans, leaves)
                    if agreement is not None:
                        agreement.read(request.restores)
                    if in_place is not None:
                        values = in_place.finish(plans, leaves)
                    else:
                        values = [plan.make(made) for plan, made in zip(plans, leaves, strict=True)]
            return checkpoint, dict(zip(named, values, strict=True)), plans
        except BaseException as error:
            if in_place is not None:
                in_place.give_up(error)
            named, plans, leaves, values = {}, [], [], []  # the traceback would keep them alive
            again = agreement is None and isinstance(error, Replaced) and tries < MOST_TRIES
            if not again:
                raise


_ONCE = "Restore it under one of the names; what is saved under another is loaded with load(path, item=...)"


def _match(checkpoint: Checkpoint, request: Request) -> dict[str, ItemPlan]:
    """The plan of each wanted item, by its name in the result; changes no object. See ``plan_item`` for what it reads."""
    target: Any = request.target
    if request.item is not None:
        target = {request.item: target}
    elif not request.restores and (checkpoint.single or target is NOT_PASSED):
        target = dict.fromkeys(checkpoint.items, target)
    elif not isinstance(target, Mapping):
        raise TypeError(
            f"{checkpoint.path} holds the items {', '.join(checkpoint.items)}: like must be a dict of items, "
            "or name one with item="
        )
    chosen: dict[str, tuple[SavedItem, Any]] = {
        name: (checkpoint.items.get(name) or item_meant(checkpoint, name), part)
        for name, part in target.items()
    }
    if request.restores:
        introduce(target)
    named = {
        name: plan_item(checkpoint, saved, target, request)
        for name, (saved, target) in chosen.items()
    }
    plans = [*named.values()]
    if request.restores:
        refuse_twice(request.target, [plan.live for plan in plans], _ONCE)
    if request.select:  # a pattern that fits nothing is why shapes differ
        taken = any(isinstance(plan.item, DerivedItem) for plan in plans)
        _check_patterns(checkpoint, plans, "select", [*request.select], taken)
    if (
        request.matching.rename is not None
        or request.rules
        or any(plan.match is not None and plan.match.mismatches for plan in plans)
    ):
        refuse_mismatches(checkpoint, plans, request)
    saved = checkpoint.record.settings if isinstance(checkpoint, NativeCheckpoint) else {}
    if request.restores and any(getattr(jax.config, k, None) != v for k, v in saved.items()):
        constants.warn_of_settings(saved)
    if request.only is not None:
        loads = (at is not None for plan in plans for at in plan.positions)
        _check_patterns(checkpoint, plans, "only", request.only, any(loads))
    return named


def _read(
    checkpoint: Checkpoint,
    plan: ItemPlan,
    request: Request,
    operation: Operation,
    reading: Reading,
    in_place: InPlace | None,
) -> list[Any]:
    """The leaves of the result: kept from the target, or read by ``reading`` and given to ``in_place`` while others are being read."""
    item, leaves = plan.item, list(plan.kept)
    if not TEXT_KINDS.isdisjoint([spec.kind for spec in item.specs]):
        _read_texts(checkpoint, plan, leaves)
    if not plan.wants:
        return leaves  # the database is not opened
    watch: Callable[[int], None] | None = None
    if operation.listener is not None:  # a large array takes seconds, and is counted at its end
        watch = lambda more: operation.tell_progress(operation.done_bytes + more)  # noqa: E731
    given = checkpoint, item, [*plan.wants.values()], request.options, watch
    # closed: an error of this loop that somebody keeps would keep threads, files and buffers
    with contextlib.closing(reading(*given)) as arrays:
        for result, (want, parts) in zip(plan.wants, arrays, strict=True):
            if request.abandoned is not None and request.abandoned():
                raise CheckpointError(
                    "the background load was stopped because the interpreter is exiting: no caller can get its result"
                )
            spec = item.specs[want.leaf]
            size_bytes = sum([part.nbytes for part in parts.values()])
            if want.dtype is not None:  # the parts are cast already: count what was stored
                size_bytes = sum(map(region_size, want.regions)) * spec.numpy_dtype.itemsize
            operation.done_bytes += size_bytes
            if watch is not None:
                watch(0)
            leaves[result] = None  # drop the old array before the new one is made
            path, cast = item.paths[want.leaf], request.matching.cast
            leaves[result] = value = value_of(spec, want, parts, path, cast=cast)
            if in_place is not None:
                in_place.take(plan, result, value, size_bytes)
    return leaves


def _share(checkpoint: Checkpoint, plans: Sequence[ItemPlan], leaves: list[list[Any]]) -> None:
    """Makes one object of leaves that were one when they were saved, in one item or several. With a target they become one where
    the target, too, holds one object. Arrays of jax cannot be changed, and need not.
    """
    places: dict[tuple[str, int | None], Any] = {}
    for plan, of_plan in zip(plans, leaves, strict=True):
        for result, position in enumerate(plan.positions):
            if isinstance(plan.item, DerivedItem) and position is not None:
                position = plan.item.as_stored(position)
            places[plan.item.name, position] = plan, of_plan, result
    groups = [[(plan.item.name, at) for at in one] for plan in plans for one in plan.item.shared]
    for group in (*groups, *checkpoint.shared):
        firsts: dict[int, Any] = {}  # by what the target holds there
        for plan, of_plan, result in filter(None, map(places.get, group)):
            spec = plan.wants[result].spec if result in plan.wants else None
            if spec is None or spec.kind in CHANGEABLE_KINDS:
                held = plan.kept[result]
                one = None if isinstance(held, LeafSpec) else held  # which is what was saved
                of_plan[result] = firsts.setdefault(id(one), of_plan[result])


_MOST_STATE_DEPTH = 100
"""The states of random generators, which are stored as JSON in a text, are nested less deep."""


def _read_texts(checkpoint: Checkpoint, plan: ItemPlan, leaves: list[Any]) -> None:
    """Reads the leaves that are stored as text: strings, big integers, random generators."""
    item, text_of = plan.item, checkpoint.texts(plan.item)
    for result, position in enumerate(plan.positions):
        if position is None or item.specs[position].kind not in TEXT_KINDS:
            continue
        where, stored = format_path(item.paths[position]), text_of(position)
        try:
            leaves[result] = from_text(stored, item.specs[position])
        except RecursionError as error:
            data = stored.encode(errors="surrogatepass")
            refuse_deep(data, orbax_files.STRINGS_FILE, error, _MOST_STATE_DEPTH)
            raise
        except (AttributeError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise CheckpointCorrupt(
                f"leaf {where}: its text cannot be read: {error}", leaf=where
            ) from error


@contextlib.contextmanager
def _watched(checkpoint: Checkpoint, options: Options, step: int | None) -> Generator[Operation]:
    """Locks the checkpoint against deletion while the block runs, and sends the events of the restore."""
    operation = Operation("load", checkpoint.path, step, options.report_secs, options.on_event)
    operation.happened("restore_started")
    try:
        with operation.watched("reading"), checkpoint.reading():
            yield operation
    except BaseException as raised:
        error = with_path(raised, checkpoint.path)
        operation.happened("restore_failed", operation.done_bytes, error)
        if isinstance(error, CheckpointCorrupt) and checkpoint.was_replaced():
            raise replaced(checkpoint.path) from error
        if error is raised:
            raise
        raise error from raised
    operation.happened("restored", operation.done_bytes)


def _check_patterns(
    checkpoint: Checkpoint, plans: Sequence[ItemPlan], name: str, patterns: Any, matches: bool
) -> None:
    """Raises CheckpointNotFound if ``only=`` or ``select=``, or one of its patterns, matches no leaf of any item."""
    trees = [(plan.item.name, [*plan.item.paths, *plan.paths]) for plan in plans]
    # what another item has is no misspelling: one list may serve calls that restore different items
    others = [(item.name, item.paths or [()]) for item in checkpoint.items.values()]
    idle = unmatched_patterns(patterns, [*trees, *others])
    if not idle and matches:
        return
    paths = [format_path(path) for plan in plans for path in plan.item.paths]
    unmatched = [patterns] if isinstance(patterns, str) or not idle else idle
    advice = "; ".join(filter(None, (advice_on_pattern(pattern, paths) for pattern in idle)))
    raise CheckpointNotFound(
        f"{checkpoint.path}: {name}={', '.join(map(repr, unmatched))} matches no leaf; leaves are {some(paths)}"
        + (f". {advice}" if advice else "")
    )


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
        self._claim = ""
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
        self._claim = self._claim_of(checkpoint, plans)
        if self._plans_first:
            self._agree(self._claim, _judged)
        if not self._options.broadcast:
            return read_leaves
        process = self._round.processes.index
        return functools.partial(read_and_send, lambda: self._agree("", lambda _: ""), process)

    def read(self, sets_objects: bool) -> None:
        """Waits until all processes have read; if any then ``sets_objects``, the rest of the block is waited for, too."""
        self._waits = bool(self._agree(self._claim, _judged)) and sets_objects

    def _agree(self, text: str, judge: Callable[[list[str]], str]) -> str:
        """Waits until all processes are here; returns what ``judge`` makes of their texts on process 0."""
        self._waits = False  # if this raises, the others raise, too
        answer = self._round.decide(text, judge)
        self._waits = True
        return answer

    def _claim_of(self, checkpoint: Checkpoint, plans: Sequence[ItemPlan]) -> str:
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
        sent = checkpoint.save_token if self._alike or on else ""
        if in_rounds:
            on.update(range(self._round.processes.count))
        return json.dumps(
            _Claim(
                checkpoint.path,
                sent,
                beyond.hexdigest(),
                runs_of(sorted(on)),
                any(plan.live for plan in plans),
                checkpoint.save_token,
            )
        )


class _Claim(NamedTuple):
    """What one process loads, as it tells process 0 before any proceeds."""

    path: str  # for messages
    save_token: str  # of the save that wrote the checkpoint; empty if each may load another one
    beyond: str  # digest of the leaves that lie on several processes, with dtypes and shardings
    on: Sequence[Sequence[int]]  # processes that hold these, as runs, so that messages stay short
    sets: bool  # live objects
    found: str  # token of the save, never left out


def _judged(texts: list[str]) -> str:
    """On process 0, before any proceeds, from what all load: a text if any sets live objects. Raises CheckpointError if they load
    different checkpoints or leaves: a global array would be made of shards of different arrays. All must name the same leaves
    with the same dtypes and shardings, or at least those that others share; what a process places on its own devices alone is
    its own.
    """
    all_of = [_Claim(*json.loads(one)) for one in texts]
    places = [one.path.rpartition("/") for one in all_of]
    # between two renames, the old checkpoint has a hidden name beside it
    shown = {name for _, _, name in places if not name.startswith(".ckpt-")}
    one_path = len(shown) <= 1 and len({folder for folder, _, _ in places}) == 1
    if one_path and len({one.found for one in all_of}) > 1:
        raise replaced(all_of[0].path)  # one opened the old one, the other the new one
    same = [(index, one) for index, one in enumerate(all_of) if one.save_token]
    for index, one in same[1:]:
        first, other = same[0]
        if one.save_token != other.save_token:
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
    return "sets" if any(one.sets for one in all_of) else ""
