"""Device memory to host memory: snapshots that later steps of the caller cannot change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_core._devices.alike import Row, copies, copy_there, stack_small
from ckpt_core._devices.shardings import LocalShards
from ckpt_core._devices.staging import Copy
from ckpt_core._errors import CheckpointError
from ckpt_core._layout.regions import Region
from ckpt_core._lazy import jax
from ckpt_core._options import GIB

Piece = tuple[Region, np.ndarray[Any, Any]]

_PAGE_LOCKED = "pinned_host"
_MOST_PAGE_LOCKED_BYTES = 24 * GIB
"""For each item of a save. jax keeps what it takes, and takes 64 GiB in all, or XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB: if items
need more, it waits 10 s for room, and all of the item that was to be sent then is fetched the slow way."""
_AT_A_TIME_BYTES = GIB


def bring_to_host(
    arrays: dict[Any, Any], names: Collection[Any], copy: Copy | None = None, *, staged: bool
) -> None:
    """Replaces these arrays of single devices by host arrays that no later step changes; blocks until they are there. On CPU,
    ``np.asarray`` is a view of the array's buffer and keeps a reference to it: a later step that donates the array gets a new
    buffer. An accelerator copies to page-locked memory, which is then viewed. That runs at the speed of its bus; a copy to
    memory that the system has to give first runs at a thirtieth of it. ``copy`` also copies what is on the host, if its owner
    could write to it; ``staged`` arrays are copies, which ``stage`` made.
    """
    accelerated = has_room = jax.default_backend() != "cpu"
    with fetching(), _unchecked() if accelerated else contextlib.nullcontext():
        if accelerated and not staged:
            stack_small(arrays, names)
        rows: dict[Any, Row] = {}
        if accelerated or staged:
            rows = {name: arrays[name] for name in names if isinstance(arrays[name], Row)}
        stacks = {id(row.stack): row.stack for row in rows.values()}
        arrays |= stacks
        each = [*stacks, *(name for name in names if name not in rows)] if rows else names
        for group, stays in _groups(arrays, each) if accelerated else [(each, True)]:
            if accelerated:
                has_room = _send(arrays, group, staged, has_room)
            for name in group:
                host = np.asarray(arrays[name])
                if not stays and arrays[name].sharding.memory_kind == _PAGE_LOCKED:
                    host = np.array(host)
                arrays[name] = host if copy is None else copy(host)
        for name, row in rows.items():
            arrays[name] = row.of(arrays[id(row.stack)])
        for name in stacks:
            del arrays[name]


def _groups(arrays: dict[Any, Any], names: Collection[Any]) -> Iterator[tuple[list[Any], bool]]:
    """What is sent at once: first as much as may stay in page-locked memory, then some at a time, which is copied from there."""
    group: list[Any] = []
    size_bytes, limit_bytes, stays = 0, _MOST_PAGE_LOCKED_BYTES, True
    for name in names:
        if group and size_bytes + arrays[name].nbytes > limit_bytes:
            yield group, stays
            group, size_bytes, limit_bytes, stays = [], 0, _AT_A_TIME_BYTES, False
        group.append(name)
        size_bytes += arrays[name].nbytes
    yield group, stays


def _send(arrays: dict[Any, Any], names: Collection[Any], staged: bool, has_room: bool) -> bool:
    """Starts the transfers from accelerators to the host; does not wait. Gives whether jax still has page-locked memory. One
    call sends all: what is sent after the caller has enqueued a step is sent when that has ended, and the step's result, which
    the caller reads, after it.
    """
    targets: dict[Any, Any] = {}
    for name in names:
        value = arrays[name]
        target = _page_locked(*value.sharding.device_set)
        if target and not staged and value.sharding.memory_kind == target.memory_kind:
            arrays[name] = copies([value])[0]  # a view would be of the caller's buffer
        if target and has_room:
            targets[name] = target
    if targets:
        try:
            sent = jax.device_put([arrays[name] for name in targets], [*targets.values()])
            arrays |= zip(targets, sent, strict=True)
        except jax.errors.JaxRuntimeError:  # jax has waited 10 s for room
            has_room, targets = False, {}
    for name in names:
        if name not in targets:
            arrays[name].copy_to_host_async()
    return has_room


@functools.lru_cache(64)
def _page_locked(device: Any) -> Any:
    """Page-locked memory from which the host reads what this accelerator copies there; None if it has none."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "cpu" or _PAGE_LOCKED not in kinds:
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind=_PAGE_LOCKED)


def fetching() -> contextlib.AbstractContextManager[object]:
    """Context in which transfers to the host are explicit: ``jax.transfer_guard("disallow")`` permits them."""
    try:
        from jax._src.config import explicit_device_get_scope
    except ImportError:  # private in jax; ignoring a guard is better than a failed save
        return jax.transfer_guard_device_to_host("allow")
    return explicit_device_get_scope()


def stage(arrays: dict[Any, Any], where: str) -> None:
    """Replaces arrays of single devices by copies in other memory of their device; does not wait for the copies. They are
    enqueued before the caller's next step, which may donate the originals. ``where`` is ``device``, or a memory kind that the
    device can address, like ``pinned_host``; raises CheckpointError if it has none.
    """
    with _unchecked():
        stack_small(arrays, arrays.keys())
        if where == "device":
            return copy_there(arrays, arrays.keys())
        stacks = {id(row.stack): row.stack for row in arrays.values() if isinstance(row, Row)}
        single = {name: one for name, one in arrays.items() if isinstance(one, jax.Array)}
        moved = _moved(stacks | single, where)
        for name, value in arrays.items():
            if isinstance(value, Row):
                arrays[name] = replace(value, stack=moved[id(value.stack)])
            elif name in single:
                arrays[name] = moved[name]


def _moved(arrays: dict[Any, Any], where: str) -> dict[Any, Any]:
    """Copies in another memory of each array's device."""
    there: dict[Any, Any] = {}
    targets: dict[Any, Any] = {}
    for name, value in arrays.items():
        (device,) = value.sharding.device_set
        if all(memory.kind != where for memory in device.addressable_memories()):
            kinds = ", ".join(memory.kind for memory in device.addressable_memories())
            raise CheckpointError(
                f"Options.snapshot={where!r}: {device} has no such memory, it has {kinds}; use 'host'"
            )
        if value.sharding.memory_kind == where:
            there[name] = copies([value])[0]  # device_put would return the same buffer
        else:
            targets[name] = jax.sharding.SingleDeviceSharding(device, memory_kind=where)
    if targets:
        put = jax.device_put([arrays[name] for name in targets], [*targets.values()])
        there |= zip(targets, put, strict=True)
    return there


@contextlib.contextmanager
def _unchecked() -> Generator[None]:
    """Context in which a NaN of the state is no error of a copy."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def held_data(array: Any, held: LocalShards) -> list[Any]:
    """The single-device arrays of the regions in ``held.mine``."""
    if held.mine and held.mine[0][2] is None:
        # one that has a mesh, if only of one device, could not be copied outside of it
        plain = isinstance(array.sharding, jax.sharding.SingleDeviceSharding)
        return [array if plain else array.addressable_data(0)]
    by_device = {shard.device: shard for shard in array.addressable_shards}
    return [by_device[device].data for _, _, device in held.mine]
