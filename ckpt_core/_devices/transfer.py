"""Device memory to host memory: copies that no later step of the caller changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ckpt_core._devices.shardings import LocalShards
from ckpt_core._errors import CheckpointError
from ckpt_core._layout.regions import Region
from ckpt_core._lazy import jax

Piece = tuple[Region, np.ndarray[Any, Any]]


def start_transfers(parts: Iterable[Sequence[Any]]) -> None:
    """Starts copying arrays to the host, all at once; nothing to do on CPU.

    There ``np.asarray`` is a view of the array's own memory: it keeps the buffer, so a later step
    that donates the array leaves it alone and takes new memory instead.
    """
    if jax.default_backend() == "cpu":
        return
    with fetching():
        for values in parts:
            for value in values:
                if isinstance(value, jax.Array):
                    value.copy_to_host_async()


def fetching() -> contextlib.AbstractContextManager[object]:
    """Inside of it arrays come to the host as ``jax.device_get`` brings them: explicitly.

    ``jax.transfer_guard("disallow")`` lets that pass, ``"disallow_explicit"`` does not.
    """
    try:
        from jax._src.config import explicit_device_get_scope
    except ImportError:  # not public; a guard that is left aside is better than no save
        return jax.transfer_guard_device_to_host("allow")
    return explicit_device_get_scope()


def stage(parts: Sequence[list[Any]], where: str) -> None:
    """Replaces arrays by copies in other memory of their device; returns while these are being made.

    A copy is enqueued before whatever the caller runs next, so a step may donate the original.

    Args:
        parts: lists of arrays that each lie on one device; changed in place.
        where: ``device``, or a kind of memory that the device can address, such as ``pinned_host``.
    """
    for values in parts:
        for position, value in enumerate(values):
            if isinstance(value, jax.Array):
                values[position] = _copied(value, where)


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
        # it lies there already: device_put would give the very same buffer
        return jax.numpy.copy(value)
    return jax.device_put(value, target)


def held_data(array: Any, held: LocalShards) -> list[Any]:
    """The data of ``held.mine``, on their devices."""
    if held.mine and held.mine[0][2] is None:
        return [array if len(array.sharding.device_set) == 1 else array.addressable_data(0)]
    by_device = {shard.device: shard for shard in array.addressable_shards}
    return [by_device[device].data for _, _, device in held.mine]


def free_bytes() -> int | None:
    """Free memory of the default device, or None where it does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
