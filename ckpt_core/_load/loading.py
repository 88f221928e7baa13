"""The steps that every load and restore takes: open, match, plan, read, assemble, apply."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_core._adapters import introduce, refuse_twice
from ckpt_core._directory import is_local_disk
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    StructureMismatch,
)
from ckpt_core._format import orbax_write
from ckpt_core._format.untrusted import refuse_deep
from ckpt_core._layout.regions import region_size
from ckpt_core._lazy import jax
from ckpt_core._load import constants
from ckpt_core._load.agreement import LoadAgreement
from ckpt_core._load.in_place import InPlace
from ckpt_core._load.matching import find_item, plan_item
from ckpt_core._load.plans import ItemPlan
from ckpt_core._load.renames import advice_for, idle_renames, proposed, refuse_idle
from ckpt_core._load.request import NOT_SAVED, Request
from ckpt_core._load.targets import SavedLeaf, dtype_while_read, is_resharded, value_of
from ckpt_core._operation import Operation
from ckpt_core._options import Options
from ckpt_core._read import Reading, Want
from ckpt_core._results import RestoreReport
from ckpt_core._saved import (
    MOST_TRIES,
    Checkpoint,
    NativeCheckpoint,
    OrbaxItem,
    Replaced,
    SavedItem,
    naming_checkpoint,
    replaced,
)
from ckpt_core._storage import StoreContext, new_context
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import CHANGEABLE_KINDS, TEXT_KINDS, LeafSpec, from_text
from ckpt_core._tree.patterns import advice_on_pattern, idle_patterns
from ckpt_core._words import some

Opening = Callable[[], Checkpoint]


class Loaded(NamedTuple):
    """The result of a load or restore."""

    checkpoint: Checkpoint
    values: dict[str, Any]  # by the item's name in the result
    plans: Sequence[ItemPlan]  # as executed, for the report


def run(opening: Opening, request: Request, step: int | None = None) -> Loaded:
    """Runs a load or restore, on every process that takes part: opens, matches and plans; reads and assembles; applies.
    ``LoadAgreement`` says where they wait for each other. If it fails, live objects are named or made unusable. If the
    checkpoint is replaced meanwhile, a process that is alone loads the new one. ``step`` is None outside of a Checkpointer.
    """
    options, call = request.options, "load"
    if request.restores:
        call = "restore with atomic_restore" if options.atomic_restore else "restore"
    agreement = LoadAgreement(options, call, request.together, request.as_numpy, step is not None)
    for tries in itertools.count(1):
        in_place = InPlace(options.max_host_bytes) if request.restores else None
        named, plans, leaves, values = dict[str, ItemPlan](), [], [], []
        try:
            with agreement:
                with _watched(opening(), options, step) as (checkpoint, operation):
                    context = new_context()
                    named = _match(checkpoint, request, context)
                    plans = [*named.values()]
                    with agreement.planned(checkpoint, plans) as reading:
                        leaves = _read(
                            checkpoint, plans, request, context, operation, reading, in_place
                        )
                agreement.read(request.restores)
                if in_place is not None:
                    values = in_place.finish(plans, leaves)
                else:
                    values = [plan.make(made) for plan, made in zip(plans, leaves, strict=True)]
            return Loaded(checkpoint, dict(zip(named, values, strict=True)), plans)
        except BaseException as error:
            if in_place is not None:
                in_place.give_up(error)
            named, plans, leaves, values = {}, [], [], []  # the traceback would keep them alive
            if agreement.several or not isinstance(error, Replaced) or tries == MOST_TRIES:
                raise
    raise AssertionError("the last try returns or raises")


_ONCE = "Restore it under one of the names; what is saved under another is loaded with load(path, item=...)"


def _match(checkpoint: Checkpoint, request: Request, context: StoreContext) -> dict[str, ItemPlan]:
    """The plan of each wanted item, by its name in the result; changes no object. See ``plan_item`` for what it reads."""
    chosen = _chosen(checkpoint, request)
    if request.restores:
        introduce({name: target for name, (_, target) in chosen.items()})
    named = {
        name: plan_item(checkpoint, saved, target, request, context)
        for name, (saved, target) in chosen.items()
    }
    plans = list(named.values())
    if request.restores:
        refuse_twice(request.target, [plan.live_objects for plan in plans], _ONCE)
    if request.rules.rename is not None or any(
        plan.match is not None and plan.match.mismatches for plan in plans
    ):
        _raise_mismatches(checkpoint, plans, request)
    saved = checkpoint.record.settings if isinstance(checkpoint, NativeCheckpoint) else {}
    if request.restores and any(getattr(jax.config, k, None) != v for k, v in saved.items()):
        constants.warn_of_settings(saved)
    if request.only is not None:
        _check_patterns(checkpoint, plans, request)
    return named


def _chosen(checkpoint: Checkpoint, request: Request) -> dict[str, tuple[SavedItem, Any]]:
    """For each item to load, by its name in the result: the saved item and its target."""
    target, targets = request.target, request.target
    if not request.restores:
        if request.item is not None:
            return {request.item: (find_item(checkpoint, request.item), target)}
        if checkpoint.single or target is NOT_SAVED:
            return {name: (saved, target) for name, saved in checkpoint.items.items()}
        if not isinstance(target, Mapping):
            raise TypeError(
                f"{checkpoint.path} holds the items {', '.join(checkpoint.items)}: like must be a dict of items, "
                "or name one with item="
            )
    return {name: (find_item(checkpoint, name), part) for name, part in targets.items()}


def _read(
    checkpoint: Checkpoint,
    plans: Sequence[ItemPlan],
    request: Request,
    context: StoreContext,
    operation: Operation,
    reading: Reading,
    in_place: InPlace | None,
) -> list[list[Any]]:
    """For each plan, the leaves of the result."""
    if operation.listener is not None:
        operation.total_bytes = sum(
            plan.item.specs[position].stored_bytes
            for plan in plans
            for result, position in enumerate(plan.positions)
            if position is not None and result in plan.targets
        )
    if in_place is not None:
        for plan in plans:
            in_place.begin(plan)
    leaves = [
        execute(checkpoint, plan, request, context, operation, reading, in_place) for plan in plans
    ]
    if checkpoint.shared:
        _share_between(plans, leaves, checkpoint.shared)
    return leaves


def execute(
    checkpoint: Checkpoint,
    plan: ItemPlan,
    request: Request,
    context: StoreContext,
    operation: Operation,
    reading: Reading,
    in_place: InPlace | None = None,
) -> list[Any]:
    """The leaves of the result: read from the checkpoint by ``reading``, or kept from the target. ``operation`` counts their
    bytes. ``in_place`` sets arrays on live objects while others are still being read; None for a load.
    """
    item = plan.item
    leaves = list(plan.kept)
    shared = _shared_results(plan) if item.shared else ()
    _read_texts(checkpoint, plan, leaves)
    wants = _wants(checkpoint, plan, request)
    # a large array takes seconds, and is counted at its end
    watch = None if operation.listener is None else functools.partial(_under_way, operation)
    given = ([*wants.values()], request.options, context, watch)
    # closed: an error of this loop that somebody keeps would keep threads, files and buffers
    reads = contextlib.nullcontext(())
    if wants:  # else the database is not opened
        reads = contextlib.closing(reading(checkpoint, item, *given))
    with reads as arrays:
        for result, (want, parts) in zip(wants, arrays, strict=True):
            if request.abandoned is not None:
                request.refuse_if_abandoned()
            spec = item.specs[want.leaf]
            size_bytes = sum([part.nbytes for part in parts.values()])
            if want.dtype is not None:  # the parts are cast already: count what was stored
                size_bytes = sum(map(region_size, want.regions)) * spec.numpy_dtype.itemsize
            operation.done_bytes += size_bytes
            if watch is not None:
                watch(0)
            leaves[result] = None  # drop the reference to the old array before the new one is made
            path, cast = item.paths[want.leaf], request.rules.cast
            value = value_of(spec, plan.targets[result], parts, path, cast=cast)
            leaves[result] = value
            if in_place is not None:
                in_place.take(plan, result, value, size_bytes)
    if in_place is not None:
        in_place.end_of_item()
    for first, *others in shared:
        for other in others:
            leaves[other] = leaves[first]
    return leaves


def _under_way(operation: Operation, more: int) -> None:
    operation.tell_progress(operation.done_bytes + more)


def _shared_results(plan: ItemPlan) -> list[list[int]]:
    """Groups of positions in the result that become one object, as they were when they were saved. With a target they do so
    where the target, too, holds one object there. Arrays of jax cannot be changed, and are left alone.
    """
    places = [[(plan, position) for position in group] for group in plan.item.shared]
    return [[result for _, result in one] for one in _become_one(places)]


def _share_between(
    plans: Sequence[ItemPlan],
    leaves: Sequence[list[Any]],
    groups: Iterable[Iterable[tuple[str, int]]],
) -> None:
    """Makes one object of those leaves of several items that were one, as ``_shared_results`` does within an item. ``groups``
    is ``Checkpoint.shared``.
    """
    by_name = {plan.item.name: plan for plan in plans}
    read = {plan.item.name: one for plan, one in zip(plans, leaves, strict=True)}
    places = [[(by_name[item], n) for item, n in group if item in by_name] for group in groups]
    for (first, result), *others in _become_one(places):
        for plan, other in others:
            read[plan.item.name][other] = read[first.item.name][result]


def _become_one(
    groups: Iterable[Iterable[tuple[ItemPlan, int]]],
) -> list[list[tuple[ItemPlan, int]]]:
    """Groups of plan and position in its result, from such of plan and saved position."""
    at: dict[str, dict[int, int]] = {}
    found: list[list[tuple[ItemPlan, int]]] = []
    for group in groups:
        by_target: dict[int, list[tuple[ItemPlan, int]]] = {}
        for plan, position in group:
            if plan.item.name not in at:
                pairs = enumerate(plan.positions)
                at[plan.item.name] = {saved: n for n, saved in pairs if saved is not None}
            result = at[plan.item.name].get(position)
            if result is None:
                continue
            target = plan.targets.get(result)
            if target is None or target.spec.kind in CHANGEABLE_KINDS:
                held = plan.kept[result]
                one = None if isinstance(held, SavedLeaf) else held  # which is what was saved
                by_target.setdefault(id(one), []).append((plan, result))
        found += by_target.values()
    return found


def _wants(checkpoint: Checkpoint, plan: ItemPlan, request: Request) -> dict[int, Want]:
    """The array leaves to read, by position in the result."""
    item = plan.item
    # map files only with as_numpy=True: a jax array must not share memory with a file
    may_map = request.as_numpy and checkpoint.location.local and is_local_disk(checkpoint.path)
    wants: dict[int, Want] = {}
    for result, position in enumerate(plan.positions):
        target = plan.targets.get(result)
        if position is None or target is None or item.specs[position].kind in TEXT_KINDS:
            continue
        spec = item.specs[position]
        mapped = may_map and spec.kind in ("jax", "numpy") and spec.detail != ">"
        dtype = None if spec.dtype == target.spec.dtype else dtype_while_read(spec, target.spec)
        mapped = mapped and dtype is None
        wants[result] = Want(position, target.regions, mapped, target.sharding, dtype)
    return wants


def _read_texts(checkpoint: Checkpoint, plan: ItemPlan, leaves: list[Any]) -> None:
    """Reads the leaves that are stored as text: strings, big integers, random generators."""
    item = plan.item
    text: Callable[[int], str] | None = None
    for result, position in enumerate(plan.positions):
        if position is not None and item.specs[position].kind in TEXT_KINDS:
            text = text or checkpoint.texts(item)
            leaves[result] = _text_value(item, position, item.specs[position], text)


_MOST_STATE_DEPTH = 100
"""The states of random generators, which are stored as JSON in a text, are nested less deep."""
_NO_SUCH_TEXT = (AttributeError, ValueError, TypeError, KeyError, OverflowError)


def _text_value(item: SavedItem, position: int, spec: LeafSpec, text: Callable[[int], str]) -> Any:
    stored = text(position)
    try:
        return from_text(stored, spec)
    except RecursionError as error:
        refuse_deep(
            stored.encode(errors="surrogatepass"),
            orbax_write.STRINGS_FILE,
            error,
            _MOST_STATE_DEPTH,
        )
        raise
    except _NO_SUCH_TEXT as error:
        if isinstance(error, CheckpointError):
            raise
        where = format_path(item.paths[position])
        raise CheckpointCorrupt(
            f"leaf {where}: its text cannot be read: {error}", leaf=where
        ) from error


@contextlib.contextmanager
def _watched(
    checkpoint: Checkpoint, options: Options, step: int | None
) -> Generator[tuple[Checkpoint, Operation]]:
    """While the block runs, locks the checkpoint against deletion; sends the events of the restore. The block adds the bytes
    that it reads to the operation. Raises CheckpointNotFound if the checkpoint was deleted or replaced after it was opened.
    """
    reporting = options.report_secs, options.on_event
    operation = Operation("load", checkpoint.path, step, *reporting)
    operation.happened("restore_started")
    try:
        with operation.watched("reading"), checkpoint.held(), naming_checkpoint(checkpoint.path):
            yield checkpoint, operation
    except BaseException as error:
        operation.happened("restore_failed", operation.done_bytes, error)
        if isinstance(error, CheckpointCorrupt) and checkpoint.was_replaced():
            raise replaced(checkpoint.path) from error
        raise
    operation.happened("restored", operation.done_bytes)


def _check_patterns(checkpoint: Checkpoint, plans: Sequence[ItemPlan], request: Request) -> None:
    """Raises CheckpointNotFound if ``only=``, or one of its patterns, matches no leaf of any item."""
    trees = [(plan.item.name, [*plan.item.paths, *plan.paths]) for plan in plans]
    # what another item has is no misspelling: one list may serve calls that restore different items
    others = [(item.name, item.paths or [()]) for item in checkpoint.items.values()]
    idle = idle_patterns(request.only, [*trees, *others])
    if not idle and any(position is not None for plan in plans for position in plan.positions):
        return
    paths = [format_path(path) for plan in plans for path in plan.item.paths]
    unmatched = [request.only] if isinstance(request.only, str) or not idle else idle
    advice = "; ".join(filter(None, (advice_on_pattern(pattern, paths) for pattern in idle)))
    raise CheckpointNotFound(
        f"{checkpoint.path}: only={', '.join(map(repr, unmatched))} matches no leaf; leaves are {some(paths)}"
        + (f". {advice}" if advice else "")
    )


def _raise_mismatches(checkpoint: Checkpoint, plans: Sequence[ItemPlan], request: Request) -> None:
    """Raises StructureMismatch with all differences and the arguments that would allow them."""
    mismatches = [entry for plan in plans if plan.match for entry in plan.match.mismatches]
    idle = idle_renames(checkpoint, request.rules, plans)
    if mismatches:
        advice = advice_for(
            mismatches, request.rules, idle, proposed(mismatches, plans, request.rules)
        )
        raise StructureMismatch(mismatches, where=checkpoint.path, advice=advice)
    refuse_idle(checkpoint, idle)


_ON_DEVICES = frozenset({"jax", "key"})


def report_of(plans: Sequence[ItemPlan]) -> RestoreReport:
    """The report, from the executed plans; each path begins with the name of its item."""
    matched = [(plan, plan.match) for plan in plans if plan.match is not None]
    return RestoreReport(
        loaded=tuple(path for plan in plans for path in _loaded(plan)),
        missing=tuple(_prefix(plan) + path for plan, match in matched for path in match.missing),
        unexpected=tuple(
            _prefix(plan) + path for plan, match in matched for path in match.unexpected
        ),
        cast=tuple(_prefix(plan) + path for plan, match in matched for path in match.cast),
        resharded=tuple(path for plan in plans for path in _resharded(plan)),
    )


def _prefix(plan: ItemPlan) -> str:
    return f"{plan.item.name}/" if plan.item.name else ""


def _loaded(plan: ItemPlan) -> Iterator[str]:
    prefix, paths = _prefix(plan), plan.item.paths
    return (prefix + format_path(paths[at]) for at in plan.positions if at is not None)


def _resharded(plan: ItemPlan) -> Iterator[str]:
    """Paths of the leaves whose sharding differs from the one that they were saved with."""
    item = plan.item
    # by id of saved and of target sharding: many leaves share both, so they are compared once
    moved: dict[tuple[int, int], bool] = {}
    for result, position in enumerate(plan.positions):
        target = plan.targets.get(result)
        if position is None or target is None:
            continue
        if not {target.spec.kind, item.specs[position].kind} <= _ON_DEVICES:
            continue
        described = item.shardings[position]
        if not described and isinstance(item, OrbaxItem):
            continue  # Orbax recorded no sharding
        pair = (id(described), id(target.sharding))
        if pair not in moved:
            moved[pair] = is_resharded(described, target.sharding)
        if moved[pair]:
            yield _prefix(plan) + format_path(item.paths[position])
