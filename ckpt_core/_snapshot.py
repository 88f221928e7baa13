"""Device memory to host memory and back, and the shardings on either side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt_core._errors import CheckpointError
from ckpt_core._leaves import KEY_WORDS
from ckpt_core._plan import Region, Shape, to_region, whole

try:  # not public; jax.device_put stands in where a later jax lacks it
    from jax._src.interpreters.pxla import batched_device_put as _batched_device_put
except ImportError:
    _batched_device_put = None

Piece = tuple[Region, np.ndarray[Any, Any]]


def start_transfers(parts: Iterable[Sequence[Any]]) -> None:
    """Starts copying arrays to the host, all at once; nothing to do on CPU.

    There ``np.asarray`` is a view of the array's own memory: it keeps the buffer, so a later step
    that donates the array leaves it alone and takes new memory instead.
    """
    if jax.default_backend() == "cpu":
        return
    for values in parts:
        for value in values:
            if isinstance(value, jax.Array):
                value.copy_to_host_async()


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
        return jnp.copy(value)
    if all(memory.kind != where for memory in device.addressable_memories()):
        kinds = ", ".join(memory.kind for memory in device.addressable_memories())
        raise CheckpointError(
            f"Options.snapshot={where!r}: {device} has no such memory, it has {kinds}; use 'host'"
        )
    target = SingleDeviceSharding(device, memory_kind=where)
    if value.sharding.memory_kind == where:
        return jnp.copy(value)  # it lies there already: device_put would give the very same buffer
    return jax.device_put(value, target)


@dataclass(frozen=True, slots=True)
class Held:
    """How an array is cut into shards, and which of them one process holds.

    Attributes:
        cuts: regions with the borders of all shards: few, however many shards there are.
        mine: every distinct region of this process, with the processes that hold it, and a device
            of this process that does.
        most_holders: by how many processes a region is held, at most.
    """

    cuts: tuple[Region, ...]
    mine: tuple[tuple[Region, tuple[int, ...], Any], ...]
    most_holders: int


def held_regions(sharding: Any, committed: bool, shape: Shape, process: int) -> Held:
    """What this process holds of an array of that shape.

    Args:
        sharding: of the array.
        committed: whether the array is bound to the devices of the sharding.
        shape: of the array.
        process: index of this process.
    """
    single = isinstance(sharding, SingleDeviceSharding)
    if sharding.is_fully_addressable and (single or sharding.is_fully_replicated):
        region = whole(shape)
        # every process has one of its own, as it has of a numpy array: the first one writes
        writer = 0 if single and not committed else process
        return Held((region,), ((region, (writer,), None),), 1)
    return _held(sharding, shape, process)


@functools.lru_cache(4096)
def _held(sharding: Any, shape: Shape, process: int) -> Held:
    """Looks at every device once; a tree has few shardings and shapes."""
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
    return Held(
        cuts,
        tuple((region, tuple(sorted(holders[region])), mine[region]) for region in sorted(mine)),
        max(map(len, holders.values())),
    )


def held_data(array: Any, held: Held) -> list[Any]:
    """The data of ``held.mine``, on their devices."""
    if held.mine and held.mine[0][2] is None:
        return [array if len(array.sharding.device_set) == 1 else array.addressable_data(0)]
    by_device = {shard.device: shard for shard in array.addressable_shards}
    return [by_device[device].data for _, _, device in held.mine]


def describe_sharding(sharding: Any) -> dict[str, Any] | None:
    """The sharding as Orbax writes it, or None for a sort that Orbax does not know."""
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        described: dict[str, Any] = {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.devices.shape),
            "axis_names": list(mesh.axis_names),
            "axis_types": [f"AxisType.{kind.name}" for kind in mesh.axis_types],
            "partition_spec": [
                list(part) if isinstance(part, tuple) else part for part in sharding.spec
            ],
            "device_mesh": {"mesh": _nested_ids(mesh.devices)},
        }
        return described | _memory_kind(sharding)
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        described = {"sharding_type": "SingleDeviceSharding", "device_str": str(device)}
        return described | _memory_kind(sharding)
    return None


def _memory_kind(sharding: Any) -> dict[str, Any]:
    kind = sharding.memory_kind
    return {} if kind in (None, "device") else {"memory_kind": kind}


def _nested_ids(devices: Any) -> Any:
    if devices.ndim == 0:
        return {"id": int(devices.item().id)}
    return [
        _nested_ids(part) if isinstance(part, np.ndarray) else {"id": int(part.id)}
        for part in devices
    ]


def rebuild_sharding(described: dict[str, Any] | None, mesh: Mesh | None = None) -> Any:
    """The sharding on the devices of this process, or None where they do not allow it.

    Args:
        described: what ``describe_sharding`` gave.
        mesh: use this mesh instead of the saved one; axes that it lacks are not sharded over.
    """
    try:
        if described is None:
            return None
        if described["sharding_type"] == "SingleDeviceSharding":
            if mesh is not None:
                return NamedSharding(mesh, PartitionSpec())
            for device in jax.local_devices():
                if described["device_str"] in (str(device), f"{device.platform}:{device.id}"):
                    return SingleDeviceSharding(device, memory_kind=described.get("memory_kind"))
            return None
        if described["sharding_type"] != "NamedSharding":
            return None
        spec = [
            tuple(part) if isinstance(part, list) else part for part in described["partition_spec"]
        ]
        if mesh is not None:
            return NamedSharding(mesh, PartitionSpec(*(_refit(part, mesh) for part in spec)))
        saved = _saved_mesh(described)
        kind = described.get("memory_kind")
        return (
            None if saved is None else NamedSharding(saved, PartitionSpec(*spec), memory_kind=kind)
        )
    except Exception:  # jax has errors of its own for what fits no mesh
        return None  # a description that this jax does not understand is as good as none


def _refit(part: Any, mesh: Mesh) -> Any:
    names = part if isinstance(part, tuple) else (part,)
    kept = tuple(name for name in names if name in mesh.axis_names)
    return (kept[0] if len(kept) == 1 else kept) if kept else None


def _saved_mesh(described: dict[str, Any]) -> Mesh | None:
    by_id = {device.id: device for device in jax.devices()}
    ids: list[int] = []

    def collect(node: Any) -> None:
        if isinstance(node, list):
            for child in node:
                collect(child)
        else:
            ids.append(node["id"])

    collect(described["device_mesh"]["mesh"])
    if any(device_id not in by_id for device_id in ids):
        return None
    devices = np.array([by_id[device_id] for device_id in ids], dtype=object).reshape(
        described["shape"]
    )
    types = tuple(
        getattr(jax.sharding.AxisType, str(kind).rpartition(".")[2])
        for kind in described.get("axis_types") or []
    )
    return Mesh(devices, described["axis_names"], axis_types=types or None)


def local_regions(sharding: Any, shape: Shape) -> list[Region]:
    """The distinct regions of an array of ``shape`` that this process's devices hold."""
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return [whole(shape)]
    regions = (
        to_region(index, shape)
        for index in sharding.addressable_devices_indices_map(shape).values()
    )
    return list(dict.fromkeys(regions))


def place(
    shape: Shape, sharding: Any, parts: dict[Region, np.ndarray[Any, Any]], dtype: Any = None
) -> Any:
    """A jax array of these host parts on ``sharding``, or uncommitted on the default device.

    There are no parts where none of the devices is of this process: ``dtype`` counts then. On CPU
    the array may take over the memory of a part: it must not be used again.
    """
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        (part,) = parts.values()
        return _put(part, sharding)
    if not parts:
        # the callback would be asked for what is replicated over the devices of others
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    return jax.make_array_from_callback(
        shape, sharding, lambda index: parts[to_region(index, shape)], dtype=dtype
    )


def _put(part: np.ndarray[Any, Any], sharding: SingleDeviceSharding | None) -> Any:
    """One host array on one device: what ``jax.device_put`` ends in, at a tenth of its cost.

    An array of a tree of thousands costs 80 us in device_put, nearly all of it Python.
    """
    if _batched_device_put is None:
        return jax.device_put(part, sharding)
    target = _on(_default_device()) if sharding is None else sharding
    aval = _shaped(part.shape, part.dtype)
    devices = list(target.device_set)
    return _batched_device_put(aval, target, [part], devices, committed=sharding is not None)


@functools.lru_cache(1024)
def _shaped(shape: Shape, dtype: np.dtype[Any]) -> ShapedArray:
    """What jax calls an array of this shape: many are alike."""
    return ShapedArray(shape, dtype)


@functools.lru_cache(16)
def _on(device: Any) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)


def _default_device() -> Any:
    config: Any = jax.config
    chosen: Any = config.jax_default_device
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def place_key(
    shape: Shape, impl: str, sharding: Any, parts: dict[Region, np.ndarray[Any, Any]]
) -> Any:
    """A typed PRNG key array from its key data; ``parts`` are keyed by regions of the keys.

    There are none where no device of ``sharding`` is of this process.
    """
    words = KEY_WORDS[impl]
    data_shape = (*shape, words)
    data_sharding = sharding
    if isinstance(sharding, NamedSharding):
        # jax reports P(None,) for a scalar key on an explicit mesh, which it then does not accept
        spec = [*sharding.spec[: len(shape)], *[None] * (len(shape) - len(sharding.spec)), None]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec[:-1]))
        data_sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    with_words = {(*region, (0, words)): part for region, part in parts.items()}
    key = jax.random.wrap_key_data(
        place(data_shape, data_sharding, with_words, np.dtype(np.uint32)), impl=impl
    )
    if isinstance(sharding, NamedSharding) and key.sharding != sharding:
        key = jax.device_put(key, sharding)
    return key


def weaken(value: Any, sharding: Any) -> Any:
    """A weakly typed scalar again, on the same sharding, if jax would make one of this dtype.

    Weakness decides what ``scalar * array`` is computed in, so losing it would change results.
    """
    if not value.is_fully_addressable:
        return value
    weak = jnp.asarray(value.item())
    if weak.dtype != value.dtype:
        return value
    return weak if sharding is None else jax.device_put(weak, sharding)


def concrete(sharding: Any) -> Any:
    """A sharding over real devices: an abstract mesh is replaced by the mesh in use.

    Raises:
        ValueError: the mesh is abstract, and none is in use.
    """
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        mesh = jax.sharding.get_mesh()
        if mesh.empty or tuple(mesh.axis_names) != tuple(sharding.mesh.axis_names):
            raise ValueError(
                f"the target's sharding {sharding.spec} lies on an abstract mesh "
                f"{sharding.mesh.axis_names}: load inside `with jax.set_mesh(mesh):`"
            )
        return NamedSharding(mesh, sharding.spec)
    return sharding


def wanted_sharding(leaf: Any) -> Any:
    """Where a target leaf lies: None for uncommitted and for leaves that do not say."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if getattr(leaf, "committed", True) else None
    return concrete(getattr(leaf, "sharding", None))


def free_bytes() -> int | None:
    """Free memory of the default device, or None where it does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def topology() -> dict[str, Any]:
    """Processes, devices and platform of this run."""
    return {
        "process_count": jax.process_count(),
        "device_count": jax.device_count(),
        "platform": jax.default_backend(),
    }


Placement = Callable[[str, Any], Any]
