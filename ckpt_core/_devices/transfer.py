"""Device memory to host memory: snapshots that later steps of the caller cannot change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from ckpt_core._devices.shardings import LocalShards
from ckpt_core._errors import CheckpointError
from ckpt_core._layout.regions import Region
from ckpt_core._lazy import jax

Piece = tuple[Region, np.ndarray[Any, Any]]


def start_transfers(arrays: Iterable[Any]) -> None:
    """Starts the transfers of all arrays to the host; does not wait. No effect on CPU.

    On CPU, ``np.asarray`` is a view of the array's buffer and keeps a reference to it. A later step
    that donates the array then gets a new buffer.
    """
    if jax.default_backend() == "cpu":
        return
    with fetching():
        for value in arrays:
            if isinstance(value, jax.Array):
                value.copy_to_host_async()


def fetching() -> contextlib.AbstractContextManager[object]:
    """Context in which transfers to the host are explicit, as with ``jax.device_get``.

    ``jax.transfer_guard("disallow")`` permits them, ``"disallow_explicit"`` does not.
    """
    try:
        from jax._src.config import explicit_device_get_scope
    except ImportError:  # private in jax; ignoring a guard is better than a failed save
        return jax.transfer_guard_device_to_host("allow")
    return explicit_device_get_scope()


def stage(arrays: dict[Any, Any], where: str) -> None:
    """Replaces arrays by copies in other memory of their device; does not wait for the copies.

    The copies are enqueued on the device before the caller's next step, which may donate the
    original.

    Args:
        arrays: arrays of single devices; changed in place.
        where: ``device``, or a memory kind that the device can address, such as ``pinned_host``.

    Raises:
        CheckpointError: the device has no such memory.
    """
    for name, value in arrays.items():
        if isinstance(value, jax.Array):
            arrays[name] = _copied(value, where)


def _copied(value: Any, where: str) -> Any:
    (device,) = value.sharding.device_set
    if where == "device":
        return jax.numpy.copy(value)
    if all(memory.kind != where for memory in device.addressable_memories()):
        kinds = ", ".join(memory.kind for memory in device.addressable_memories())
        raise CheckpointError(
            f"Options.snapshot={where!r}: {device} has no such memory, it has {kinds}; use 'host'"
        )
    target = jax.sharding.SingleDeviceSharding(device, memory_kind=where)
    if value.sharding.memory_kind == where:
        # Already in that memory: device_put would return the same buffer.
        return jax.numpy.copy(value)
    return jax.device_put(value, target)


def held_data(array: Any, held: LocalShards) -> list[Any]:
    """The single-device arrays of the regions in ``held.mine``."""
    if held.mine and held.mine[0][2] is None:
        return [array if len(array.sharding.device_set) == 1 else array.addressable_data(0)]
    by_device = {shard.device: shard for shard in array.addressable_shards}
    return [by_device[device].data for _, _, device in held.mine]
