"""Sends bytes between processes over the interconnect of their devices.

The only module that runs device collectives. They run on the caller's thread, and all processes
must run them in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointError
from ckpt_core._lazy import jax

_LANE = np.dtype(np.uint32)
_SMALLEST_LANES = 1024
_STEPS_AN_OCTAVE = 8

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def room(size_bytes: int) -> Bytes:
    """A zeroed buffer of at least ``size_bytes``, rounded up: ``join`` compiles once per size."""
    lanes = max(_SMALLEST_LANES, -(-size_bytes // _LANE.itemsize))
    step = max(1, (1 << (lanes - 1).bit_length()) // (2 * _STEPS_AN_OCTAVE))
    return np.zeros(-(-lanes // step) * step * _LANE.itemsize, np.uint8)


def join(filled: Bytes, holders: tuple[int, ...]) -> Bytes:
    """The union of the buffers of all ``holders``, read-only; exactly these processes must call it; blocks. At most one process
    has set each byte, and it is zero in the others, so the sum of the buffers as integers is exact. ``filled`` is a buffer from
    ``room``, equally large on all holders, and must not change afterwards; ``holders`` are ascending. One device of each
    process takes part. Raises CheckpointError if the collective failed; the time limit is jax's, not ``timeout_secs``.
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
