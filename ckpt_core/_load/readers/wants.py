"""What is to be read of an item, and how reading is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._layout.regions import Region

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
"""Reads wanted leaves, in order; arguments as for ``pipeline.read_leaves``."""


Reads = list[tuple[Want, dict[Region, Array], list[Callable[[], None]]]]
"""Per leaf: the buffers by region, and the jobs that fill them (any job may serve several leaves)."""
