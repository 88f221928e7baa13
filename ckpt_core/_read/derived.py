"""Reads leaves that rules or an index make of saved arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from ckpt_core._format.recipes import Part
from ckpt_core._layout.chunks import BLOCK_BYTES
from ckpt_core._layout.regions import Region, region_shape, whole
from ckpt_core._options import MIB
from ckpt_core._read.extents import ExtentReader
from ckpt_core._read.orbax import OrbaxReader
from ckpt_core._read.wants import Array, Job, Reads, Share, Want, aligned, buffers, take
from ckpt_core._saved import DerivedItem

_BETWEEN_BYTES = 32 * MIB
"""So much is in memory at a time of an array that is read with steps, or one row if it is larger."""


class DerivedReader:
    """Reads an item of rules by ``reader``, which reads arrays as they are stored, each part once for all leaves of a batch."""

    def __init__(self, reader: ExtentReader | OrbaxReader, item: DerivedItem) -> None:
        self._reader = reader
        self._item = item

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        item, found, jobs = self._item, dict[int, dict[Region, Array]](), list[Job]()
        renamed, shares = dict[int, Want](), dict[int, list[Share]]()  # by number; by array
        for number, want in enumerate(batch):
            if (stored := item.as_stored(want.leaf)) is not None:
                renamed[number] = want._replace(leaf=stored)
                continue
            found[number] = buffers(want, item.specs[want.leaf].numpy_dtype)
            for region, buffer in found[number].items():
                for part, view in item.recipes[want.leaf].takes(region, buffer):
                    if part.has_steps:
                        jobs += self._with_steps(part, view)
                    else:
                        shares.setdefault(part.leaf, []).append((part.region, view))
        for leaf, of_leaf in shares.items():
            jobs += self._reader.jobs(leaf, of_leaf)
        read, more = self._reader.plan([*renamed.values()])
        found |= zip(renamed, (parts for _, parts in read), strict=True)
        return [(want, found[number]) for number, want in enumerate(batch)], jobs + more

    def _with_steps(self, part: Part, view: Array) -> Iterator[Job]:
        """Jobs that read what lies between, too, and leave it out; but not between rows that are further apart than a block."""
        spec, run = self._item.base.specs[part.leaf], part.runs[0]
        itemsize = run.step * spec.numpy_dtype.itemsize
        apart = itemsize * math.prod(spec.stored_shape[1:]) > BLOCK_BYTES
        rows = _BETWEEN_BYTES // max(1, itemsize * math.prod(region_shape(part.region[1:])))
        rows = 1 if apart else max(1, rows)
        for first in range(0, len(run), rows):
            some = part._replace(runs=(run[first : first + rows], *part.runs[1:]))
            yield functools.partial(self._fill, some, view[first : first + rows])

    def _fill(self, part: Part, view: Array) -> None:
        """Job: reads a region, and copies each of its elements that a step comes to."""
        values = aligned(region_shape(part.region), self._item.base.specs[part.leaf].numpy_dtype)
        for job in self._reader.jobs(part.leaf, [(part.region, values)]):
            job()
        take(
            values[tuple(slice(None, None, run.step) for run in part.runs)],
            [(whole(view.shape), view)],
        )
