"""Which devices hold which part of an array, from the sharding that a checkpoint has in JSON. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_BLOCKS = 1024
"""More are not drawn: a page shows no more squares than this."""


@dataclass(frozen=True)
class Drawing:
    """How an array lies over a mesh."""

    kind: str = ""  # NamedSharding, another name, or unknown
    axes: tuple[tuple[str, int], ...] = ()  # name and size of each axis of the mesh
    # for each dimension of the array, the axes that it is split over; dimensions that are not named are not split
    spec: tuple[tuple[str, ...], ...] = ()
    # ids of the devices that hold each part, in C order over parts; empty if there are too many parts, or the mesh is not known
    devices: tuple[tuple[int, ...], ...] = ()
    note: str = ""  # why there is no drawing

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension of ``spec`` is split."""
        sizes = dict(self.axes)
        return tuple(math.prod(sizes[axis] for axis in axes) for axes in self.spec)


def drawing_of(sharding: Mapping[str, Any]) -> Drawing:
    """What can be drawn of a saved sharding; one that is not understood gets a note."""
    kind = str(sharding.get("sharding_type", "")) or "unknown"
    if kind != "NamedSharding":
        device = sharding.get("device_str")
        note = f"all of it on {device}" if device else f"{kind}: its parts are not described"
        return Drawing(kind, note=note)
    try:
        axes, spec = _axes(sharding), _spec(sharding)
        found = Drawing(kind, axes, spec)
        unknown = {axis for split in spec for axis in split} - dict(axes).keys()
        if unknown:
            raise ValueError(f"no axis of the mesh is called {sorted(unknown)[0]}")
        if math.prod(found.parts) > MOST_BLOCKS or math.prod(n for _, n in axes) > 64 * MOST_BLOCKS:
            return Drawing(kind, axes, spec, note="too many parts to draw")
        return Drawing(kind, axes, spec, _devices_of_parts(found, _ids(sharding, axes)))
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        return Drawing(kind, note=f"cannot be drawn: {error}")


def _axes(sharding: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    names = [str(name) for name in sharding["axis_names"]]
    sizes = [int(size) for size in sharding["shape"]]
    if len(names) != len(sizes) or any(size < 1 for size in sizes):
        raise ValueError(f"axes {names} of sizes {sizes}")
    return tuple(zip(names, sizes, strict=True))


def _spec(sharding: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    found: list[tuple[str, ...]] = []
    for entry in sharding["partition_spec"]:
        names: Sequence[Any] = entry if isinstance(entry, list | tuple) else [entry]
        found.append(tuple(str(name) for name in names if name is not None))
    return tuple(found)


def _ids(sharding: Mapping[str, Any], axes: Sequence[tuple[str, int]]) -> list[int]:
    """The ids of the devices, in C order over the mesh; positions in it if ids were not saved."""
    count = math.prod(size for _, size in axes)
    mesh = (sharding.get("device_mesh") or {}).get("mesh")
    ids = list(_flat(mesh)) if mesh is not None else list(range(count))
    if len(ids) != count:
        raise ValueError(f"{len(ids)} devices in a mesh for {count}")
    return ids


def _flat(mesh: Any) -> Iterator[int]:
    if isinstance(mesh, list | tuple):
        for part in mesh:
            yield from _flat(part)
    else:
        yield int(mesh["id"] if isinstance(mesh, Mapping) else mesh)


def _devices_of_parts(drawing: Drawing, ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each part, the devices whose place on the split axes is that of the part."""
    parts: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*(range(size) for _, size in drawing.axes))
    sizes = dict(drawing.axes)
    for identity, place in zip(ids, places, strict=True):
        at = dict(zip(sizes, place, strict=True))
        part: list[int] = []
        for split in drawing.spec:
            index = 0
            for axis in split:  # the first axis is the slowest
                index = index * sizes[axis] + at[axis]
            part.append(index)
        parts.setdefault(tuple(part), []).append(identity)
    every = itertools.product(*(range(count) for count in drawing.parts))
    return tuple(tuple(parts.get(part, ())) for part in every)
