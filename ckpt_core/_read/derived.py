"""Reads leaves that rules make of the tensors of a file: straight into the leaves, region by region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ckpt_core._format.rules import View
from ckpt_core._layout.regions import Region, region_shape, within
from ckpt_core._read.extents import ExtentReader
from ckpt_core._read.wants import Array, Reads, Share, Want, buffers
from ckpt_core._saved import DerivedItem, Recipe

_Jobs = list[Callable[[], None]]


class _Joined(NamedTuple):
    """A part of a leaf, seen as a part of the tensor that its sources are joined to."""

    region: Region  # of the joined tensor
    view: Array  # memory for it, in the shape of the region


class DerivedReader:
    """Reads an item of rules; closes ``reader``, which reads the tensors. A transposed or stacked leaf is a view of memory in
    which the tensors lie as in the file. So is a reshaped one, unless a device holds only some of the inner dimensions that one
    was cut into: then a tensor's part is read with all of these, and copied.
    """

    def __init__(self, reader: ExtentReader, item: DerivedItem) -> None:
        self._reader = reader
        self._item = item

    def close(self) -> None:
        self._reader.close()

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        planned: list[tuple[Want, dict[Region, Array]]] = []
        jobs: _Jobs = []
        for want in batch:
            parts = buffers(want, self._item.specs[want.leaf].numpy_dtype)
            planned.append((want, parts))
            jobs += self._jobs(want.leaf, parts)
        return planned, jobs

    def _jobs(self, leaf: int, parts: dict[Region, Array]) -> _Jobs:
        """Jobs for all regions of a leaf; a tensor of which several need parts is read once."""
        recipe = self._item.recipes[leaf]
        direct: dict[int, list[Share]] = {}
        jobs: _Jobs = []
        for region, buffer in parts.items():
            if not buffer.size:
                continue
            for index, part, view in _unstacked(recipe, region, buffer):
                back = recipe.view.back
                reshaped = tuple(part[axis] for axis in back), view.transpose(back)
                joined = _joined(recipe.view, *reshaped)
                if joined is None:
                    jobs.append(functools.partial(self._read_and_copy, recipe, index, *reshaped))
                    continue
                for source, share in self._shares(recipe, index, joined):
                    direct.setdefault(source, []).append(share)
        for source, shares_of in direct.items():
            jobs += self._reader.jobs(source, shares_of)
        return jobs

    def _shares(
        self, recipe: Recipe, index: tuple[int, ...], joined: _Joined
    ) -> Iterator[tuple[int, Share]]:
        """For each tensor that has some of a joined part: its position, its region, and where that goes."""
        axis = recipe.axis
        first, last = joined.region[axis] if joined.region else (0, 1)
        for source in recipe.sources:
            if source.row != index:
                continue
            shape = self._item.base.specs[source.leaf].shape
            if not shape:
                yield source.leaf, ((), joined.view)
                continue
            start, stop = max(first, source.start), min(last, source.start + shape[axis])
            if start >= stop:
                continue
            region = list(joined.region)
            region[axis] = (start - source.start, stop - source.start)
            place = (*[slice(None)] * axis, slice(start - first, stop - first))
            yield source.leaf, (tuple(region), joined.view[place])

    def _read_and_copy(
        self, recipe: Recipe, index: tuple[int, ...], region: Region, view: Array
    ) -> None:
        """Job: reads the least that holds a part of a reshaped tensor, and copies the part."""
        hull = recipe.view.hull(region)
        merged = recipe.view.merged(hull)
        memory: Array = np.empty(region_shape(merged), view.dtype)
        for source, share in self._shares(recipe, index, _Joined(merged, memory)):
            for job in self._reader.jobs(source, [share]):
                job()
        view[...] = memory.reshape(region_shape(hull))[(*within(region, hull), ...)]


def _unstacked(
    recipe: Recipe, region: Region, buffer: Array
) -> Iterator[tuple[tuple[int, ...], Region, Array]]:
    """For each index of the stacked dimensions in a region: the rest of the region, and its view."""
    count = len(recipe.sources[0].row)
    rest = region[count:]
    for index in dict.fromkeys(source.row for source in recipe.sources):
        pairs = list(zip(index, region[:count], strict=True))
        if all(start <= number < stop for number, (start, stop) in pairs):
            place = tuple(number - start for number, (start, _) in pairs)
            yield index, rest, buffer[(*place, ...)]


def _joined(view: View, region: Region, memory: Array) -> _Joined | None:
    """A part of the reshaped tensor, as a part of the joined one; None if no view of the memory is that."""
    if view.hull(region) != region:
        return None
    merged = view.merged(region)
    direct = memory.reshape(region_shape(merged))
    return _Joined(merged, direct) if np.may_share_memory(direct, memory) else None
