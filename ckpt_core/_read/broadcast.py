"""Loads with ``broadcast=True``: of the processes that hold a region, one reads it and sends it.

In rounds of at most 64 MiB for each process, all read their shares, agree that every read succeeded, and exchange replicated
regions over the devices. The rounds follow from shapes, shardings and ``max_host_bytes``, which they have compared before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._devices.shardings import LocalShards, local_shards
from ckpt_core._errors import CheckpointError
from ckpt_core._layout.chunks import WriterTurns, rows_per_block
from ckpt_core._layout.regions import Region, Shape, region_shape
from ckpt_core._lazy import jax
from ckpt_core._options import MIB, Options
from ckpt_core._read.pipeline import read_leaves
from ckpt_core._read.wants import Array, Parts, Want, aligned
from ckpt_core._saved import Checkpoint, NativeItem, SavedItem

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ROUND_BYTES = 64 * MIB
_SLAB_BYTES = 32 * MIB
"""Larger regions are cut into slabs of whole rows, which their holders read in turns."""


class _Step(NamedTuple):
    """One leaf, or a slab of it: the same rows of each of its regions."""

    want: Want
    layout: LocalShards | None  # None if one process holds all of it
    rows: tuple[int, int] | None  # first and last (exclusive), relative to the region; None: all
    last: bool  # it completes the leaf
    size_bytes: int  # the most that any process holds of it


class _Piece(NamedTuple):
    """A replicated part of an array, which one process reads and sends to the other holders."""

    step: int  # position in the round
    part: Region  # the rows of a region that are read; all of it if it is read whole
    reader: int  # index of the process that reads it
    size_bytes: int
    dtype: np.dtype[Any]


def read_and_send(
    agree: Callable[[], object],
    process: int,
    checkpoint: Checkpoint,
    item: SavedItem,
    wants: Sequence[Want],
    options: Options,
    watch: Callable[[int], None] | None = None,
) -> Generator[tuple[Want, Parts]]:
    """What ``read_leaves`` yields, but only one process reads, verifies and sends each replicated region. All processes of the load
    must call it, with the same leaves and shardings. ``agree`` waits for them, so that none waits in a collective for one that
    failed; ``process`` is the index of this one.
    """
    limit_bytes = min(_ROUND_BYTES, max(1, options.max_host_bytes // 4))
    turns = WriterTurns()  # so that all read about the same number of bytes
    rounds = [
        (steps, *_pieces(item, steps, turns))
        for steps in _rounds(_steps(item, wants, process, limit_bytes), limit_bytes)
    ]
    here: list[Want] = []  # what this process reads
    for steps, shared, alone in rounds:
        for piece in itertools.chain.from_iterable(shared.values()):
            if piece.reader == process:
                alone[piece.step].append(piece.part)
        here += [Want(step.want.leaf, parts) for step, parts in zip(steps, alone, strict=True)]
    with contextlib.closing(read_leaves(checkpoint, item, here, options, watch)) as source:
        parts: Parts = {}
        for steps, shared, _ in rounds:
            read = [next(source)[1] for _ in steps]
            # all memory before the processes agree: none waits in a collective for one that has too little
            rooms = {holders: _room(pieces, read, process) for holders, pieces in shared.items()}
            agree()
            # sorted: if two groups share processes, these all run the two collectives in one order
            for holders in sorted(shared):
                joined, start = _union(rooms[holders], holders), 0
                for piece in shared[holders]:
                    if piece.reader != process:
                        received = _bytes_of(read[piece.step][piece.part])
                        received[:] = joined[start : start + piece.size_bytes]
                    start += piece.size_bytes
            for step, found in zip(steps, read, strict=True):
                if step.rows is None:
                    yield step.want, found
                    continue
                for region in step.want.regions:
                    if region not in parts:
                        dtype = item.specs[step.want.leaf].numpy_dtype
                        parts[region] = aligned(region_shape(region), dtype)
                    parts[region][slice(*step.rows)] = found[_rows_of(region, step.rows)]
                if step.last:
                    yield step.want, parts
                    parts = {}


def _pieces(
    item: SavedItem, steps: Sequence[_Step], turns: WriterTurns
) -> tuple[dict[tuple[int, ...], list[_Piece]], list[list[Region]]]:
    """What this process needs in a round: the replicated pieces, by their holders; and for each step what it alone holds."""
    shared: dict[tuple[int, ...], list[_Piece]] = {}
    alone: list[list[Region]] = []
    for number, (want, layout, rows, *_) in enumerate(steps):
        spec = item.specs[want.leaf]
        alone.append([])
        holders_of = {region: holders for region, holders, _ in layout.mine} if layout else {}
        for region in want.regions:
            holders = holders_of[region[: len(spec.shape)]] if layout else ()
            part = _rows_of(region, rows)
            size_bytes = spec.numpy_dtype.itemsize * math.prod(region_shape(part))
            if len(holders) < 2 or not size_bytes:
                alone[-1].append(part)
                continue
            reader = turns.writer(holders, size_bytes)
            piece = _Piece(number, part, reader, size_bytes, spec.numpy_dtype)
            shared.setdefault(holders, []).append(piece)
    return shared, alone


def _room(pieces: Sequence[_Piece], read: list[Parts], process: int) -> Bytes:
    """Memory for one exchange: the pieces in order, zeros where another process reads one, for which ``read`` gets a buffer."""
    filled, start = _zeroed_lanes(sum(piece.size_bytes for piece in pieces)), 0
    for piece in pieces:
        parts = read[piece.step]
        if piece.reader == process:
            filled[start : start + piece.size_bytes] = _bytes_of(parts[piece.part])
        else:
            parts[piece.part] = aligned(region_shape(piece.part), piece.dtype)
        start += piece.size_bytes
    return filled


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _steps(item: SavedItem, wants: Sequence[Want], process: int, limit_bytes: int) -> list[_Step]:
    """The steps of all leaves in order, the same on all processes; a leaf with regions above 32 MiB takes several."""
    steps: list[_Step] = []
    for want in wants:
        spec = item.specs[want.leaf]
        sharding = want.sharding
        layout = None if sharding is None else local_shards(sharding, True, spec.shape, process)
        if layout is None or layout.processes == 1:
            steps.append(_Step(want, None, None, True, spec.stored_bytes))
            continue
        # jax shards evenly: all regions have the same shape
        shard: Shape = want.sharding.shard_shape(spec.shape)
        shape = (*shard, *spec.stored_shape[len(spec.shape) :])
        row_bytes = max(1, spec.numpy_dtype.itemsize * math.prod(shape[1:]))
        all_rows = shape[0] if shape else 1
        slab_rows = max(1, min(_SLAB_BYTES, limit_bytes) // row_bytes)
        if slab_rows < all_rows and isinstance(item, NativeItem) and item.chunks[want.leaf]:
            block_rows = rows_per_block(item.chunks[want.leaf], spec.numpy_dtype.itemsize)
            slab_rows = max(1, slab_rows // block_rows) * block_rows
        for first in range(0, max(1, all_rows), slab_rows):
            stop = min(first + slab_rows, all_rows)
            rows = None if stop - first == all_rows else (first, stop)
            size_bytes = row_bytes * (stop - first) * layout.most_regions
            steps.append(_Step(want, layout, rows, stop == all_rows, size_bytes))
    return steps


def _rounds(steps: Sequence[_Step], limit_bytes: int) -> Iterator[list[_Step]]:
    """The steps, grouped so that no process holds more than ``limit_bytes`` of a group; a larger step is a group of its own."""
    one: list[_Step] = []
    size_bytes = 0
    for step in steps:
        if one and size_bytes + step.size_bytes > limit_bytes:
            yield one
            one, size_bytes = [], 0
        one.append(step)
        size_bytes += step.size_bytes
    if one:
        yield one


def _rows_of(region: Region, rows: tuple[int, int] | None) -> Region:
    """These rows of a region, in coordinates of the array; all of it for None."""
    if rows is None:
        return region
    start = region[0][0]
    return ((start + rows[0], start + rows[1]), *region[1:])


_LANE = np.dtype(np.uint32)
_SMALLEST_LANES = 1024
_STEPS_AN_OCTAVE = 8


def _zeroed_lanes(size_bytes: int) -> Bytes:
    """A zeroed buffer of at least ``size_bytes``, rounded up: ``_union`` compiles once per size."""
    lanes = max(_SMALLEST_LANES, -(-size_bytes // _LANE.itemsize))
    step = max(1, (1 << (lanes - 1).bit_length()) // (2 * _STEPS_AN_OCTAVE))
    return np.zeros(-(-lanes // step) * step * _LANE.itemsize, np.uint8)


def _union(filled: Bytes, holders: tuple[int, ...]) -> Bytes:
    """The union of the buffers of all ``holders``, read-only; exactly these processes must call it; blocks. At most one process
    has set each byte, and it is zero in the others, so the sum of the buffers as integers is exact. ``filled`` is a buffer from
    ``_zeroed_lanes``, and must not change afterwards. The time limit is jax's.
    """
    add, mesh = _adder(holders)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    mine = jax.device_put(filled.view(_LANE)[None], _first_device(jax.process_index()))
    shape = (len(holders), mine.shape[1])
    everyone = jax.make_array_from_single_device_arrays(shape, sharding, [mine])
    # Override the mesh that the caller may have set.
    try:
        with jax.set_mesh(mesh):
            joined = add(everyone)
        return np.asarray(joined.addressable_data(0)).view(np.uint8)
    except jax.errors.JaxRuntimeError as error:
        raise CheckpointError(
            f"processes {list(holders)} could not exchange {filled.nbytes} bytes over their devices: "
            f"{error}. Did one of them end? Options(broadcast=False) lets each read for itself"
        ) from error


@functools.lru_cache(256)
def _adder(holders: tuple[int, ...]) -> tuple[Callable[[Any], Any], jax.sharding.Mesh]:
    devices = np.array([_first_device(process) for process in holders])
    mesh = jax.sharding.Mesh(devices, ("process",))
    add = jax.jit(
        lambda lanes: lanes.sum(axis=0, dtype=_LANE),
        out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
    )
    return add, mesh


@functools.lru_cache(4096)
def _first_device(process: int) -> Any:
    """The device of a process with the smallest id: all processes choose the same one."""
    mine = (device for device in jax.devices() if device.process_index == process)
    return min(mine, key=lambda device: device.id)
