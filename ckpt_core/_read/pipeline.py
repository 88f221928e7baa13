"""Reads array data in parallel reader threads, which work one batch ahead of the caller."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ckpt_core._background import Workers
from ckpt_core._directory import is_local_disk
from ckpt_core._layout.regions import Region, region_shape, region_size
from ckpt_core._options import MIB, Options
from ckpt_core._platform import DIRECT
from ckpt_core._processes import coordination
from ckpt_core._read.extents import ExtentReader, StoredChunks, StoredTensors
from ckpt_core._read.orbax import OrbaxReader
from ckpt_core._read.wants import Array, Job, Reads, Share, Want, aligned, buffers, take
from ckpt_core._saved import (
    Checkpoint,
    DerivedItem,
    ExtentItem,
    NativeCheckpoint,
    NativeItem,
    OrbaxItem,
    Recipe,
    SavedItem,
)
from ckpt_core._storage import (
    DataFiles,
    Location,
    PastCache,
    StoreContext,
    StoreFiles,
    memory_bytes,
)

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
    context: StoreContext,
    watch: Callable[[int], None] | None = None,
) -> Generator[tuple[Want, dict[Region, Array]]]:
    """The stored arrays of every wanted leaf, in order; each is verified before it is yielded. While the caller works on one
    batch (128 MiB or 2048 leaves at most), up to 8 reader threads read the next one. A caller that does not take all must call
    ``close``, which ends them. ``watch`` is called with about the bytes that were read of the next batch. Raises
    CheckpointCorrupt if data is missing or truncated, or its checksum differs.
    """
    past_cache = None
    if sum(item.specs[want.leaf].stored_bytes for want in wants) >= _LEAST_BYTES_PAST_CACHE:
        past_cache = _past_cache(item, wants, options)
    limit = min(_BATCH_BYTES, options.max_host_bytes)
    # past the cache nothing but the threads keeps the disk busy, and some of them wait for memory
    threads = _MOST_THREADS if past_cache else min(_MOST_THREADS, (os.cpu_count() or 1) + 2)
    with contextlib.ExitStack() as stack:
        reader = _reader(checkpoint, item, wants, options, context, past_cache, stack)
        workers: Workers | None = None
        running: list[tuple[Want, dict[Region, Array]]] = []
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
    """What reads local files without the page cache; None to read through it. By default several processes read through it, for
    those of one host may need the same bytes.
    """
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
    context: StoreContext,
    past_cache: PastCache | None,
    stack: contextlib.ExitStack,
) -> DerivedReader | ExtentReader | OrbaxReader:
    """The reader of the item; ``stack`` closes what it opens."""
    if isinstance(item, OrbaxItem):
        return stack.enter_context(contextlib.closing(OrbaxReader(checkpoint, item, context)))

    def files_in(location: Location, sizes_bytes: Mapping[str, int]) -> DataFiles | StoreFiles:
        if location.local:
            files = DataFiles(location, sizes_bytes, is_local_disk, past_cache)
        else:
            files = StoreFiles(location, context)
        return stack.enter_context(contextlib.closing(files))

    if isinstance(item, ExtentItem):
        base = item.base if isinstance(item, DerivedItem) else item
        files = files_in(checkpoint.location, base.sizes_bytes)
        tensors = ExtentReader(StoredTensors(checkpoint, base, files), base.specs)
        return DerivedReader(tensors, item) if isinstance(item, DerivedItem) else tensors
    assert isinstance(checkpoint, NativeCheckpoint)
    assert isinstance(item, NativeItem)
    files = files_in(checkpoint.location / item.directory, checkpoint.sizes_in(item))
    stored = StoredChunks(checkpoint, item, files, wants, options, context)
    return ExtentReader(stored, item.specs)


def _batches(
    item: SavedItem, wants: Iterable[Want], limit_bytes: int
) -> Iterator[tuple[list[Want], int]]:
    """The leaves in batches, each with its size in bytes."""
    batch: list[Want] = []
    total_bytes = 0
    for want in wants:
        itemsize = item.specs[want.leaf].numpy_dtype.itemsize
        size_bytes = itemsize * sum(map(region_size, want.regions))
        if batch and (total_bytes + size_bytes > limit_bytes or len(batch) >= _BATCH_LEAVES):
            yield batch, total_bytes
            batch, total_bytes = [], 0
        batch.append(want)
        total_bytes += size_bytes
    if batch:
        yield batch, total_bytes


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
