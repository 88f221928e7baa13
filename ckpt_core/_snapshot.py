"""Device memory to host memory and back, and the shardings on either side."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_core._errors import CheckpointError
from ckpt_core._lazy import jax
from ckpt_core._plan import Region, Shape, to_region, whole

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
    single = isinstance(sharding, jax.sharding.SingleDeviceSharding)
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
    if isinstance(sharding, jax.sharding.NamedSharding):
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
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
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


def rebuild_sharding(
    described: dict[str, Any] | None, mesh: jax.sharding.Mesh | None = None
) -> Any:
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
                return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            for device in jax.local_devices():
                if described["device_str"] in (str(device), f"{device.platform}:{device.id}"):
                    return jax.sharding.SingleDeviceSharding(
                        device, memory_kind=described.get("memory_kind")
                    )
            return None
        if described["sharding_type"] != "NamedSharding":
            return None
        spec = [
            tuple(part) if isinstance(part, list) else part for part in described["partition_spec"]
        ]
        if mesh is not None:
            return jax.sharding.NamedSharding(
                mesh, jax.sharding.PartitionSpec(*(_refit(part, mesh) for part in spec))
            )
        saved = _saved_mesh(described)
        kind = described.get("memory_kind")
        return (
            None
            if saved is None
            else jax.sharding.NamedSharding(
                saved, jax.sharding.PartitionSpec(*spec), memory_kind=kind
            )
        )
    except Exception:  # jax has errors of its own for what fits no mesh
        return None  # a description that this jax does not understand is as good as none


def _refit(part: Any, mesh: jax.sharding.Mesh) -> Any:
    names = part if isinstance(part, tuple) else (part,)
    kept = tuple(name for name in names if name in mesh.axis_names)
    return (kept[0] if len(kept) == 1 else kept) if kept else None


def _saved_mesh(described: dict[str, Any]) -> jax.sharding.Mesh | None:
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
    return jax.sharding.Mesh(devices, described["axis_names"], axis_types=types or None)


def local_regions(sharding: Any, shape: Shape) -> list[Region]:
    """The distinct regions of an array of ``shape`` that this process's devices hold."""
    if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return [whole(shape)]
    regions = (
        to_region(index, shape)
        for index in sharding.addressable_devices_indices_map(shape).values()
    )
    return list(dict.fromkeys(regions))


def concrete(sharding: Any) -> Any:
    """A sharding over real devices: an abstract mesh is replaced by the mesh in use.

    Raises:
        ValueError: the mesh is abstract, and none is in use.
    """
    if isinstance(sharding, jax.sharding.NamedSharding) and not isinstance(
        sharding.mesh, jax.sharding.Mesh
    ):
        mesh = jax.sharding.get_mesh()
        if mesh.empty or tuple(mesh.axis_names) != tuple(sharding.mesh.axis_names):
            raise ValueError(
                f"the target's sharding {sharding.spec} lies on an abstract mesh "
                f"{sharding.mesh.axis_names}: load inside `with jax.set_mesh(mesh):`"
            )
        return jax.sharding.NamedSharding(mesh, sharding.spec)
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
