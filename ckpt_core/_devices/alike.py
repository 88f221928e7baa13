"""Copies of many arrays of one shape, a group at a time: a call for each array costs more than a small array's copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._lazy import jax

_GROUP = 64
"""Arrays of one kind that are copied by one call. Of fewer, copies one by one take less than to compile a program for them."""
_MOST_KINDS = 8
"""For each item. A first save waits 0.1 s for each program, and there is one for each device, too."""
_SMALL_BYTES = 64 * 1024
"""Arrays up to this size are stacked."""


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


def stack_small(arrays: dict[Any, Any], names: Collection[Any]) -> None:
    """Replaces groups of small arrays by rows of a copy on their device; if it has no memory for that, leaves the rest."""
    for group in _alike(arrays, names):
        values = [arrays[name] for name in group]
        if len(group) == 1 or not _is_stacked(values[0]):
            continue
        try:
            stack = _in_own_mesh(_stack(), values)
        except jax.errors.JaxRuntimeError:
            return
        dtype = values[0].dtype
        arrays.update({name: Row(stack, index, dtype) for index, name in enumerate(group)})


def copy_there(arrays: dict[Any, Any], names: Collection[Any]) -> None:
    """Replaces arrays by copies in the same memory of their device; does not wait for them."""
    for group in _alike(arrays, names):
        arrays.update(zip(group, copies([arrays[name] for name in group]), strict=True))


def copies(values: list[Any]) -> list[Any]:
    """Enqueues copies of arrays of one device in its memory."""
    return _in_own_mesh(_copies(), values)


def _alike(arrays: dict[Any, Any], names: Collection[Any]) -> Iterator[list[Any]]:
    """Groups of names whose arrays have one device, kind of memory, shape and dtype; of one name where few are alike."""
    found: dict[Any, list[Any]] = {}
    for name in names:
        value = arrays[name]
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
