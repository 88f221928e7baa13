"""Which devices hold which part of an array, from the sharding that a checkpoint has in JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        return Drawing(
            kind, axes, spec, _devices_of_parts(found, _ids(sharding, [n for _, n in axes]))
        )
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        return Drawing(kind, note=f"cannot be drawn: {error}")


def _axes(sharding: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    names = [str(name) for name in sharding["axis_names"]]
    sizes = [int(size) for size in sharding["shape"]]
    if len(names) != len(sizes) or any(size < 1 for size in sizes):
        raise ValueError(f"axes {names} of sizes {sizes}")
    return tuple(zip(names, sizes, strict=True))


def _spec(sharding: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    entries = sharding["partition_spec"]
    each = [one if isinstance(one, list | tuple) else [one] for one in entries]
    return tuple(tuple(str(name) for name in names if name is not None) for names in each)


def _ids(sharding: Mapping[str, Any], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """The ids of the devices by their place in the mesh; their numbers in it if ids were not saved."""
    mesh = (sharding.get("device_mesh") or {}).get("mesh")
    if mesh is None:
        return np.arange(math.prod(sizes)).reshape(sizes)
    flat = np.array(mesh, dtype=object).reshape(-1)
    return np.array([int(one["id"] if isinstance(one, dict) else one) for one in flat]).reshape(
        sizes
    )


def _devices_of_parts(drawing: Drawing, ids: np.ndarray[Any, Any]) -> tuple[tuple[int, ...], ...]:
    """For each part, the devices whose place on the split axes is that of the part; the first axis is the slowest."""
    names = [name for name, _ in drawing.axes]
    split = [names.index(axis) for axes in drawing.spec for axis in axes]
    free = [n for n in range(len(names)) if n not in split]
    parts = ids.transpose(*split, *free).reshape(math.prod(drawing.parts), -1)
    return tuple(map(tuple, parts.tolist()))
