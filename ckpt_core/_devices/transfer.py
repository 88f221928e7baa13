"""Device memory to host memory: snapshots that later steps of the caller cannot change.

Many arrays of one shape are copied a group at a time: a call for each costs more than a small array's copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpt_core._devices.shardings import LocalShards
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
_GROUP = 64
"""Arrays of one kind that are copied by one call. Of fewer, copies one by one take less than to compile a program for them."""
_MOST_KINDS = 8
"""For each item. A first save waits 0.1 s for each program, and there is one for each device, too."""
_SMALL_BYTES = 64 * 1024
"""Arrays up to this size are stacked."""


def bring_to_host(arrays: dict[Any, Any], copy: Copy | None = None, *, staged: bool) -> None:
    """Replaces arrays of single devices by host arrays that no later step changes; blocks until they are there. On CPU,
    ``np.asarray`` is a view of the array's buffer and keeps a reference to it: a later step that donates the array gets a new
    buffer. An accelerator copies to page-locked memory, which is then viewed. That runs at the speed of its bus; a copy to
    memory that the system has to give first runs at a thirtieth of it. ``copy`` also copies what is on the host, if its owner
    could write to it; ``staged`` arrays are copies, which ``stage`` made.
    """
    accelerated = has_room = jax.default_backend() != "cpu"
    with fetching(), jax.debug_nans(False), jax.debug_infs(False):  # a NaN of the state is no error
        if accelerated and not staged:
            stack_small(arrays)
        names = [name for name, one in arrays.items() if not isinstance(one, np.ndarray)]
        rows = {name: one for name in names if isinstance(one := arrays[name], Row)}
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
    with jax.debug_nans(False), jax.debug_infs(False):
        stack_small(arrays)
        if where == "device":
            for group in _alike(arrays):
                arrays.update(zip(group, copies([arrays[name] for name in group]), strict=True))
            return
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


def held_data(array: Any, held: LocalShards) -> list[Any]:
    """The single-device arrays of the regions in ``held.mine``."""
    if held.mine and held.mine[0][2] is None:
        # one that has a mesh, if only of one device, could not be copied outside of it
        plain = isinstance(array.sharding, jax.sharding.SingleDeviceSharding)
        return [array if plain else array.addressable_data(0)]
    by_device = {shard.device: shard for shard in array.addressable_shards}
    return [by_device[device].data for _, _, device in held.mine]


@dataclass(frozen=True)
class Row:
    """A copy of a small array, which lies with others in one array of the device: each transfer has a price."""

    # Of unsigned integers instead of floats, since on a CPU a signalling NaN becomes a quiet one otherwise.
    stack: Any
    index: int  # on the first axis of the stack
    dtype: np.dtype[Any]  # of the copied array

    def of(self, stack: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """This copy, as a view of the stack on the host."""
        return stack[self.index, ...].view(self.dtype)


def stack_small(arrays: dict[Any, Any]) -> None:
    """Replaces groups of small arrays by rows of a copy on their device; if it has no memory for that, leaves the rest."""
    for group in _alike(arrays):
        values = [arrays[name] for name in group]
        if len(group) == 1 or not _is_stacked(values[0]):
            continue
        try:
            stack = _in_own_mesh(_stack(), values)
        except jax.errors.JaxRuntimeError:
            return
        dtype = values[0].dtype
        arrays.update({name: Row(stack, index, dtype) for index, name in enumerate(group)})


def copies(values: list[Any]) -> list[Any]:
    """Enqueues copies of arrays of one device in its memory."""
    return _in_own_mesh(_copies(), values)


def _alike(arrays: dict[Any, Any]) -> Iterator[list[Any]]:
    """Groups of names whose arrays have one device, kind of memory, shape and dtype; of one name where few are alike."""
    found: dict[Any, list[Any]] = {}
    for name, value in arrays.items():
        if isinstance(value, jax.Array):
            kind = value.sharding, value.shape, value.dtype, value.weak_type
            found.setdefault(kind, []).append(name)
    for rank, alike in enumerate(sorted(found.values(), key=len, reverse=True)):
        grouped = len(alike) // _GROUP * _GROUP if rank < _MOST_KINDS else 0
        for start in range(0, grouped, _GROUP):
            yield alike[start : start + _GROUP]
        for name in alike[grouped:]:
            yield [name]


def _in_own_mesh(function: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Calls a compiled function of arrays of one device there, and on no other that the caller has set a mesh of."""
    if jax.sharding.get_abstract_mesh().empty:
        return function(values)
    with jax.set_mesh(_alone(*values[0].sharding.device_set)):
        return function(values)


def _is_stacked(value: Any) -> bool:
    (device,) = value.sharding.device_set
    here = value.sharding.memory_kind == device.default_memory().kind
    return here and 0 < value.nbytes <= _SMALL_BYTES and _of_bits(value.dtype) is not None


@functools.cache
def _of_bits(dtype: Any) -> str | None:
    """Name of a dtype of integers that holds the bits of this one, in each mode of jax; None if there is none."""
    if dtype.kind in "biu":
        return dtype.name if dtype.itemsize <= 4 else None
    bits = jax.numpy.finfo(dtype).bits if jax.numpy.issubdtype(dtype, jax.numpy.floating) else 0
    return f"uint{bits}" if bits in (8, 16, 32) else None


@functools.cache
def _stack() -> Callable[[list[Any]], Any]:
    def stack(values: list[Any]) -> Any:
        name = _of_bits(values[0].dtype)
        if name is not None and name != values[0].dtype.name:
            values = [jax.lax.bitcast_convert_type(value, name) for value in values]
        return jax.numpy.stack(values)

    return jax.jit(stack)


@functools.cache
def _copies() -> Callable[[list[Any]], list[Any]]:
    """Takes a tenth of the time of ``jax.numpy.copy`` to enqueue them."""
    return jax.jit(lambda values: [jax.numpy.copy(value) for value in values])


@functools.lru_cache(64)
def _alone(device: Any) -> Any:
    return jax.sharding.Mesh(np.array([device]), ("alone",))


Array = np.ndarray[Any, Any]
Copy = Callable[[Array], Array]
"""A function that copies a host array which the caller may change later."""


class Staging:
    """Copies arrays into buffers that successive saves reuse; keeps at most ``limit_bytes`` of them between saves. New memory
    costs a page fault per 4 KiB, which takes several times as long as the copy itself.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.lent: list[Array] = []  # in use since the last ``release``
        self._limit_bytes = limit_bytes
        self._free: dict[tuple[np.dtype[Any], tuple[int, ...]], list[Array]] = {}

    def copy(self, array: Array) -> Array:
        """A copy in C order."""
        free = self._free.get((array.dtype, array.shape))
        buffer = free.pop() if free else np.empty(array.shape, array.dtype)
        np.copyto(buffer, array)
        self.lent.append(buffer)
        return buffer

    def lend(self, users: int) -> Callable[[], None]:
        """Begins a snapshot; each of the ``users`` saves that read it calls the result after its last read."""
        if self.lent:
            self.release()
        reading = list(range(users))

        def release() -> None:
            if reading.pop() == 0:  # one atomic call: of two threads, one gets the last
                self.release()

        return release

    def release(self) -> None:
        """Makes the lent buffers reusable, after their last read, and frees those not lent."""
        self._free = {}
        kept_bytes = 0
        for buffer in self.lent:
            kept_bytes += buffer.nbytes
            if kept_bytes > self._limit_bytes:
                break
            self._free.setdefault((buffer.dtype, buffer.shape), []).append(buffer)
        self.lent = []
