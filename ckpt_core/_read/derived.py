"""Reads leaves that rules make of the tensors of a file."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence

from ckpt_core._layout.regions import Region, region_shape
from ckpt_core._options import MIB
from ckpt_core._read.extents import ExtentReader
from ckpt_core._read.wants import Array, Job, Reads, Share, Want, aligned, buffers, take
from ckpt_core._saved import DerivedItem, Recipe

_ROWS_BYTES = 32 * MIB
"""So many rows are in memory at a time, and one if it is larger."""


class DerivedReader:
    """Reads an item of rules by ``reader``, which reads tensors: regions of one that is only renamed, else rows of whole ones."""

    def __init__(self, reader: ExtentReader, item: DerivedItem) -> None:
        self._reader = reader
        self._item = item
        specs = item.base.specs
        rows = (row for recipe in item.recipes for _, row in recipe.rows)
        most_bytes = max((sum(specs[leaf].stored_bytes for leaf in row) for row in rows), default=0)
        self._rooms = threading.Semaphore(max(1, _ROWS_BYTES // (2 * most_bytes + 1)))

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        item, found, jobs = self._item, dict[int, dict[Region, Array]](), list[Job]()
        renamed: dict[int, Want] = {}  # by number in the batch
        for number, want in enumerate(batch):
            recipe = item.recipes[want.leaf]
            ((_, (tensor, *_)), *_) = recipe.rows
            if recipe == Recipe.of(tensor, item.base.specs[tensor].shape):
                renamed[number] = want._replace(leaf=tensor)
                continue
            found[number] = buffers(want, item.specs[want.leaf].numpy_dtype)
            jobs += self._rows(recipe, found[number])
        read, more = self._reader.plan([*renamed.values()])
        found |= zip(renamed, (parts for _, parts in read), strict=True)
        return [(want, found[number]) for number, want in enumerate(batch)], jobs + more

    def _rows(self, recipe: Recipe, parts: dict[Region, Array]) -> Iterator[Job]:
        """A job for each row of the stacked dimensions of which some region holds a part."""
        for index, row in recipe.rows:
            takers: list[Share] = []
            for region, buffer in parts.items():
                leading = list(zip(index, region, strict=False))
                if buffer.size and all(start <= n < stop for n, (start, stop) in leading):
                    place = tuple(n - start for n, (start, _) in leading)
                    takers.append((region[len(index) :], buffer[(*place, ...)]))
            if takers:
                yield functools.partial(self._make_row, recipe, row, takers)

    def _make_row(self, recipe: Recipe, row: Sequence[int], takers: list[Share]) -> None:
        """Job: reads the tensors of a row, and gives each region its part."""
        tensors: list[Array] = []
        with self._rooms:
            for leaf in row:
                spec = self._item.base.specs[leaf]
                region = recipe.region(spec.shape)
                tensors.append(aligned(region_shape(region), spec.numpy_dtype))
                for job in self._reader.jobs(leaf, [(region, tensors[-1])]):
                    job()
            take(recipe.joined(tensors), takers)
            tensors.clear()
