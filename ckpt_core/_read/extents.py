"""Reads arrays whose chunks lie at known places of files, and verifies the chunks that have checksums.

``StoredChunks`` are those of an item that ckpt wrote, in an OCDBT database; a tensor in a file (``StoredTensors``,
of safetensors) is one chunk without a checksum.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._format.checksums import CHECKSUM_DIRECTORY, crc_of, load_checksums
from ckpt_core._layout.chunks import (
    Block,
    blocks,
    chunk_count,
    chunk_key,
    keyed_parts,
    rows_per_block,
)
from ckpt_core._layout.regions import Region, pieces, region_slices, whole
from ckpt_core._options import KIB, MIB, Options
from ckpt_core._read.wants import (
    PIECE_BYTES,
    Array,
    Job,
    Parts,
    Reads,
    ReadsOf,
    Share,
    Want,
    aligned,
    buffers,
    fill,
    is_all,
    take,
)
from ckpt_core._saved import Checkpoint, ExtentItem, NativeCheckpoint, NativeItem
from ckpt_core._storage import (
    INDEX_FILE,
    DataFiles,
    Extent,
    StoreFiles,
    coalesce,
    decode_chunk,
    most_chunk_bytes,
    most_stored_bytes,
    read_index,
)
from ckpt_core._tree import format_path
from ckpt_core._tree.leaves import LeafSpec

_SMALL_BYTES = 64 * KIB
"""Arrays up to this size that are one chunk are read whole, together with their neighbours in the file."""
_JOIN_LIMIT_BYTES = 8 * MIB
_FEW_OF = 8
"""If fewer than 1/8 of the leaves are wanted, read index and checksums partially."""
_WRITER = re.compile(r"ocdbt\.process_(\d+)/")


class Chunk(NamedTuple):
    """A chunk of an array, or all of a tensor: where it is, and by what it is verified."""

    key: str  # array name and position of the chunk
    extent: Extent  # size, file and range were checked, but not the content
    block_bytes: int = 0  # of the blocks that have a checksum each
    # of each block; None: it is not verified, so any part of it can be read
    crcs: list[int] | None = None


_Small = tuple[int, Extent, int | None, Parts]
"""A small array: its leaf, its place, its checksum or None, and the parts of it that are wanted."""


class StoredTensors:
    """Where the tensors of ``files`` are, each in C order; ``leaf`` is the position of a tensor in the item."""

    most_chunks = 1  # of one array

    def __init__(
        self, checkpoint: Checkpoint, item: ExtentItem, files: DataFiles | StoreFiles
    ) -> None:
        self._checkpoint, self._item, self.files = checkpoint, item, files
        # Wanted bytes at most this far apart are read at once: in a store, each request takes its time.
        self.gap_bytes = 32 * KIB if checkpoint.location.local else MIB
        self.chunks = [tuple(max(1, size) for size in spec.shape) for spec in item.specs]
        self.codecs: list[str | None] = [None] * len(item.specs)

    def find(self, leaf: int, key: str, chunk_bytes: int) -> Chunk:
        return Chunk(key, Extent(self._item.files[leaf], self._item.offsets[leaf], chunk_bytes))

    def corrupt(self, leaf: int, what: str, file: str | None = None) -> CheckpointCorrupt:
        where, file = format_path(self._item.paths[leaf]), self._item.files[leaf]
        return CheckpointCorrupt(
            f"{self._checkpoint.path}: tensor {where}, file {file}: {what}", file=file, leaf=where
        )


class StoredChunks:
    """Where the chunks of an item of ckpt are in its ``files``. Raises CheckpointCorrupt if the index is missing or damaged."""

    gap_bytes = 16 * KIB  # small chunks at most this far apart are read at once

    def __init__(
        self,
        checkpoint: NativeCheckpoint,
        item: NativeItem,
        files: DataFiles | StoreFiles,
        wants: Sequence[Want],
        options: Options,
    ) -> None:
        self._checkpoint, self._item, self.files = checkpoint, item, files
        self.chunks, self.codecs = item.chunks, item.codecs
        self._verify = options.checksums
        manifest = checkpoint.read_file(f"{item.directory}/{INDEX_FILE}")
        leaves = [want.leaf for want in wants]
        self._names = dict(zip(leaves, item.names_of(leaves), strict=True))
        few = len(wants) * _FEW_OF < len(item.paths)
        wanted = [*self._names.values()] if few else None
        location = checkpoint.location / item.directory
        local = files if isinstance(files, DataFiles) else None
        context = checkpoint.context
        self.index = read_index(location, context, wanted, local, item.most_keys, manifest)
        self.most_chunks = len(self.index)
        self._there: dict[str, int] = {}  # how long the data files are that were looked at
        self._crcs: dict[int, Any] = {}  # process -> what ``load_checksums`` gives of its file

    def find(self, leaf: int, key: str, chunk_bytes: int) -> Chunk:
        """Where a chunk of so many decoded bytes is stored, and its checksums. Raises CheckpointCorrupt if it cannot be there."""
        name = self._names[leaf]
        key = f"{name}/{key}" if name else key
        place = self.index.get(key)
        if place is None:
            raise self.corrupt(leaf, f"chunk {key} is missing")
        extent = Extent(*place)
        size_bytes, compressed = extent.size_bytes, self._item.codecs[leaf] is not None
        if not compressed and size_bytes != chunk_bytes:
            raise self.corrupt(leaf, f"chunk {key} has {size_bytes} bytes, not {chunk_bytes}")
        if compressed:
            many = size_bytes > most_stored_bytes(chunk_bytes)
            if many or chunk_bytes > most_chunk_bytes(size_bytes):
                odd = f"too {'many' if many else 'few'} for {chunk_bytes}"
                raise self.corrupt(leaf, f"chunk {key} has {size_bytes} bytes, {odd}")
        if extent.file:
            end = extent.offset + size_bytes
            file = f"{self._item.directory}/{extent.file}"
            listed = self._checkpoint.record.files.get(file)
            if listed is None:
                raise self.corrupt(leaf, f"chunk {key} lies in {file}, which was never saved")
            if end > listed.size_bytes:
                raise self.corrupt(leaf, f"chunk {key} lies beyond its end", extent.file)
            if extent.file not in self._there:
                try:  # before there is a buffer for it
                    self._there[extent.file] = self.files.size(extent.file)
                except CheckpointCorrupt as error:
                    raise self.corrupt(leaf, str(error), extent.file) from error.__cause__
            if end > self._there[extent.file]:
                raise self.corrupt(leaf, "the file is truncated", extent.file)
        if not self._verify:
            return Chunk(key, extent)
        return Chunk(key, extent, *self.checksums(leaf, key, extent))

    def checksums(self, leaf: int, key: str, extent: Extent) -> tuple[int, list[int]]:
        """Bytes of a block, and the checksum of each. Each file is read for chunks of its process alone: there may be thousands."""
        named = _WRITER.match(extent.file)
        writer = int(named[1]) if named else 0
        # a value inside the index does not tell its writer; it was process 0 in nearly all cases
        for process in (writer, *range(self._item.process_count)):
            if process >= self._item.process_count:
                continue
            if process not in self._crcs:
                name = f"{self._item.directory}/{CHECKSUM_DIRECTORY}/process_{process}"
                data = self._checkpoint.read_file(name)
                self._crcs[process] = load_checksums(data, name)
            if (crcs := self._crcs[process][1].get(key)) is not None:
                if not crcs or not isinstance(crcs, list):
                    break
                return self._crcs[process][0], crcs
        raise self.corrupt(leaf, f"no checksum for chunk {key}")

    def corrupt(self, leaf: int, what: str, file: str | None = None) -> CheckpointCorrupt:
        """The error for a damaged leaf; its message names checkpoint, item, leaf and file."""
        where = format_path(self._item.paths[leaf])
        full = f"{self._item.directory}/{file}" if file else None
        place = f", file {full}" if full else ""
        return CheckpointCorrupt(
            f"{self._checkpoint.path}: item {self._item.name!r}, leaf {where}{place}: {what}",
            file=full,
            leaf=where,
        )


@dataclass(eq=False)
class ExtentReader:
    """Reads chunks at the offsets that are known, and verifies what has checksums; TensorStore decodes compressed ones."""

    _stored: StoredChunks | StoredTensors
    _specs: Sequence[LeafSpec]
    # mapped places, so that no two arrays share one
    _views: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill and verify them."""
        small: dict[str, list[_Small]] = {}
        planned: list[tuple[Want, Parts]] = []
        jobs: list[Job] = []
        for want in batch:
            parts = self._plan_one_chunk(want, small, jobs)
            if parts is None:  # each block is read once for all regions
                found = self._find_all(want.leaf, want.regions)  # before there is memory for it
                parts = buffers(want, self._specs[want.leaf].numpy_dtype)
                jobs += self._jobs(want.leaf, list(parts.items()), found)
            planned.append((want, parts))
        for file, reads in small.items():
            jobs.extend(self._joined(file, reads))
        return planned, jobs

    def _plan_one_chunk(
        self, want: Want, small: dict[str, list[_Small]], jobs: list[Job]
    ) -> Parts | None:
        """Buffers of a leaf that is one chunk, and small or mapped; else None. ``_joined`` reads those in ``small`` together."""
        leaf, stored = want.leaf, self._stored
        spec, chunk = self._specs[leaf], stored.chunks[leaf]
        size_bytes = spec.stored_bytes
        # with ``broadcast=True`` another process may read all of it
        is_small = 0 < size_bytes <= _SMALL_BYTES and bool(want.regions)
        is_whole = want.regions == [whole(chunk)]
        if not is_small and not (want.mapped and is_whole):
            return None
        if chunk != spec.stored_shape or stored.codecs[leaf] is not None:
            return None
        found = stored.find(leaf, chunk_key((0,) * len(chunk)), size_bytes)
        if not is_small:
            view = self._mapped(leaf, found, jobs)
            return None if view is None else {want.regions[0]: view}
        if found.crcs is not None and found.block_bytes < size_bytes:
            return None  # several blocks, each with a checksum of its own
        extent, crc = found.extent, found.crcs[0] if found.crcs else None
        dtype = spec.numpy_dtype
        parts = {want.regions[0]: np.empty(chunk, dtype)} if is_whole else buffers(want, dtype)
        if extent.file:
            small.setdefault(extent.file, []).append((leaf, extent, crc, parts))
            return parts
        data = np.frombuffer(extent.value, np.uint8)  # a value inside the index
        self._take(leaf, INDEX_FILE, data, crc, parts)
        return parts

    def _mapped(self, leaf: int, found: Chunk, jobs: list[Job]) -> Array | None:
        """A memory-mapped view of a leaf that is one chunk; None if it cannot be mapped."""
        stored, chunk, extent = self._stored, self._stored.chunks[leaf], found.extent
        dtype = self._specs[leaf].numpy_dtype
        place = (extent.file, extent.offset)
        if not extent.file or extent.offset % dtype.itemsize or place in self._views:
            return None
        file = stored.files.mapped(extent.file)
        if file is None:
            return None
        data = file[extent.offset : extent.offset + extent.size_bytes]
        if data.size != extent.size_bytes:  # access beyond the end of the file is SIGBUS
            raise stored.corrupt(leaf, "the file is truncated", extent.file)
        self._views.add(place)
        for block, crc in self._blocks(leaf, found):
            jobs.append(functools.partial(self._check, leaf, extent.file, data[block], crc))
        return data.view(dtype).reshape(chunk)

    def _joined(self, file: str, reads: list[_Small]) -> Iterator[Job]:
        """Jobs that each read several small arrays of one file with one read of up to 8 MiB."""
        ranges = [(extent.offset, extent.size_bytes) for _, extent, _, _ in reads]
        for offset, size, members in coalesce(
            ranges, gap_bytes=self._stored.gap_bytes, limit_bytes=_JOIN_LIMIT_BYTES
        ):

            def job(offset: int = offset, size: int = size, members: list[int] = members) -> None:
                buffer = np.empty(size, np.uint8)
                got = self._stored.files.read(file, offset, buffer)
                for member in members:
                    leaf, extent, crc, parts = reads[member]
                    start = extent.offset - offset
                    if start + extent.size_bytes > got:
                        raise self._stored.corrupt(leaf, "the file is truncated", file)
                    data = buffer[start : start + extent.size_bytes]
                    self._take(leaf, file, data, crc, parts)

            yield job

    def _take(self, leaf: int, file: str, data: Array, crc: int | None, parts: Parts) -> None:
        """Verifies the bytes of a small array, and copies them to where they belong."""
        if crc is not None and crc_of(data) != crc:
            raise self._damaged(leaf, file)
        spec = self._specs[leaf]
        first = next(iter(parts.values()))
        if first.dtype == spec.numpy_dtype and first.shape == spec.stored_shape:
            first.reshape(-1).view(np.uint8)[:] = data
            return
        take(data.copy().view(spec.numpy_dtype).reshape(spec.stored_shape), list(parts.items()))

    def jobs(self, leaf: int, shares: Sequence[Share]) -> Iterator[Job]:
        """Jobs that read what the shares, of regions of an array, need; each part once for all of them."""
        return self._jobs(leaf, shares, self._find_all(leaf, [region for region, _ in shares]))

    def _find_all(self, leaf: int, regions: Sequence[Region]) -> dict[str, Chunk]:
        """The chunks that some regions need, by their keys inside the array."""
        stored, chunk = self._stored, self._stored.chunks[leaf]
        if any(chunk_count(region, chunk) > stored.most_chunks for region in regions):
            raise stored.corrupt(leaf, "chunks are missing from the index")
        keys = dict.fromkeys(key for region in regions for key, _ in keyed_parts(region, chunk))
        size_bytes = math.prod(chunk) * self._specs[leaf].numpy_dtype.itemsize
        return {key: stored.find(leaf, key, size_bytes) for key in keys}

    def _jobs(self, leaf: int, shares: Sequence[Share], found: dict[str, Chunk]) -> Iterator[Job]:
        chunk = self._stored.chunks[leaf]
        of_chunks: dict[str, list[Share]] = {key: [] for key in found}
        for region, view in shares:
            for key, part in keyed_parts(region, chunk):
                place = (*region_slices(part.in_region), ...)  # a view of a scalar, too
                of_chunks[key].append((part.in_chunk, view[place]))
        for key, of_chunk in of_chunks.items():
            yield from self._chunk_jobs(leaf, found[key], of_chunk)

    def _chunk_jobs(self, leaf: int, found: Chunk, shares: list[Share]) -> Iterator[Job]:
        """Jobs that read the needed parts of a chunk: one for each block or piece; one if it is compressed."""
        stored, chunk = self._stored, self._stored.chunks[leaf]
        key, extent, block_bytes, crcs = found
        if (codec := stored.codecs[leaf]) is not None:
            yield functools.partial(self._decode, codec, leaf, found, shares)
            return
        dtype = self._specs[leaf].numpy_dtype
        if crcs is None:
            read = functools.partial(self._read, leaf, extent, None)
            # of a tensor a load may want few columns; of a chunk, which is a shard, mostly all
            gap_bytes = stored.gap_bytes if isinstance(stored, StoredTensors) else None
            reads = ReadsOf(read, dtype, gap_bytes)
            regions = [region for region, _ in shares]
            for piece in pieces(chunk, dtype.itemsize, regions, PIECE_BYTES):
                parts: list[Share] = [
                    (taker.part, shares[taker.number][1][(*taker.place, ...)])
                    for taker in piece.takers
                ]
                yield functools.partial(fill, reads, piece.offset_bytes, piece.shape, parts)
            return
        rows = [part[0] if part else (0, 1) for part, _ in shares]
        last = max(stop for _, stop in rows) - 1
        if last // rows_per_block(chunk, dtype.itemsize, block_bytes) >= len(crcs):
            raise stored.corrupt(leaf, f"too few checksums for chunk {key}")
        touched: dict[int, tuple[Block, list[Share]]] = {}
        for share, of_share in zip(shares, rows, strict=True):
            for block in blocks(chunk, dtype.itemsize, rows=of_share, block_bytes=block_bytes):
                touched.setdefault(block.number, (block, []))[1].append(_in_block(share, block))
        for number, (block, takers) in touched.items():
            reads = ReadsOf(functools.partial(self._read, leaf, extent, crcs[number]), dtype)
            shape = (block.stop - block.start, *chunk[1:]) if chunk else ()
            yield functools.partial(fill, reads, block.offset_bytes, shape, takers)

    def _read(self, leaf: int, extent: Extent, crc: int | None, offset: int, target: Array) -> None:
        """Fills ``target`` with bytes of a chunk from ``offset`` on; CheckpointCorrupt if they have another checksum than ``crc``."""
        if not extent.file:
            target[:] = np.frombuffer(extent.value, np.uint8)[offset : offset + target.size]
            self._check(leaf, INDEX_FILE, target, crc)
            return
        files, found = self._stored.files, 0
        end = extent.offset + offset + target.size
        step = target.size if crc is None else files.piece_bytes or target.size
        for start in range(0, target.size, step or 1):
            piece = target[start : start + step]
            if files.read(extent.file, extent.offset + offset + start, piece, end) != piece.size:
                raise self._stored.corrupt(leaf, "the file is truncated", extent.file)
            if crc is not None:
                found = crc_of(piece, found)
        if crc is not None and found != crc:
            raise self._damaged(leaf, extent.file)

    def _check(self, leaf: int, file: str | None, data: Array, crc: int | None) -> None:
        """Raises CheckpointCorrupt if the checksum of ``data`` is not ``crc``; None: there is none."""
        if crc is not None and crc_of(data) != crc:
            raise self._damaged(leaf, file)

    def _damaged(self, leaf: int, file: str | None) -> CheckpointCorrupt:
        return self._stored.corrupt(leaf, "the data is damaged: its checksum differs", file)

    def _blocks(self, leaf: int, found: Chunk) -> Iterator[tuple[slice, int]]:
        """For each block of a chunk that has checksums, its range of bytes in the chunk and its checksum."""
        key, _, block_bytes, crcs = found
        if crcs is None:
            return
        chunk, itemsize = self._stored.chunks[leaf], self._specs[leaf].numpy_dtype.itemsize
        rows = chunk[0] if chunk else 1
        count = -(-rows // rows_per_block(chunk, itemsize, block_bytes))
        if count != len(crcs):  # checked first: a forged count must not make millions of objects
            what = f"{len(crcs)} checksums for chunk {key}, not {count}"
            raise self._stored.corrupt(leaf, what)
        for block, crc in zip(blocks(chunk, itemsize, block_bytes=block_bytes), crcs, strict=True):
            yield slice(block.offset_bytes, block.offset_bytes + block.size_bytes), crc

    def _decode(self, codec: str, leaf: int, found: Chunk, shares: list[Share]) -> None:
        """Job: reads and decodes a compressed chunk, then verifies and copies its blocks."""
        chunk, spec, extent = self._stored.chunks[leaf], self._specs[leaf], found.extent
        stored = np.empty(extent.size_bytes, np.uint8)
        self._read(leaf, extent, None, 0, stored)
        direct = is_all(shares, chunk, spec.numpy_dtype)
        values = shares[0][1] if direct else aligned(chunk, spec.numpy_dtype)
        try:
            decode_chunk(stored.data, found.key, spec.stored_dtype, codec, values)
        except CheckpointCorrupt as error:
            raise self._stored.corrupt(leaf, f"chunk {found.key}: {error}", extent.file) from error
        data = values.reshape(-1).view(np.uint8)
        for block, crc in self._blocks(leaf, found):
            self._check(leaf, None, data[block], crc)
        if not direct:
            take(values, shares)


def _in_block(share: Share, block: Block) -> Share:
    """The part of a share of a chunk that lies in one of its blocks."""
    part, view = share
    if not part:
        return share
    first, last = part[0]
    start, stop = max(block.start, first), min(block.stop, last)
    rows = (start - block.start, stop - block.start)
    return (rows, *part[1:]), view[start - first : stop - first]
