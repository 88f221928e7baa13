"""What is to be read: plain values that the planner and the readers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._load.opened import SavedItem
from ckpt_core._load.place import Target
from ckpt_core._match import Match
from ckpt_core._plan import Region
from ckpt_core._tree import Path

Array = np.ndarray[Any, Any]


class Want(NamedTuple):
    """One leaf to read.

    Attributes:
        leaf: its position in the item.
        regions: of the stored array.
        mapped: whether the file itself may be its memory.
        sharding: where it comes to lie, which a load that broadcasts must know; None on the host
            and where it is not bound to devices.
        dtype: into which it may be converted block by block as it is read, so that it is never there
            twice; None to leave it as it is stored. A reader may leave it, too.
    """

    leaf: int
    regions: list[Region]
    mapped: bool = False
    sharding: Any = None
    dtype: np.dtype[Any] | None = None


Reading = Callable[..., Iterator[tuple[Want, dict[Region, Array]]]]
"""Reads wanted leaves, in order; arguments as for ``read.read_leaves``."""


Reads = list[tuple[Want, dict[Region, Array], list[Callable[[], None]]]]
"""Per leaf: the buffers by region, and the jobs that fill them (any job may serve several leaves)."""


class _NoState:
    """Stands for a state that was not passed, as None is one; says so in ``help``."""

    def __repr__(self) -> str:
        return "(not passed)"


NO_STATE = _NoState()
NOT_SAVED = object()
"""Stands for a target that was not given, as None is a target."""


@dataclass
class Planned:
    """One item, matched and ready to be read.

    Attributes:
        item: as saved, with specs.
        positions: for every leaf of the result the position in the item, or None to keep it.
        kept: the values of leaves that are not read, by position in the result.
        targets: what each leaf that is read becomes, by position in the result.
        finish: from the leaves of the result to the item's value.
        match: for the report; None without a target.
        hold: of an item with live objects: gives what sets them back to what they hold now, or None
            where that cannot be. Changes nothing.
        begin: of an item that is set before the others are read: sets it; ``hold`` comes first.
        held_now: the leaves that its live objects hold now, where ``set_leaves`` is given.
        set_leaves: of a live object that can be set in parts: sets values, by path, and gives those
            that it holds now; None elsewhere.
        paths: in the result, where ``set_leaves`` is given.
        live: objects that are set in place, each with whether a tree may hold it twice.
    """

    item: SavedItem
    positions: Sequence[int | None]
    kept: list[Any]
    targets: dict[int, Target]
    finish: Callable[[list[Any]], Any]
    match: Match | None = None
    hold: Callable[[], Callable[[], object] | None] | None = None
    begin: Callable[[], None] | None = None
    held_now: Callable[[], Sequence[Any]] = tuple
    set_leaves: Callable[[Mapping[Path, Any]], list[Any]] | None = None
    paths: Sequence[Path] = ()
    live: Sequence[tuple[Any, bool]] = ()
