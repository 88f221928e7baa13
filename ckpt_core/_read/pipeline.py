"""Reads array data in parallel reader threads, which work one batch ahead of the caller."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ckpt_core._background import Workers
from ckpt_core._directory import is_local_disk
from ckpt_core._layout.regions import region_size
from ckpt_core._options import MIB, Options
from ckpt_core._platform import DIRECT
from ckpt_core._processes import coordination
from ckpt_core._read.extents import ExtentReader, StoredChunks, StoredTensors
from ckpt_core._read.orbax import OrbaxReader
from ckpt_core._read.wants import HeldReader, Job, Parts, Reads, Share, Want, buffers
from ckpt_core._saved import (
    Checkpoint,
    DerivedItem,
    ExtentItem,
    NativeCheckpoint,
    NativeItem,
    OrbaxItem,
    SavedItem,
)
from ckpt_core._storage import DataFiles, PastCache, StoreFiles, memory_bytes

_BATCH_BYTES = 128 * MIB
_BATCH_LEAVES = 2048
_MOST_THREADS = 8
_LEAST_BYTES_PAST_CACHE = 64 * MIB
_MEMORY_PER_LOAD = 16
"""An item of more than 1/16 of this process's memory does not fill the page cache."""


def read_leaves(
    checkpoint: Checkpoint,
    item: SavedItem,
    wants: Sequence[Want],
    options: Options,
    watch: Callable[[int], None] | None = None,
) -> Generator[tuple[Want, Parts]]:
    """The stored arrays of every wanted leaf, in order; each is verified before it is yielded. While the caller works on one
    batch (128 MiB or 2048 leaves at most), up to 8 threads read the next one; ``close`` ends them. ``watch`` is called with
    about the bytes that were read of the next batch.
    """
    past_cache = None
    if sum(item.specs[want.leaf].stored_bytes for want in wants) >= _LEAST_BYTES_PAST_CACHE:
        past_cache = _past_cache(item, wants, options)
    limit = min(_BATCH_BYTES, options.max_host_bytes)
    # past the cache nothing but the threads keeps the disk busy, and some of them wait for memory
    threads = _MOST_THREADS if past_cache else min(_MOST_THREADS, (os.cpu_count() or 1) + 2)
    with contextlib.ExitStack() as stack:
        reader = _reader(checkpoint, item, wants, options, past_cache, stack)
        workers: Workers | None = None
        running: list[tuple[Want, Parts]] = []
        started: list[Future[Any]] = []
        running_bytes = 0
        for batch, size_bytes in itertools.chain(_batches(item, wants, limit), [([], 0)]):
            planned, jobs = reader.plan(batch)
            # Nothing can be done beside a single job: to start and to wake a reader thread would take longer.
            if len(jobs) == 1 and len(batch) == len(wants):
                jobs.pop()()
            if jobs and workers is None:
                workers = stack.enter_context(Workers(threads, "ckpt-read"))
            submitted = [workers.submit(job) for job in jobs] if workers is not None else []
            # a job may fill buffers of several leaves, so all jobs must end before a leaf is yielded
            for done, job in enumerate(started, 1):
                job.result()
                if watch is not None:
                    watch(running_bytes * done // len(started))
            yield from running
            running, started, running_bytes = planned, submitted, size_bytes


def _past_cache(item: SavedItem, wants: Sequence[Want], options: Options) -> PastCache | None:
    """What reads local files without the page cache, or None. Several processes read through it: they may need the same bytes."""
    has_room = options.max_host_bytes >= _MOST_THREADS * PastCache.BYTES_OF_A_THREAD
    if not DIRECT or options.page_cache or not has_room:
        return None
    if options.page_cache is None:
        read = [want for want in wants if not want.mapped]
        size_bytes = sum(size for _, size in _batches(item, read, sys.maxsize))
        if size_bytes <= memory_bytes() // _MEMORY_PER_LOAD or coordination().client is not None:
            return None
    return PastCache()


def _reader(
    checkpoint: Checkpoint,
    item: SavedItem,
    wants: Sequence[Want],
    options: Options,
    past_cache: PastCache | None,
    stack: contextlib.ExitStack,
) -> DerivedReader | ExtentReader | HeldReader | OrbaxReader:
    """The reader of the item; ``stack`` closes what it opens."""
    if item.in_memory:
        return HeldReader(item.in_memory)
    if isinstance(item, DerivedItem):
        parts = (part for want in wants for _, row in item.recipes[want.leaf].rows for part in row)
        stored = [Want(leaf, []) for leaf in sorted({part.leaf for part in parts})]
        reader = _reader(checkpoint, item.base, stored, options, past_cache, stack)
        assert not isinstance(reader, DerivedReader | HeldReader)
        return DerivedReader(reader, item)
    if isinstance(item, OrbaxItem):
        return OrbaxReader(checkpoint, item)

    if isinstance(item, ExtentItem):
        location, sizes_bytes = checkpoint.location, item.sizes_bytes
    else:
        assert isinstance(checkpoint, NativeCheckpoint)
        location, sizes_bytes = checkpoint.location / item.directory, checkpoint.sizes_in(item)
    if location.local:
        files = DataFiles(location, sizes_bytes, is_local_disk, past_cache)
    else:
        files = StoreFiles(location, checkpoint.context)
    stack.enter_context(contextlib.closing(files))
    if isinstance(item, ExtentItem):
        return ExtentReader(StoredTensors(checkpoint, item, files), item.specs)
    assert isinstance(checkpoint, NativeCheckpoint)
    assert isinstance(item, NativeItem)
    stored = StoredChunks(checkpoint, item, files, wants, options)
    return ExtentReader(stored, item.specs)


@dataclass(frozen=True)
class DerivedReader:
    """Reads an item of rules by ``reader``, which reads arrays as they are stored, each part once for all leaves of a batch."""

    _reader: ExtentReader | OrbaxReader
    _item: DerivedItem

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        item, found, jobs = self._item, dict[int, Parts](), list[Job]()
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


def _batches(
    item: SavedItem, wants: Iterable[Want], limit_bytes: int
) -> Iterator[tuple[list[Want], int]]:
    """The leaves in batches, with sizes in bytes. Parts of one array stay together: a block or chunk may have some of each."""
    batch: list[Want] = []
    total_bytes, recipes = 0, item.recipes if isinstance(item, DerivedItem) else None
    for want in wants:
        itemsize = item.specs[want.leaf].numpy_dtype.itemsize
        size_bytes = itemsize * sum(map(region_size, want.regions))
        full = total_bytes + size_bytes > limit_bytes or len(batch) >= _BATCH_LEAVES
        if batch and full and recipes is not None:
            full = recipes[want.leaf].first != recipes[batch[-1].leaf].first
        if batch and full:
            yield batch, total_bytes
            batch, total_bytes = [], 0
        batch.append(want)
        total_bytes += size_bytes
    if batch:
        yield batch, total_bytes
