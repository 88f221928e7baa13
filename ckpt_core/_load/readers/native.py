"""Reads arrays that ckpt wrote: finds chunks by the database index, verifies block by block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ckpt_core._layout.chunks import (
    Block,
    chunk_count,
    covered_blocks,
    keyed_parts,
    rows_per_block,
)
from ckpt_core._layout.ranges import coalesce
from ckpt_core._layout.regions import Region, region_shape, whole
from ckpt_core._load.checkpoint import NativeCheckpoint, NativeItem, naming
from ckpt_core._load.readers.buffers import BufferPart, aligned, sole_taker
from ckpt_core._load.readers.compressed import open_compressed
from ckpt_core._load.readers.stored_chunks import StoredChunks
from ckpt_core._load.readers.wants import Array, Reads, Want
from ckpt_core._options import KIB, MIB
from ckpt_core._storage import INDEX_FILE, Extent, Location, held_in_memory, read_region

_SMALL_BYTES = 64 * KIB
"""Leaves up to this size that are one chunk are read together with their neighbours in the file."""
_SmallRead = tuple[Extent, Array, int | None, int]
"""Where a small chunk is, the buffer for it, its checksum or None, and its leaf."""
_JOIN_GAP_BYTES = 16 * KIB
_JOIN_LIMIT_BYTES = 8 * MIB
"""Small chunks at most this gap apart are joined into one read of at most this limit."""


class NativeReader:
    """Reads an item that ckpt wrote.

    Uncompressed chunks are read directly, at the offsets that the index tells; TensorStore reads and
    decodes compressed ones.

    Args:
        checkpoint, item: what to read.
        chunks: finds, reads and verifies chunks; closed with this reader.
        context: TensorStore context of the load.
    """

    def __init__(
        self,
        checkpoint: NativeCheckpoint,
        item: NativeItem,
        chunks: StoredChunks,
        context: Any,
    ) -> None:
        self._checkpoint = checkpoint
        self._item = item
        self._context = context
        self._location = checkpoint.location / item.directory
        self._chunks = chunks
        self._views: set[tuple[str, int]] = set()  # mapped places, so that no two arrays share one

    def __enter__(self) -> NativeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.files.close()

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill and verify them."""
        small: dict[str, list[_SmallRead]] = {}
        planned: Reads = []
        for want in batch:
            jobs: list[Callable[[], None]] = []
            parts: dict[Region, Array] = {}
            if len(want.regions) == 1:
                (region,) = want.regions
                buffer = self._plan_small(want.leaf, region, small)
                if buffer is None and want.mapped:
                    buffer = self._plan_mapped(want.leaf, region, jobs)
                if buffer is not None:
                    parts[region] = buffer
            if not parts:
                parts = self._plan_regions(want, jobs)
            planned.append((want, parts, jobs))
        shared = [job for file, reads in small.items() for job in self._joined(file, reads)]
        if shared:
            planned[0][2].extend(shared)
        return planned

    def _plan_small(
        self,
        leaf: int,
        region: Region,
        small: dict[str, list[_SmallRead]],
    ) -> Array | None:
        """The buffer of a leaf that is one chunk of at most 64 KiB; None for any other leaf.

        Its read is added to ``small``, by file, where ``_joined`` turns many into one.
        """
        spec = self._item.specs[leaf]
        if spec.stored_bytes > _SMALL_BYTES or not self._is_one_chunk(leaf, region):
            return None
        key, extent = self._chunks.find_only(leaf)
        crcs = self._chunks.checksums(leaf, key, extent)
        if crcs and not extent.file and self._chunks.block_bytes < spec.stored_bytes:
            return None  # several blocks, hence several checksums: _plan_regions handles those
        crc = crcs[0] if crcs else None
        out = np.empty(self._item.chunks[leaf], spec.numpy_dtype)
        if extent.file:
            small.setdefault(extent.file, []).append((extent, out, crc, leaf))
            return out
        data = np.frombuffer(extent.value, np.uint8)  # a value inside the index
        if crc is not None:
            self._chunks.check(leaf, INDEX_FILE, data, crc)
        out.reshape(-1).view(np.uint8)[:] = data
        return out

    def _plan_mapped(
        self, leaf: int, region: Region, jobs: list[Callable[[], None]]
    ) -> Array | None:
        """A memory-mapped view of a leaf that is one chunk; None if it cannot be mapped.

        Adds the jobs that verify it to ``jobs``.
        """
        if not self._is_one_chunk(leaf, region):
            return None
        spec, chunk = self._item.specs[leaf], self._item.chunks[leaf]
        key, extent = self._chunks.find_only(leaf)
        place = (extent.file, extent.offset)
        if not extent.file or extent.offset % spec.numpy_dtype.itemsize or place in self._views:
            return None
        crcs = self._chunks.checksums(leaf, key, extent)
        file = self._chunks.files.mapped(extent.file)
        if file is None:
            return None
        data = file[extent.offset : extent.offset + extent.size_bytes]
        if data.size != extent.size_bytes:  # access beyond the end of the file is SIGBUS
            raise self._chunks.corrupt(leaf, "the file is truncated", extent.file)
        self._views.add(place)
        if crcs is not None:
            dtype = spec.numpy_dtype
            for block, crc in self._chunks.blocks(leaf, key, crcs, dtype.itemsize):
                jobs.append(
                    functools.partial(self._chunks.check, leaf, extent.file, data[block], crc)
                )
        return data.view(spec.numpy_dtype).reshape(chunk)

    def _is_one_chunk(self, leaf: int, region: Region) -> bool:
        """Whether a region is a whole array, stored as one chunk that can be read directly."""
        spec, chunk = self._item.specs[leaf], self._item.chunks[leaf]
        one = chunk == spec.stored_shape and region == whole(chunk)
        return one and self._direct(leaf) and spec.stored_bytes > 0

    def _plan_regions(self, want: Want, jobs: list[Callable[[], None]]) -> dict[Region, Array]:
        """Buffers for a leaf's regions; adds jobs that read each block once for all regions."""
        leaf, regions = want.leaf, want.regions
        spec, chunk = self._item.specs[leaf], self._item.chunks[leaf]
        name = self._item.name_of(leaf)
        prefix = f"{name}/" if name else ""
        chunk_size = math.prod(chunk) * spec.numpy_dtype.itemsize
        if any(chunk_count(region, chunk) > len(self._chunks.index) for region in regions):
            raise self._chunks.corrupt(leaf, "chunks are missing from the index")
        parts = {region: keyed_parts(region, chunk) for region in regions}
        keys = dict.fromkeys(key for keyed in parts.values() for key, _ in keyed)
        found = {key: self._chunks.find(leaf, prefix + key, chunk_size) for key in keys}
        dtype = want.dtype or spec.numpy_dtype
        buffers = {region: aligned(region_shape(region), dtype) for region in regions}
        shares: dict[str, list[BufferPart]] = {key: [] for key in keys}
        for region, keyed in parts.items():
            for key, part in keyed:
                shares[key].append(BufferPart(part, buffers[region]))
        for key, of_chunk in shares.items():
            full_key, extent = found[key]
            jobs += self._chunk_jobs(leaf, full_key, extent, of_chunk)
        return buffers

    def _direct(self, leaf: int) -> bool:
        """Whether the leaf's chunks are stored as they are in memory."""
        return self._item.codecs[leaf] is None

    def _joined(self, file: str, reads: list[_SmallRead]) -> Iterator[Callable[[], None]]:
        """Jobs that each read several small chunks of one file with one read of up to 8 MiB."""
        ranges = [(extent.offset, extent.size_bytes) for extent, _, _, _ in reads]
        for offset, size, members in coalesce(
            ranges, gap_bytes=_JOIN_GAP_BYTES, limit_bytes=_JOIN_LIMIT_BYTES
        ):

            def job(offset: int = offset, size: int = size, members: list[int] = members) -> None:
                buffer = np.empty(size, np.uint8)
                got = self._chunks.files.read(file, offset, buffer)
                for member in members:
                    extent, out, crc, leaf = reads[member]
                    start = extent.offset - offset
                    if start + extent.size_bytes > got:
                        raise self._chunks.corrupt(leaf, "the file is truncated", file)
                    data = buffer[start : start + extent.size_bytes]
                    if crc is not None:
                        self._chunks.check(leaf, file, data, crc)
                    out.reshape(-1).view(np.uint8)[:] = data

            yield job

    def _chunk_jobs(
        self, leaf: int, key: str, extent: Extent, shares: list[BufferPart]
    ) -> Iterator[Callable[[], None]]:
        """Jobs that read the needed parts of one chunk: one job for each block.

        A compressed chunk is one job, since it can only be decoded as a whole.
        """
        chunk = self._item.chunks[leaf]
        crcs = self._chunks.checksums(leaf, key, extent)
        if self._item.codecs[leaf] is not None:
            yield functools.partial(self._decode, leaf, key, shares, crcs)
            return
        itemsize = self._item.specs[leaf].numpy_dtype.itemsize
        block_bytes = self._chunks.block_bytes
        touched: dict[int, tuple[Block, list[BufferPart]]] = {}
        last = max(share.rows[1] for share in shares) - 1
        if crcs is not None and last // rows_per_block(chunk, itemsize, block_bytes) >= len(crcs):
            raise self._chunks.corrupt(leaf, f"too few checksums for chunk {key}")
        for share in shares:
            first, blocks = covered_blocks(
                chunk, itemsize, rows=share.rows, block_bytes=block_bytes
            )
            for number, block in enumerate(blocks, first):
                touched.setdefault(number, (block, []))[1].append(share)
        for number, (block, takers) in touched.items():
            crc = None if crcs is None else crcs[number]
            yield functools.partial(self._read_block, leaf, key, extent, block, takers, crc)

    def _read_block(
        self,
        leaf: int,
        key: str,
        extent: Extent,
        block: Block,
        takers: list[BufferPart],
        crc: int | None,
    ) -> None:
        """Job: reads and verifies one block.

        If a single buffer takes all of it, it is read directly into that buffer; else it is read
        into temporary memory, from which each buffer's part is copied.
        """
        chunk, dtype = self._item.chunks[leaf], self._item.specs[leaf].numpy_dtype
        sole = sole_taker(takers, dtype)
        memory = None if sole is None else sole.memory(block, chunk)
        if memory is not None:
            self._chunks.fill(leaf, key, extent, block.offset_bytes, memory, crc)
            return
        values = aligned((block.stop - block.start, *chunk[1:]), dtype)
        memory = values.reshape(-1).view(np.uint8)
        self._chunks.fill(leaf, key, extent, block.offset_bytes, memory, crc)
        with np.errstate(all="ignore"):  # a cast that the caller asked for may overflow
            for share in takers:
                share.take(block, values)

    @functools.cached_property
    def _manifest(self) -> Location | None:
        """Where TensorStore finds the database's manifest, if not in the item."""
        data = self._checkpoint.record.small_files.get(self._item.file(INDEX_FILE))
        if data is None:
            return None
        return held_in_memory(self._location, INDEX_FILE, data, self._context)

    def _decode(
        self, leaf: int, key: str, shares: list[BufferPart], crcs: list[int] | None
    ) -> None:
        """Job: TensorStore decodes a compressed chunk, then its blocks are verified and copied."""
        name, chunk = self._item.name_of(leaf), self._item.chunks[leaf]
        shape = self._item.specs[leaf].stored_shape

        def head(size: int) -> bytes:
            data = np.zeros(min(size, self._chunks.index[key].size_bytes), np.uint8)
            self._chunks.fill(leaf, key, self._chunks.index[key], 0, data, None)
            return data.tobytes()

        with naming(self._checkpoint, self._item.paths[leaf]):
            array = open_compressed(
                self._location,
                self._item,
                leaf,
                key,
                self._chunks.index,
                head,
                self._context,
                self._manifest,
            )
        region = tuple(
            (position * step, min((position + 1) * step, size))
            for position, step, size in zip(shares[0].part.index, chunk, shape, strict=True)
        )
        dtype = self._item.specs[leaf].numpy_dtype
        sole = sole_taker(shares, dtype)
        place = None if sole is None else sole.whole_chunk(chunk)
        values = aligned(chunk, dtype) if place is None else place
        values[...] = 0
        part = values[(*(slice(0, stop - start) for start, stop in region), ...)]
        read_region(array, region, name, part)
        if crcs is not None:
            data = values.reshape(-1).view(np.uint8)
            for block, crc in self._chunks.blocks(leaf, key, crcs, values.itemsize):
                self._chunks.check(leaf, None, data[block], crc)
        with np.errstate(all="ignore"):
            for share in shares if place is None else ():
                share.take_chunk(values)
