"""Shardings: which process holds which region of an array; to and from JSON; and arrays, PRNG keys and weakly typed scalars
that are placed on them.

All transfers to devices are explicit, as with ``jax.device_put``: ``jax.transfer_guard("disallow")`` permits them,
``"disallow_explicit"`` does not.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._format.part import runs_of
from ckpt_core._layout.regions import Region, Shape, to_region, whole
from ckpt_core._lazy import jax
from ckpt_core._tree.leaves import KEY_WORDS


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards of an array, and those that this process holds."""

    # A few regions that together have the boundaries of all shards, per dimension.
    cuts: tuple[Region, ...]
    # Each distinct region here, the indices of all processes that hold it, and a device here that does (None: a local array).
    mine: tuple[tuple[Region, tuple[int, ...], Any], ...]
    most_holders: int = 1  # of one region
    processes: int = 1  # that hold any of it
    most_regions: int = 1  # that one of these holds


def local_shards(sharding: Any, committed: bool, shape: Shape, process: int) -> LocalShards:
    """The shards of an array of this global shape, and those that ``process``, the index of this process, holds."""
    single = isinstance(sharding, jax.sharding.SingleDeviceSharding)
    if sharding.is_fully_addressable and (single or sharding.is_fully_replicated):
        region = whole(shape)
        # Uncommitted: each process has its own array, as with a numpy array; process 0 writes it.
        writer = 0 if single and not committed else process
        return LocalShards((region,), ((region, (writer,), None),))
    return _held(sharding, shape, process)


@functools.lru_cache(4096)
def _held(sharding: Any, shape: Shape, process: int) -> LocalShards:
    """``local_shards`` of a distributed array; cached, since it loops over all devices."""
    holders: dict[Region, set[int]] = {}
    mine: dict[Region, Any] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        region = to_region(index, shape)
        holders.setdefault(region, set()).add(device.process_index)
        if device.process_index == process:
            mine.setdefault(region, device)
    edges = [sorted({region[axis] for region in holders}) for axis in range(len(shape))]
    longest = max(map(len, edges), default=1)
    cuts = tuple(tuple(axis[min(n, len(axis) - 1)] for axis in edges) for n in range(longest))
    regions_of = Counter(one for those in holders.values() for one in those)
    return LocalShards(
        cuts,
        tuple((region, tuple(sorted(holders[region])), mine[region]) for region in sorted(mine)),
        max(map(len, holders.values())),
        len(regions_of),
        max(regions_of.values()),
    )


def describe_sharding(sharding: Any) -> dict[str, Any] | None:
    """The sharding as JSON in Orbax's form; None for types that Orbax does not support."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh: Any = sharding.mesh
        ids = np.vectorize(lambda device: {"id": int(device.id)}, otypes=[object])
        described: dict[str, Any] = {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.devices.shape),
            "axis_names": list(mesh.axis_names),
            "axis_types": [f"AxisType.{kind.name}" for kind in mesh.axis_types],
            "partition_spec": [
                list(part) if isinstance(part, tuple) else part for part in sharding.spec
            ],
            "device_mesh": {"mesh": ids(mesh.devices).tolist()},
        }
    elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        described = {"sharding_type": "SingleDeviceSharding", "device_str": str(device)}
    else:
        return None
    kind = sharding.memory_kind
    return described if kind in (None, "device") else {**described, "memory_kind": kind}


def rebuild_sharding(
    described: dict[str, Any] | None,
    mesh: jax.sharding.Mesh | None = None,
    *,
    elsewhere: bool = False,
) -> Any:
    """The sharding from the JSON of ``describe_sharding``; None if the devices do not allow it. On another ``mesh``, dimensions
    sharded only over axes that it lacks become replicated. ``elsewhere``: a single device may be that of another process.
    """
    try:
        if described is None:
            return None
        if described["sharding_type"] == "SingleDeviceSharding":
            if mesh is not None:
                return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            for device in jax.devices() if elsewhere else jax.local_devices():
                if described["device_str"] in (str(device), f"{device.platform}:{device.id}"):
                    return jax.sharding.SingleDeviceSharding(
                        device, memory_kind=described.get("memory_kind")
                    )
            return None
        spec = [
            tuple(part) if isinstance(part, list) else part for part in described["partition_spec"]
        ]
        kind = None
        if mesh is None:
            mesh, kind = _saved_mesh(described), described.get("memory_kind")
        else:
            spec = [_refit(part, mesh) for part in spec]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec), memory_kind=kind)
    except Exception:  # another type, or other devices; also jax's own, if it does not fit the mesh
        return None


def _refit(part: Any, mesh: jax.sharding.Mesh) -> Any:
    names = part if isinstance(part, tuple) else (part,)
    kept = tuple(name for name in names if name in mesh.axis_names)
    return (kept[0] if len(kept) == 1 else kept) if kept else None


def _saved_mesh(described: dict[str, Any]) -> jax.sharding.Mesh:
    by_id = {device.id: device for device in jax.devices()}
    nodes = np.array(described["device_mesh"]["mesh"], dtype=object).reshape(described["shape"])
    devices = np.vectorize(lambda node: by_id[node["id"]], otypes=[object])(nodes)
    types = tuple(
        getattr(jax.sharding.AxisType, str(kind).rpartition(".")[2])
        for kind in described.get("axis_types") or []
    )
    return jax.sharding.Mesh(devices, described["axis_names"], axis_types=types or None)


def wanted_sharding(leaf: Any) -> Any:
    """The sharding of a target leaf, or None; on an abstract mesh that of ``jax.set_mesh``, or ValueError."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if getattr(leaf, "committed", True) else None
    sharding: Any = getattr(leaf, "sharding", None)
    named = isinstance(sharding, jax.sharding.NamedSharding)
    if not named or isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or tuple(mesh.axis_names) != tuple(sharding.mesh.axis_names):
        raise ValueError(
            f"the target's sharding {sharding.spec} lies on an abstract mesh "
            f"{sharding.mesh.axis_names}: load inside `with jax.set_mesh(mesh):`"
        )
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def where_text(sharding: Any, committed: bool, shape: tuple[int, ...], own: bool) -> str:
    """Which device holds which part of an array, equal on all processes; with ``own`` a process that holds all is not named."""
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    if isinstance(sharding, jax.sharding.SingleDeviceSharding) and not committed:
        return f"not bound to a device{memory}"
    # in a process-local checkpoint, arrays on this process's devices concern no other process
    local = own and len({device.process_index for device in sharding.device_set}) == 1
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        where = "of one process" if local else f"{device.id} of process {device.process_index}"
        return f"device {where}{memory}"
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh: Any = sharding.mesh
        runs = runs_of(device.id for device in mesh.devices.flat)
        ids = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
        where = "of one process" if local else ids
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        return f"{_spec(sharding)} over the mesh ({axes}) of devices {where}{memory}"
    if local:
        return f"{type(sharding).__name__} of one process{memory}"
    entries = sorted(sharding.devices_indices_map(shape).items(), key=lambda entry: entry[0].id)
    regions = "; ".join(f"device {device.id} {index}" for device, index in entries)
    return f"{type(sharding).__name__} {regions}{memory}"


def _spec(sharding: Any) -> str:
    """The PartitionSpec as text, without None at its end, which changes nothing."""
    parts = list(sharding.spec)
    while parts and parts[-1] is None:
        parts.pop()
    return f"P({', '.join(map(repr, parts))})"


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
        # at a tenth of the cost of ``jax.device_put``, which is Python code
        made = _put_fast(_shaped(part.shape, part.dtype), sharding, part)
        return jax.device_put(part, sharding) if made is None else made
    if not parts:
        # make_array_from_callback would ask for regions that only other processes hold.
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    _, explicit = _private()
    with explicit():
        return jax.make_array_from_callback(
            shape, sharding, lambda index: parts[to_region(index, shape)], dtype=dtype
        )


def _put_fast(aval: Any, sharding: Any, part: np.ndarray[Any, Any]) -> Any:
    """The same host array on every device of this process, or uncommitted; None without the private functions."""
    put, explicit = _private()
    if put is None:
        return None
    committed = sharding is not None
    if not committed:
        sharding = _on(_default_device())
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
    aval = jax.core.ShapedArray((), part.dtype, weak_type=True)
    made = _put_fast(aval, sharding, part)
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
