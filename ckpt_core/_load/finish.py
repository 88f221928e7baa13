"""Reading what was planned: leaves from the disk, the others kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_core._directory import is_local_disk
from ckpt_core._errors import (
    CheckpointCorrupt,
    CheckpointError,
)
from ckpt_core._format import orbax
from ckpt_core._leaves import TEXT_KINDS, LeafSpec, from_text
from ckpt_core._load import place, read
from ckpt_core._load.in_place import InPlace
from ckpt_core._load.opened import Opened, SavedItem
from ckpt_core._load.request import Request, Tally
from ckpt_core._load.wants import Planned, Reading, Want
from ckpt_core._plan import region_size
from ckpt_core._tree import format_path

_ON_DEVICES = frozenset({"jax", "key"})


def read_planned(
    opened: Opened,
    planned: Planned,
    request: Request,
    context: Any,
    tally: Tally,
    reading: Reading = read.read_leaves,
    in_place: InPlace | None = None,
) -> list[Any]:
    """The leaves of the result: those that were saved read and placed, the others kept.

    With ``in_place`` arrays are set on live objects as they come, too.
    """
    item = planned.item
    leaves = list(planned.kept)
    text = _texts(opened, item)
    # arrays of jax never alias a file: only what stays numpy, and was asked for as such
    may_map = request.as_numpy and opened.location.local and is_local_disk(opened.path)
    wants: list[Want] = []
    results: list[int] = []
    for result, position in enumerate(planned.positions):
        if position is None:
            continue
        spec = item.specs[position]
        if spec.kind in TEXT_KINDS:
            leaves[result] = _text_value(item, position, spec, text)
        elif result in planned.targets:
            target = planned.targets[result]
            mapped = may_map and spec.kind in ("jax", "numpy") and spec.detail != ">"
            alike = spec.dtype == target.spec.dtype
            dtype = None if alike else place.converted_as_read(spec, target.spec)
            wants.append(Want(position, target.regions, mapped, target.sharding, dtype))
            results.append(result)
    if wants:
        for result, (want, parts) in zip(
            results, reading(opened, item, wants, request.options, context), strict=True
        ):
            request.refuse_if_abandoned()
            target = planned.targets[result]
            leaf = want.leaf
            size_bytes = sum([part.nbytes for part in parts.values()])
            if want.dtype is not None:
                elements = sum(map(region_size, want.regions))
                size_bytes = elements * item.specs[leaf].numpy_dtype.itemsize
            tally.count(size_bytes)
            leaves[result] = None  # the old array, which the object may give up
            value = place.value_of(item.specs[leaf], target, parts, item.paths[leaf])
            leaves[result] = value
            if in_place is not None:
                in_place.take(planned, result, value, size_bytes)
    if in_place is not None:
        in_place.end_of_item()
    _count(planned, tally, item)
    return leaves


def _texts(opened: Opened, item: SavedItem) -> Callable[[int], str]:
    """Gives the text of a leaf by its position."""
    name = item.file(orbax.STRINGS_FILE)
    document: list[Any] = []

    def text(leaf: int) -> str:
        if not document:
            where = format_path(item.paths[leaf])
            document.append(orbax.parse_strings(opened.read_file(name, leaf=where), name))
        return orbax.read_string(document[0], item.name_of(leaf))

    return text


_NO_SUCH_TEXT = (ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError)


def _text_value(item: SavedItem, position: int, spec: LeafSpec, text: Callable[[int], str]) -> Any:
    try:
        return from_text(text(position), spec)
    except _NO_SUCH_TEXT as error:
        if isinstance(error, CheckpointError):
            raise
        where = format_path(item.paths[position])
        raise CheckpointCorrupt(
            f"leaf {where}: its text cannot be read: {error}", leaf=where
        ) from error


def _count(planned: Planned, tally: Tally, item: SavedItem) -> None:
    prefix = f"{item.name}/" if item.name else ""
    moved: dict[tuple[int, int], bool] = {}  # of what was described and what is: many are the same
    for result, position in enumerate(planned.positions):
        if position is None:
            continue
        path = prefix + format_path(item.paths[position])
        tally.loaded.append(path)
        target = planned.targets.get(result)
        described = item.shardings[position]
        if target is None or not {target.spec.kind, item.specs[position].kind} <= _ON_DEVICES:
            continue
        if not described and item.orbax is not None:
            continue  # nobody knows where it lay
        sharding = target.sharding
        pair = (id(described), id(sharding))
        if pair not in moved:
            moved[pair] = place.is_resharded(described, sharding)
        if moved[pair]:
            tally.resharded.append(path)
    if planned.match is not None:
        tally.missing += [prefix + path for path in planned.match.missing]
        tally.unexpected += [prefix + path for path in planned.match.unexpected]
        tally.cast += [prefix + path for path in planned.match.cast]
