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
        begin: of an item that is set before the others are read: sets it, and gives what undoes that.
        set_leaves: of a live object that can be set in parts: sets values, by path, and gives those
            that it holds now; None elsewhere.
        paths: in the result, where ``set_leaves`` is given.
    """

    item: SavedItem
    positions: Sequence[int | None]
    kept: list[Any]
    targets: dict[int, Target]
    finish: Callable[[list[Any]], Any]
    match: Match | None = None
    begin: Callable[[], Callable[[], None]] | None = None
    set_leaves: Callable[[Mapping[Path, Any]], list[Any]] | None = None
    paths: Sequence[Path] = ()
