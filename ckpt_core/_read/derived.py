"""Reads leaves that rules or an index make of saved arrays."""

from __future__ import annotations

from ckpt_core._layout.regions import Region
from ckpt_core._read.extents import ExtentReader
from ckpt_core._read.orbax import OrbaxReader
from ckpt_core._read.wants import Array, Job, Reads, Share, Want, buffers
from ckpt_core._saved import DerivedItem


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
                    shares.setdefault(part.leaf, []).append((part.region, view))
        for leaf, of_leaf in shares.items():
            jobs += self._reader.jobs(leaf, of_leaf)
        read, more = self._reader.plan([*renamed.values()])
        found |= zip(renamed, (parts for _, parts in read), strict=True)
        return [(want, found[number]) for number, want in enumerate(batch)], jobs + more
