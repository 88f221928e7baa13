"""Regions of arrays: one ``(start, stop)`` per dimension."""

from __future__ import annotations

import functools
import math
from typing import Any

Region = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


def to_region(index: Any, shape: Shape) -> Region:
    """The region of a tuple of slices, such as the ``index`` of a ``jax.Array`` shard."""
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def region_shape(region: Region) -> Shape:
    """The shape of a region: ``((2, 5), (0, 4))`` gives ``(3, 4)``."""
    return tuple(stop - start for start, stop in region)


@functools.lru_cache(4096)
def region_size(region: Region) -> int:
    """The number of elements in a region."""
    return math.prod(region_shape(region))


def region_slices(region: Region) -> tuple[slice, ...]:
    """The region as a tuple of slices."""
    return tuple(slice(start, stop) for start, stop in region)


def within(inner: Region, outer: Region) -> tuple[slice, ...]:
    """The region ``inner`` as slices relative to the first element of ``outer``."""
    pairs = zip(inner, outer, strict=True)
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)


@functools.lru_cache(4096)
def whole(shape: Shape) -> Region:
    """The region of a whole array."""
    return tuple((0, size) for size in shape)
