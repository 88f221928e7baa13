"""Reads leaves that rules make of the tensors of a file: straight into the leaves, region by region."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._layout.regions import Region, region_shape, region_slices
from ckpt_core._load.checkpoint import DerivedItem, Recipe
from ckpt_core._load.readers.buffers import aligned
from ckpt_core._load.readers.extents import ExtentReader
from ckpt_core._load.readers.filling import Share
from ckpt_core._load.readers.wants import Array, Reads, Want
from ckpt_core._tree import format_path

_Jobs = list[Callable[[], None]]


class _Joined(NamedTuple):
    """A part of a leaf, seen as a part of the tensor that its sources are joined to.

    Attributes:
        region: the region of the joined tensor; may be larger than what is wanted of it.
        view: memory for it, a view of the leaf's buffer if possible.
        finish: copies what is wanted into the buffer, if ``view`` is memory of its own.
    """

    region: Region
    view: Array
    finish: Callable[[], None] | None


class DerivedReader:
    """Reads an item of rules.

    A transposed or stacked leaf is a view of memory in which the tensors lie as in the file, and so is a
    reshaped one unless a device holds only some of the inner dimensions that one was cut into: then that
    region is held once more while it is read.

    Args:
        reader: reads the tensors; closed with this reader.
        item: what to make of them.
    """

    def __init__(self, reader: ExtentReader, item: DerivedItem) -> None:
        self._reader = reader
        self._item = item

    def __enter__(self) -> DerivedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__(*_)

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        planned: Reads = []
        for want in batch:
            dtype = want.dtype or self._item.specs[want.leaf].numpy_dtype
            try:
                parts = {region: aligned(region_shape(region), dtype) for region in want.regions}
            except (MemoryError, ValueError) as error:
                where = format_path(self._item.paths[want.leaf])
                raise CheckpointCorrupt(f"leaf {where}: no memory for it", leaf=where) from error
            planned.append((want, parts, self._jobs(want.leaf, parts)))
        return planned

    def _jobs(self, leaf: int, parts: dict[Region, Array]) -> _Jobs:
        """Jobs for all regions of a leaf; a tensor of which several need parts is read once."""
        recipe = self._item.recipes[leaf]
        direct: dict[int, list[Share]] = {}
        jobs: _Jobs = []
        for region, buffer in parts.items():
            if not buffer.size:
                continue
            for index, part, view in _unstacked(recipe, region, buffer):
                joined = _joined(recipe, part, view)
                shares: dict[int, list[Share]] = direct if joined.finish is None else {}
                for source, share in self._shares(recipe, index, joined):
                    shares.setdefault(source, []).append(share)
                if joined.finish is not None:
                    jobs.append(functools.partial(self._read_and_finish, shares, joined.finish))
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

    def _read_and_finish(self, shares: dict[int, list[Share]], finish: Callable[[], None]) -> None:
        """Job: reads all of a region into memory of its own, and copies it."""
        for source, shares_of in shares.items():
            for job in self._reader.jobs(source, shares_of):
                job()
        finish()


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


def _joined(recipe: Recipe, region: Region, view: Array) -> _Joined:
    """A part of a result, as the part of the joined tensor that it is made of."""
    back = sorted(range(len(recipe.transpose)), key=recipe.transpose.__getitem__)
    view = view.transpose(back)
    region = tuple(region[axis] for axis in back)
    merged: list[tuple[int, int]] = []
    hull: list[tuple[int, int]] = []
    for group in recipe.groups:
        inner = [(0, recipe.reshaped[axis]) for axis in group[1:]]
        size = math.prod(stop for _, stop in inner)
        start, stop = region[group[0]]
        merged.append((start * size, stop * size))
        hull += [region[group[0]], *inner]
    shape = region_shape(tuple(merged))
    if tuple(hull) == region:
        direct = view.reshape(shape)
        if np.may_share_memory(direct, view):
            return _Joined(tuple(merged), direct, None)
    memory: Array = np.empty(shape, view.dtype)
    whole = memory.reshape(region_shape(tuple(hull)))
    offsets = [start for start, _ in hull]
    wanted = tuple(
        (start - offset, stop - offset)
        for (start, stop), offset in zip(region, offsets, strict=True)
    )
    return _Joined(tuple(merged), memory, functools.partial(_copy, view, whole, wanted))


def _copy(target: Array, source: Array, part: Region) -> None:
    target[...] = source[(*region_slices(part), ...)]
