"""Bytes from some processes to others over what connects their devices.

The only module that runs device collectives: on the caller's thread, in the same order on all.
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
    """Zeros for so many bytes, or a little more: few sizes, as each is compiled for."""
    lanes = max(_SMALLEST_LANES, -(-size_bytes // _LANE.itemsize))
    step = max(1, (1 << (lanes - 1).bit_length()) // (2 * _STEPS_AN_OCTAVE))
    return np.zeros(-(-lanes // step) * step * _LANE.itemsize, np.uint8)


def join(filled: Bytes, holders: tuple[int, ...]) -> Bytes:
    """What all ``holders`` together have filled in; all of them must call it, and none else.

    Every byte is filled in by one of them at most, and zero with the others, so that adding them up
    as integers gives each bit as it was. One device of each process takes part.

    Args:
        filled: from ``room``, of the same size in all; not to be changed any more.
        holders: indices of the processes, in order.

    Returns:
        Memory that must not be written to.

    Raises:
        CheckpointError: the runtime could not; when it gives up waiting is its own affair.
    """
    add, mesh = _adder(holders)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    mine = jax.device_put(filled.view(_LANE)[None], _first_device(jax.process_index()))
    shape = (len(holders), mine.shape[1])
    everyone = jax.make_array_from_single_device_arrays(shape, sharding, [mine])
    # a mesh that the caller has set has nothing to do with this one
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
    """The same device of a process for all."""
    mine = (device for device in jax.devices() if device.process_index == process)
    return min(mine, key=lambda device: device.id)
