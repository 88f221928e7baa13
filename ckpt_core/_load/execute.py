"""Executes the plan of one item: reads and assembles saved leaves, keeps the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckpt_core._directory import is_local_disk
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
)
from ckpt_core._format import orbax_write
from ckpt_core._format.json_text import refuse_deep
from ckpt_core._layout.chunks import keyed_parts
from ckpt_core._layout.regions import region_size
from ckpt_core._load.assemble import value_of
from ckpt_core._load.checkpoint import Checkpoint, NativeItem, SavedItem
from ckpt_core._load.in_place import InPlace
from ckpt_core._load.planned import ItemPlan
from ckpt_core._load.readers.wants import Reading, Want
from ckpt_core._load.request import Request, Tally
from ckpt_core._load.targets import SavedLeaf, dtype_while_read
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import CHANGEABLE_KINDS, TEXT_KINDS, LeafSpec, from_text


def execute(
    checkpoint: Checkpoint,
    plan: ItemPlan,
    request: Request,
    context: Any,
    tally: Tally,
    reading: Reading,
    in_place: InPlace | None = None,
) -> list[Any]:
    """The leaves of the result: read from the checkpoint, or kept from the target.

    Args:
        checkpoint, plan, request: what to read.
        context: TensorStore context of the load.
        tally: counts the bytes that were read.
        reading: function that reads stored arrays, as ``pipeline.read_leaves`` does.
        in_place: sets arrays on live objects while others are still being read; None for a load.
    """
    item = plan.item
    leaves = list(plan.kept)
    shared = shared_results(plan) if item.shared else ()
    _read_texts(checkpoint, plan, leaves)
    wants = _wants(checkpoint, plan, request)
    # if no array is wanted, the database is not opened
    arrays = reading(checkpoint, item, [*wants.values()], request.options, context) if wants else ()
    for result, (want, parts) in zip(wants, arrays, strict=True):
        request.refuse_if_abandoned()
        spec = item.specs[want.leaf]
        size_bytes = sum([part.nbytes for part in parts.values()])
        if want.dtype is not None:  # the parts are cast already: count the bytes that were stored
            size_bytes = sum(map(region_size, want.regions)) * spec.numpy_dtype.itemsize
        tally.count(size_bytes)
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


def shared_results(plan: ItemPlan) -> list[list[int]]:
    """Groups of positions in the result that become one object, as they were when they were saved.

    With a target they do so where the target, too, holds one object there. Arrays of jax cannot be
    changed, and are left alone.
    """
    places = [[(plan, position) for position in group] for group in plan.item.shared]
    return [[result for _, result in one] for one in _become_one(places)]


def share_between(
    plans: Sequence[ItemPlan],
    leaves: Sequence[list[Any]],
    groups: Iterable[Iterable[tuple[str, int]]],
) -> None:
    """Makes one object of those leaves of several items that were one, as ``shared_results`` does within an item.

    Args:
        plans: plans of the items.
        leaves: for each plan, the leaves of the result.
        groups: ``Checkpoint.shared``.
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


def wanted_chunks(
    checkpoint: Checkpoint, plans: Iterable[ItemPlan], request: Request
) -> dict[str, set[str]]:
    """Item -> keys of the chunks that the plans read, of a checkpoint of ckpt."""
    needed: dict[str, set[str]] = {}
    for plan in plans:
        item, keys = plan.item, needed.setdefault(plan.item.name, set[str]())
        assert isinstance(item, NativeItem)
        for want in _wants(checkpoint, plan, request).values():
            name, chunk = item.name_of(want.leaf), item.chunks[want.leaf]
            prefix = f"{name}/" if name else ""
            keys |= {prefix + key for one in want.regions for key, _ in keyed_parts(one, chunk)}
    return needed


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
        wants[result] = Want(position, target.regions, mapped, target.sharding, dtype)
    return wants


def _read_texts(checkpoint: Checkpoint, plan: ItemPlan, leaves: list[Any]) -> None:
    """Reads the leaves that are stored as text: strings, big integers, random generators."""
    item = plan.item
    text = _texts(checkpoint, item)
    for result, position in enumerate(plan.positions):
        if position is not None and item.specs[position].kind in TEXT_KINDS:
            leaves[result] = _text_value(item, position, item.specs[position], text)


def _texts(checkpoint: Checkpoint, item: SavedItem) -> Callable[[int], str]:
    """A function from a leaf's position to its text; its first call reads the item's text file."""
    name = item.file(orbax_write.STRINGS_FILE)
    document: list[Any] = []

    def text(leaf: int) -> str:
        if not document:
            where = format_path(item.paths[leaf])
            document.append(orbax_write.parse_strings(checkpoint.read_file(name, leaf=where), name))
        return orbax_write.read_string(document[0], item.name_of(leaf))

    return text


_MOST_STATE_DEPTH = 100
"""The states of random generators, which are stored as JSON in a text, are nested less deep."""
_NO_SUCH_TEXT = (ValueError, TypeError, KeyError, OverflowError)


def _text_value(item: SavedItem, position: int, spec: LeafSpec, text: Callable[[int], str]) -> Any:
    told = text(position)
    try:
        return from_text(told, spec)
    except RecursionError as error:
        refuse_deep(
            told.encode(errors="surrogatepass"), orbax_write.STRINGS_FILE, error, _MOST_STATE_DEPTH
        )
        raise
    except _NO_SUCH_TEXT as error:
        if isinstance(error, CheckpointError):
            raise
        where = format_path(item.paths[position])
        raise CheckpointCorrupt(
            f"leaf {where}: its text cannot be read: {error}", leaf=where
        ) from error
