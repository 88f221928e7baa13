"""Host memory to device memory: arrays, keys and weak scalars, put where they belong.

All transfers are explicit, as those of ``jax.device_put`` are: under ``jax.transfer_guard("disallow")``
they pass, under ``"disallow_explicit"`` they do not.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ckpt_core._layout.regions import Region, Shape, to_region
from ckpt_core._lazy import jax
from ckpt_core._tree.leaves import KEY_WORDS

Parts = dict[Region, np.ndarray[Any, Any]]


class _Quick(NamedTuple):
    """What ``jax.device_put`` ends in, which is not public, and what tells jax that it is explicit."""

    put: Callable[..., Any]
    explicit: Callable[[], contextlib.AbstractContextManager[None]]


class _QuickWay:
    """The quick way as long as jax has it; where it lacks or changed it, ``jax.device_put`` stands in."""

    def __init__(self) -> None:
        self._found: _Quick | None = None
        self._looked = False

    def get(self) -> _Quick | None:
        if not self._looked:
            try:
                from jax._src.config import explicit_device_put_scope
                from jax._src.interpreters.pxla import batched_device_put

                self._found = _Quick(batched_device_put, explicit_device_put_scope)
            except ImportError as error:
                self._say(error)
            self._looked = True
        return self._found

    def give_up(self, error: Exception) -> None:
        """It is there and does not take what it took."""
        if self._found is not None:
            self._found = None
            self._say(error)

    def _say(self, error: Exception) -> None:
        logging.getLogger("ckpt_core").warning(
            "jax %s has changed what ckpt places small arrays with (%s: %s): they take the way of "
            "jax.device_put, which is slower",
            jax.__version__,
            type(error).__name__,
            error,
        )


_quick_way = _QuickWay()


def place(shape: Shape, sharding: Any, parts: Parts, dtype: Any = None) -> Any:
    """A jax array of these host parts on ``sharding``, or uncommitted on the default device.

    There are no parts where none of the devices is of this process: ``dtype`` counts then. On CPU
    the array may take over the memory of a part: it must not be used again.
    """
    if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (part,) = parts.values()
        return _put(part, sharding)
    if not parts:
        # the callback would be asked for what is replicated over the devices of others
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    quick = _quick_way.get()
    if quick is not None:
        with quick.explicit():
            return jax.make_array_from_callback(
                shape, sharding, lambda index: parts[to_region(index, shape)], dtype=dtype
            )
    indices = sharding.addressable_devices_indices_map(shape)
    kind = sharding.memory_kind
    placed = [
        jax.device_put(
            parts[to_region(index, shape)],
            jax.sharding.SingleDeviceSharding(device, memory_kind=kind),
        )
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed, dtype=dtype)


def _put(part: np.ndarray[Any, Any], sharding: Any) -> Any:
    """One host array on one device: what ``jax.device_put`` ends in, at a tenth of its cost.

    An array of a tree of thousands costs 80 us in device_put, nearly all of it Python.
    """
    target = _on(_default_device()) if sharding is None else sharding
    made = _put_quickly(_shaped(part.shape, part.dtype), target, part, sharding is not None)
    return jax.device_put(part, sharding) if made is None else made


def _put_quickly(aval: Any, sharding: Any, part: np.ndarray[Any, Any], committed: bool) -> Any:
    """The same host array on every device of this process; None where the quick way is closed."""
    quick = _quick_way.get()
    if quick is None:
        return None
    single = isinstance(sharding, jax.sharding.SingleDeviceSharding)
    devices: list[Any] = list(
        sharding.device_set if single else sharding.addressable_devices_indices_map(part.shape)
    )
    try:
        with quick.explicit():
            return quick.put(aval, sharding, [part] * len(devices), devices, committed=committed)
    except (TypeError, AttributeError) as error:  # not what a transfer raises: another signature
        _quick_way.give_up(error)
        return None


@functools.lru_cache(1024)
def _shaped(shape: Shape, dtype: np.dtype[Any]) -> Any:
    """What jax calls an array of this shape: many are alike."""
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
    """A typed PRNG key array from its key data; ``parts`` are keyed by regions of the keys.

    There are none where no device of ``sharding`` is of this process.
    """
    words = KEY_WORDS[impl]
    data_shape = (*shape, words)
    data_sharding = sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        # jax reports P(None,) for a scalar key on an explicit mesh, which it then does not accept
        spec = [*sharding.spec[: len(shape)], *[None] * (len(shape) - len(sharding.spec)), None]
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec[:-1]))
        data_sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    with_words = {(*region, (0, words)): part for region, part in parts.items()}
    key = jax.random.wrap_key_data(
        place(data_shape, data_sharding, with_words, np.dtype(np.uint32)), impl=impl
    )
    if isinstance(sharding, jax.sharding.NamedSharding) and key.sharding != sharding:
        key = jax.device_put(key, sharding)
    return key


def place_weak(part: np.ndarray[Any, Any], sharding: Any) -> Any:
    """A weakly typed scalar; None where jax gives no way to one of this dtype on that sharding.

    Weakness decides what ``scalar * array`` is computed in, so losing it would change results.
    """
    target = _on(_default_device()) if sharding is None else sharding
    aval = jax.core.ShapedArray((), part.dtype, weak_type=True)
    made = _put_quickly(aval, target, part, sharding is not None)
    if made is not None:
        return made
    if sharding is not None and not sharding.is_fully_addressable:
        return None
    made = jax.device_put(part.item(), sharding)
    return made if made.dtype == part.dtype else None
