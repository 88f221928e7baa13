"""Host memory to device memory: places arrays, PRNG keys and weakly typed scalars on shardings.

All transfers are explicit, as with ``jax.device_put``: ``jax.transfer_guard("disallow")`` permits
them, ``"disallow_explicit"`` does not.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ckpt_core._layout.regions import Region, Shape, to_region
from ckpt_core._lazy import jax
from ckpt_core._tree.leaves import KEY_WORDS

Parts = dict[Region, np.ndarray[Any, Any]]


@functools.cache
def _private() -> tuple[Callable[..., Any] | None, Callable[[], AbstractContextManager[object]]]:
    """jax's private core of ``device_put`` and explicit-transfer scope; without them None and one that permits all."""
    try:
        from jax._src.config import explicit_device_put_scope
        from jax._src.interpreters.pxla import batched_device_put
    except ImportError as error:
        _warn(type(error).__name__, str(error))
        return None, functools.partial(jax.transfer_guard_host_to_device, "allow")
    return batched_device_put, explicit_device_put_scope


@functools.cache
def _warn(kind: str, error: str) -> None:
    """Logs, once, that this version of jax is no longer known."""
    logging.getLogger("ckpt_core").warning(
        "jax %s has changed the private functions with which ckpt places arrays (%s: %s): ckpt uses "
        "jax.device_put instead, which is slower",
        *(jax.__version__, kind, error),
    )


def place(shape: Shape, sharding: Any, parts: Parts, dtype: Any = None) -> Any:
    """A jax array with ``sharding``, or uncommitted on the default device, from host arrays. ``parts`` has a value for every
    region on this process's devices; ``dtype`` is required if it is empty. On CPU the array may take over their memory: do not
    use them afterwards.
    """
    if sharding is None or (parts and isinstance(sharding, jax.sharding.SingleDeviceSharding)):
        (part,) = parts.values()
        target = _on(_default_device()) if sharding is None else sharding
        # at a tenth of the cost of ``jax.device_put``, which is Python code
        made = _put_fast(_shaped(part.shape, part.dtype), target, part, sharding is not None)
        return jax.device_put(part, sharding) if made is None else made
    if not parts:
        # make_array_from_callback would ask for regions that only other processes hold.
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    _, explicit = _private()
    with explicit():
        return jax.make_array_from_callback(
            shape, sharding, lambda index: parts[to_region(index, shape)], dtype=dtype
        )


def _put_fast(aval: Any, sharding: Any, part: np.ndarray[Any, Any], committed: bool) -> Any:
    """The same host array on every device of this process; None without the private functions."""
    put, explicit = _private()
    if put is None:
        return None
    single = isinstance(sharding, jax.sharding.SingleDeviceSharding)
    devices: list[Any] = list(
        sharding.device_set if single else sharding.addressable_devices_indices_map(part.shape)
    )
    try:
        with explicit():
            return put(aval, sharding, [part] * len(devices), devices, committed=committed)
    except (TypeError, AttributeError) as error:  # not from a transfer: the signature has changed
        _warn(type(error).__name__, str(error))
        return None


@functools.lru_cache(1024)
def _shaped(shape: Shape, dtype: np.dtype[Any]) -> Any:
    """jax's abstract value of an array; cached, since many arrays have the same shape."""
    return jax.core.ShapedArray(shape, dtype)


@functools.lru_cache(16)
def _on(device: Any) -> Any:
    return jax.sharding.SingleDeviceSharding(device)


def _default_device() -> Any:
    config: Any = jax.config
    chosen: Any = config.jax_default_device
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def place_key(shape: Shape, impl: str, sharding: Any, parts: Parts) -> Any:
    """A typed PRNG key array from its key data, uncommitted without ``sharding``; ``shape`` and regions are those of the keys."""
    words = KEY_WORDS[impl]
    data_shape = (*shape, words)
    data_sharding = sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        # For a scalar key on an explicit mesh, jax reports the spec P(None,) but rejects it as
        # input.
        spec = [*sharding.spec[: len(shape)], *[None] * (len(shape) - len(sharding.spec)), None]
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec[:-1]))
        data_sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    with_words = {(*region, (0, words)): part for region, part in parts.items()}
    with jax.ensure_compile_time_eval():  # where a function is being traced, as for other arrays
        key = jax.random.wrap_key_data(
            place(data_shape, data_sharding, with_words, np.dtype(np.uint32)), impl=impl
        )
        if isinstance(sharding, jax.sharding.NamedSharding) and key.sharding != sharding:
            key = jax.device_put(key, sharding)
    return key


def place_weak(part: np.ndarray[Any, Any], sharding: Any) -> Any:
    """A weakly typed scalar, as its type decides that of ``scalar * array``; None if jax cannot create it there."""
    target = _on(_default_device()) if sharding is None else sharding
    aval = jax.core.ShapedArray((), part.dtype, weak_type=True)
    made = _put_fast(aval, target, part, sharding is not None)
    if made is not None:
        return made
    if sharding is not None and not sharding.is_fully_addressable:
        return None
    made = jax.device_put(part.item(), sharding)
    return made if made.dtype == part.dtype else None


def free_bytes() -> int | None:
    """Free memory of the default device in bytes; None if the platform does not report it."""
    stats = _default_device().memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
