"""Array data out of an opened checkpoint, verified block by block, in parallel threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format import orbax
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, crc_of, load_checksums
from ckpt_core._load.foreign import OrbaxReader
from ckpt_core._load.opened import Opened, SavedItem
from ckpt_core._load.wants import Array, Reads, Want
from ckpt_core._options import KIB, MIB, Options
from ckpt_core._plan import (
    ChunkPart,
    Region,
    chunk_key,
    coalesce,
    covered_blocks,
    grid,
    keyed_parts,
    region_shape,
    region_slices,
    whole,
)
from ckpt_core._storage import (
    DataFiles,
    Extent,
    open_array,
    read_index,
    read_into,
    read_value,
)
from ckpt_core._tree import array_name, format_path

_SMALL_BYTES = 64 * KIB
_BATCH_BYTES = 128 * MIB
_BATCH_LEAVES = 2048
_JOIN_GAP_BYTES = 16 * KIB
_JOIN_LIMIT_BYTES = 8 * MIB


def read_leaves(
    opened: Opened, item: SavedItem, wants: Sequence[Want], options: Options, context: Any
) -> Iterator[tuple[Want, dict[Region, Array]]]:
    """The stored arrays of every wanted leaf, in order; each verified before it is given.

    Reading runs ahead in threads by one batch.

    Raises:
        CheckpointCorrupt: data is missing, truncated or not what was saved.
    """
    reader = (
        OrbaxReader(opened, item, context)
        if item.orbax
        else _Reader(opened, item, options, context)
    )
    limit = min(_BATCH_BYTES, options.max_host_bytes)
    threads = min(8, (os.cpu_count() or 1) + 2)
    with reader, ThreadPoolExecutor(threads, "ckpt-read") as pool:
        running: list[tuple[Want, dict[Region, Array], list[Any]]] = []
        for batch in _batches(item, wants, limit):
            started = [
                (want, parts, [pool.submit(job) for job in jobs])
                for want, parts, jobs in reader.plan(batch)
            ]
            yield from _finished(running)
            running = started
        yield from _finished(running)


def _finished(
    running: list[tuple[Want, dict[Region, Array], list[Any]]],
) -> Iterator[tuple[Want, dict[Region, Array]]]:
    # every job of a batch may serve several leaves, so all must have ended before one is given
    for _, _, futures in running:
        for future in futures:
            future.result()
    for want, parts, _ in running:
        yield want, parts


def _batches(item: SavedItem, wants: Sequence[Want], limit_bytes: int) -> Iterator[list[Want]]:
    batch: list[Want] = []
    size = 0
    for want in wants:
        spec = item.specs[want.leaf]
        bytes_ = spec.numpy_dtype.itemsize * sum(
            math.prod(region_shape(region)) for region in want.regions
        )
        if batch and (size + bytes_ > limit_bytes or len(batch) >= _BATCH_LEAVES):
            yield batch
            batch, size = [], 0
        batch.append(want)
        size += bytes_
    if batch:
        yield batch


class _Reader:
    """Reads an item that ckpt wrote: by the index where files are local and not compressed."""

    def __init__(self, opened: Opened, item: SavedItem, options: Options, context: Any) -> None:
        self._opened = opened
        self._item = item
        self._context = context
        self._verify = options.checksums
        self._location = opened.location / item.directory
        self._files = DataFiles(self._location)
        opened.read_file(f"{item.directory}/manifest.ocdbt")
        self._index = read_index(self._location, context)
        self._crcs: dict[str, list[int]] = {}
        self._block_bytes = 1
        for process in range(item.process_count if self._verify else 0):
            name = f"{item.directory}/{CHECKSUM_DIRECTORY}/process_{process}"
            self._block_bytes, crcs = load_checksums(opened.read_file(name), name)
            self._crcs |= crcs

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        small: dict[str, list[tuple[Extent, Array, int | None, int]]] = {}
        planned: Reads = []
        for want in batch:
            jobs: list[Callable[[], None]] = []
            parts: dict[Region, Array] = {}
            for region in want.regions:
                buffer = self._plan_small(want.leaf, region, small)
                parts[region] = (
                    self._plan_region(want.leaf, region, jobs) if buffer is None else buffer
                )
            planned.append((want, parts, jobs))
        shared = [job for file, reads in small.items() for job in self._joined(file, reads)]
        if shared:
            planned[0][2].extend(shared)
        return planned

    def _plan_small(
        self,
        leaf: int,
        region: Region,
        small: dict[str, list[tuple[Extent, Array, int | None, int]]],
    ) -> Array | None:
        """The buffer of a leaf that is one small chunk, which is read together with others."""
        spec, chunk = self._item.specs[leaf], self._item.chunks[leaf]
        if not self._direct or chunk != spec.stored_shape or region != whole(chunk):
            return None
        if spec.stored_bytes > _SMALL_BYTES or not spec.stored_bytes:
            return None
        name = self._item.names[leaf]
        key = chunk_key((0,) * len(chunk))
        key, extent = self._find(leaf, f"{name}/{key}" if name else key, spec.stored_bytes)
        crcs = self._crcs.get(key)
        if not extent.file or (self._verify and not crcs):
            return None
        out = np.empty(chunk, spec.numpy_dtype)
        small.setdefault(extent.file, []).append((extent, out, crcs[0] if crcs else None, leaf))
        return out

    def _plan_region(
        self,
        leaf: int,
        region: Region,
        jobs: list[Callable[[], None]],
    ) -> Array:
        spec, chunk = self._item.specs[leaf], self._item.chunks[leaf]
        dtype = spec.numpy_dtype
        name = self._item.names[leaf]
        prefix = f"{name}/" if name else ""
        chunk_size = math.prod(chunk) * dtype.itemsize
        if math.prod(grid(spec.stored_shape, chunk)) > len(self._index):
            raise self._corrupt(leaf, "chunks are missing from the index")
        parts = keyed_parts(region, chunk)
        found = [self._find(leaf, prefix + key, chunk_size) for key, _ in parts]
        try:
            out = _aligned(region_shape(region), dtype)
        except (MemoryError, ValueError) as error:
            raise self._corrupt(leaf, f"no memory for its shape {spec.stored_shape}") from error
        for (_, part), (key, extent) in zip(parts, found, strict=True):
            crcs = self._crcs.get(key)
            if self._verify and crcs is None:
                raise self._corrupt(leaf, f"no checksum for chunk {key}")
            self._plan_part(leaf, key, extent, part, out, crcs, jobs)
        return out

    @property
    def _direct(self) -> bool:
        return self._location.local and self._item.codec is None

    def _find(self, leaf: int, key: str, chunk_size: int) -> tuple[str, Extent]:
        extent = self._index.get(key)
        if extent is None:
            raise self._corrupt(leaf, f"chunk {key} is missing")
        if self._item.codec is None and extent.size_bytes != chunk_size:
            raise self._corrupt(
                leaf, f"chunk {key} has {extent.size_bytes} bytes, not {chunk_size}"
            )
        if extent.file and self._opened.record is not None:
            file = f"{self._item.directory}/{extent.file}"
            if file not in self._opened.record.files:
                raise self._corrupt(leaf, f"chunk {key} lies in {file}, which was never saved")
        return key, extent

    def _corrupt(self, leaf: int, what: str, file: str | None = None) -> CheckpointCorrupt:
        where = format_path(self._item.paths[leaf])
        full = f"{self._item.directory}/{file}" if file else None
        place = f", file {full}" if full else ""
        return CheckpointCorrupt(
            f"{self._opened.path}: item {self._item.name!r}, leaf {where}{place}: {what}",
            file=full,
            leaf=where,
        )

    def _joined(
        self, file: str, reads: list[tuple[Extent, Array, int | None, int]]
    ) -> Iterator[Callable[[], None]]:
        """Jobs that read many small chunks of one file at once."""
        ranges = [(extent.offset, extent.size_bytes) for extent, _, _, _ in reads]
        for offset, size, members in coalesce(
            ranges, gap_bytes=_JOIN_GAP_BYTES, limit_bytes=_JOIN_LIMIT_BYTES
        ):

            def job(offset: int = offset, size: int = size, members: list[int] = members) -> None:
                buffer = np.empty(size, np.uint8)
                got = self._files.read(file, offset, buffer)
                for member in members:
                    extent, out, crc, leaf = reads[member]
                    start = extent.offset - offset
                    if start + extent.size_bytes > got:
                        raise self._corrupt(leaf, "the file is truncated", file)
                    data = buffer[start : start + extent.size_bytes]
                    if crc is not None and crc_of(data) != crc:
                        raise self._corrupt(leaf, "the data is damaged: its checksum differs", file)
                    out.reshape(-1).view(np.uint8)[:] = data

            yield job

    def _plan_part(
        self,
        leaf: int,
        key: str,
        extent: Extent,
        part: ChunkPart,
        out: Array,
        crcs: list[int] | None,
        jobs: list[Callable[[], None]],
    ) -> None:
        """Jobs for one chunk's share of a region, a job a block."""
        chunk = self._item.chunks[leaf]
        itemsize = out.itemsize
        rows = part.in_chunk[0] if part.in_chunk else (0, 1)
        block_bytes = self._block_bytes if self._verify else 4 * MIB
        first, blocks = covered_blocks(chunk, itemsize, rows=rows, block_bytes=block_bytes)
        if crcs is not None and first + len(blocks) > len(crcs):
            raise self._corrupt(leaf, f"too few checksums for chunk {key}")
        inner_whole = all(
            stop - start == size
            for (start, stop), size in zip(part.in_chunk[1:], chunk[1:], strict=True)
        ) and all(
            stop - start == size
            for (start, stop), size in zip(part.in_region[1:], out.shape[1:], strict=True)
        )
        if self._item.codec is not None:
            jobs.append(lambda: self._decode(leaf, key, part, out, crcs))
            return
        for position, block in enumerate(blocks):
            crc = None if crcs is None else crcs[first + position]

            def job(block: Any = block, crc: int | None = crc) -> None:
                inside = rows[0] <= block.start and block.stop <= rows[1]
                if inside and inner_whole:
                    target = _rows(out, part, block.start - rows[0], block.stop - rows[0])
                    self._fill(leaf, key, extent, block.offset_bytes, target, crc)
                    return
                rows_buffer = np.empty((block.stop - block.start, *chunk[1:]), out.dtype)
                self._fill(
                    leaf,
                    key,
                    extent,
                    block.offset_bytes,
                    rows_buffer.reshape(-1).view(np.uint8),
                    crc,
                )
                start, stop = max(block.start, rows[0]), min(block.stop, rows[1])
                taken = rows_buffer[
                    (
                        slice(start - block.start, stop - block.start),
                        *region_slices(part.in_chunk[1:]),
                    )
                ]
                base = part.in_region[0][0] if part.in_region else 0
                target_rows = slice(base + start - rows[0], base + stop - rows[0])
                out[(target_rows, *region_slices(part.in_region[1:]))] = taken

            jobs.append(job)

    def _fill(
        self, leaf: int, key: str, extent: Extent, offset: int, target: Array, crc: int | None
    ) -> None:
        """Reads ``target.size`` bytes of a chunk and verifies them."""
        file = extent.file or "manifest.ocdbt"
        if not extent.file:
            target[:] = np.frombuffer(extent.value, np.uint8)[offset : offset + target.size]
        elif self._location.local:
            if self._files.read(extent.file, extent.offset + offset, target) != target.size:
                raise self._corrupt(leaf, "the file is truncated", file)
        else:
            data = read_value(self._location, key, offset, target.size, self._context)
            if len(data) != target.size:
                raise self._corrupt(leaf, f"chunk {key} is truncated", file)
            target[:] = np.frombuffer(data, np.uint8)
        if crc is not None and crc_of(target) != crc:
            raise self._corrupt(leaf, "the data is damaged: its checksum differs", file)

    def _decode(
        self, leaf: int, key: str, part: ChunkPart, out: Array, crcs: list[int] | None
    ) -> None:
        """A compressed chunk: decoded whole by TensorStore, then verified."""
        name, chunk = self._item.names[leaf], self._item.chunks[leaf]
        array = open_array(self._location, name, self._context)
        shape = self._item.specs[leaf].stored_shape
        if array.shape != shape:
            raise self._corrupt(leaf, f"zarr.json says shape {array.shape}, the record {shape}")
        region = tuple(
            (position * step, min((position + 1) * step, size))
            for position, step, size in zip(part.index, chunk, shape, strict=True)
        )
        values = np.zeros(chunk, out.dtype)
        values[tuple(slice(0, stop - start) for start, stop in region)] = read_into(
            array, region, name
        )
        if crcs is not None:
            data = values.reshape(-1).view(np.uint8)
            rows = (0, chunk[0] if chunk else 1)
            _, blocks = covered_blocks(
                chunk, out.itemsize, rows=rows, block_bytes=self._block_bytes
            )
            for block, crc in zip(blocks, crcs, strict=False):
                if crc_of(data[block.offset_bytes : block.offset_bytes + block.size_bytes]) != crc:
                    raise self._corrupt(leaf, f"chunk {key} is damaged: its checksum differs")
        out[region_slices(part.in_region)] = values[region_slices(part.in_chunk)]


_ALIGNMENT = 64
"""jax on CPU takes over host memory that begins at such an address, and copies any other."""


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array that jax can take over; numpy alone gives addresses of 16."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + size].view(dtype).reshape(shape)


def _rows(out: Array, part: ChunkPart, start: int, stop: int) -> Array:
    """The bytes of some rows of a buffer, in place."""
    if not part.in_region:
        return out.reshape(-1).view(np.uint8)
    base = part.in_region[0][0]
    return out[base + start : base + stop].reshape(-1).view(np.uint8)


def read_texts(opened: Opened, item: SavedItem) -> Callable[[int], str]:
    """Gives the text of a leaf by its position."""
    name = item.file(orbax.STRINGS_FILE)
    document: list[Any] = []

    def text(leaf: int) -> str:
        if not document:
            where = format_path(item.paths[leaf])
            document.append(orbax.parse_strings(opened.read_file(name, leaf=where), name))
        return orbax.read_string(document[0], array_name(item.paths[leaf]))

    return text
