"""The types in which a load tells readers what to read, and in which they answer."""

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
        regions: the regions of the stored array to read.
        mapped: whether the reader may memory-map the file instead of reading it.
        sharding: sharding of the loaded array, which ``Broadcast`` needs; None for a host array or
            an uncommitted one.
        dtype: the reader may cast to this dtype block by block, so that memory never holds the
            array in both dtypes; None: no cast. A reader that does not cast returns the stored
            dtype.
    """

    leaf: int
    regions: list[Region]
    mapped: bool = False
    sharding: Any = None
    dtype: np.dtype[Any] | None = None


Reading = Callable[..., Iterator[tuple[Want, dict[Region, Array]]]]
"""A function that reads leaves, in order; arguments as for ``pipeline.read_leaves``."""


Reads = list[tuple[Want, dict[Region, Array], list[Callable[[], None]]]]
"""For each leaf: its buffers by region, and jobs that fill buffers, also those of other leaves."""
