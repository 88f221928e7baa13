"""Reads arrays that each lie in C order at one place of a file, without checksums: safetensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ckpt_core._directory import is_local_disk
from ckpt_core._errors import CheckpointCorrupt
from ckpt_core._layout.pieces import pieces
from ckpt_core._layout.ranges import coalesce
from ckpt_core._layout.regions import Region, region_shape, whole
from ckpt_core._load.checkpoint import Checkpoint, ExtentItem
from ckpt_core._load.readers.buffers import aligned
from ckpt_core._load.readers.filling import PIECE_BYTES, ReadsOf, Share, fill, take
from ckpt_core._load.readers.wants import Array, Reads, Want
from ckpt_core._options import KIB, MIB
from ckpt_core._storage import DataFiles, StoreFiles
from ckpt_core._tree import format_path

_SMALL_BYTES = 64 * KIB
"""Arrays up to this size are read whole, together with their neighbours in the file."""
_JOIN_LIMIT_BYTES = 8 * MIB
_GAP_BYTES = 32 * KIB
_GAP_OF_STORES_BYTES = MIB
"""Wanted bytes at most this far apart are read at once: in a store, each request takes its time."""


class ExtentReader:
    """Reads an item of extents; in each process, only the ranges of bytes that its regions need.

    Args:
        checkpoint, item: what to read.
        context: TensorStore context of the load.
    """

    def __init__(self, checkpoint: Checkpoint, item: ExtentItem, context: Any) -> None:
        self._checkpoint = checkpoint
        self._item = item
        location = checkpoint.location
        self._files = (
            DataFiles(location, item.sizes_bytes, is_local_disk)
            if location.local
            else StoreFiles(location, context)
        )
        self._gap_bytes = _GAP_BYTES if location.local else _GAP_OF_STORES_BYTES

    def __enter__(self) -> ExtentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def plan(self, batch: list[Want]) -> Reads:
        """Buffers for a batch, and the jobs that fill them."""
        small: dict[str, list[tuple[Want, dict[Region, Array]]]] = {}
        planned: Reads = []
        for want in batch:
            spec = self._item.specs[want.leaf]
            parts = self._mapped(want)
            jobs: list[Callable[[], None]] = []
            if parts is None:
                parts = self._buffers(want)
                if 0 < spec.stored_bytes <= _SMALL_BYTES:
                    small.setdefault(self._item.files[want.leaf], []).append((want, parts))
                else:
                    jobs += self.jobs(want.leaf, list(parts.items()))
            planned.append((want, parts, jobs))
        for file, reads in small.items():
            planned[0][2].extend(self._joined(file, reads))
        return planned

    def _mapped(self, want: Want) -> dict[Region, Array] | None:
        """A memory-mapped view of a whole large array; None if it is wanted or stored otherwise."""
        spec, offset = self._item.specs[want.leaf], self._item.offsets[want.leaf]
        if not want.mapped or want.regions != [whole(spec.shape)]:
            return None
        if spec.stored_bytes <= _SMALL_BYTES or offset % spec.numpy_dtype.itemsize:
            return None
        file = self._files.mapped(self._item.files[want.leaf])
        if file is None:
            return None
        data = file[offset : offset + spec.stored_bytes]
        if data.size != spec.stored_bytes:  # access beyond the end of the file is SIGBUS
            raise self._corrupt(want.leaf, "the file is truncated")
        return {want.regions[0]: data.view(spec.numpy_dtype).reshape(spec.shape)}

    def _buffers(self, want: Want) -> dict[Region, Array]:
        dtype = want.dtype or self._item.specs[want.leaf].numpy_dtype
        return {region: aligned(region_shape(region), dtype) for region in want.regions}

    def jobs(self, leaf: int, shares: Sequence[Share]) -> Iterator[Callable[[], None]]:
        """Jobs that each read a few MiB of an array for all shares that need some of it."""
        spec = self._item.specs[leaf]
        reads = ReadsOf(functools.partial(self._read, leaf), spec.numpy_dtype, self._gap_bytes)
        regions = [region for region, _ in shares]
        for piece in pieces(spec.shape, spec.numpy_dtype.itemsize, regions, PIECE_BYTES):
            parts: list[Share] = [
                (taker.part, shares[taker.number][1][(*taker.place, ...)]) for taker in piece.takers
            ]
            offset = self._item.offsets[leaf] + piece.offset_bytes
            yield functools.partial(fill, reads, offset, piece.shape, parts)

    def _joined(
        self, file: str, reads: Sequence[tuple[Want, dict[Region, Array]]]
    ) -> Iterator[Callable[[], None]]:
        """Jobs that each read several small arrays of one file at once."""
        ranges = [
            (self._item.offsets[want.leaf], self._item.specs[want.leaf].stored_bytes)
            for want, _ in reads
        ]
        for offset, size, members in coalesce(
            ranges, gap_bytes=self._gap_bytes, limit_bytes=_JOIN_LIMIT_BYTES
        ):

            def job(offset: int = offset, size: int = size, members: list[int] = members) -> None:
                buffer = np.empty(size, np.uint8)
                self._read(reads[members[0]][0].leaf, offset, buffer)
                for member in members:
                    want, parts = reads[member]
                    start = ranges[member][0] - offset
                    spec = self._item.specs[want.leaf]
                    values = np.empty(spec.shape, spec.numpy_dtype)
                    values.reshape(-1).view(np.uint8)[:] = buffer[start : start + spec.stored_bytes]
                    take(values, list(parts.items()))

            yield job

    def _read(self, leaf: int, offset: int, target: Array) -> None:
        if self._files.read(self._item.files[leaf], offset, target) != target.size:
            raise self._corrupt(leaf, "the file is truncated")

    def _corrupt(self, leaf: int, what: str) -> CheckpointCorrupt:
        where, file = format_path(self._item.paths[leaf]), self._item.files[leaf]
        return CheckpointCorrupt(
            f"{self._checkpoint.path}: tensor {where}, file {file}: {what}", file=file, leaf=where
        )
