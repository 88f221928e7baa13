"""Which devices hold which part of an array, from the sharding that a checkpoint has in JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MOST_DEVICES = 65_536
"""A page lists the ids of no more."""


@dataclass(frozen=True)
class Drawing:
    """How an array lies over a mesh."""

    kind: str = ""  # NamedSharding, another name, or unknown
    axes: tuple[tuple[str, int], ...] = ()  # name and size of each axis of the mesh
    # for each dimension of the array, the axes that it is split over; dimensions that are not named are not split
    spec: tuple[tuple[str, ...], ...] = ()
    # ids of the devices that hold each part, in C order over parts; empty if there are too many, or the mesh is not known
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
        return _over_a_mesh(sharding)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        return Drawing(kind, note=f"cannot be drawn: {error}")


def _over_a_mesh(sharding: Mapping[str, Any]) -> Drawing:
    names = [str(name) for name in sharding["axis_names"]]
    sizes = [int(size) for size in sharding["shape"]]
    entries = sharding["partition_spec"]
    each = [one if isinstance(one, list | tuple) else [one] for one in entries]
    spec = tuple(tuple(str(name) for name in axes if name is not None) for axes in each)
    drawing = Drawing("NamedSharding", tuple(zip(names, sizes, strict=True)), spec)
    unknown = {axis for axes in spec for axis in axes}.difference(names)
    if unknown:
        raise ValueError(f"no axis of the mesh is called {min(unknown)}")
    if math.prod(sizes) > MOST_DEVICES:
        return replace(drawing, note="too many devices to draw")
    split = [names.index(axis) for axes in spec for axis in axes]
    free = [place for place in range(len(names)) if place not in split]
    # a part is on the devices whose place on the split axes is its own; the first axis is the slowest
    parts = _ids(sharding, sizes).transpose(*split, *free).reshape(math.prod(drawing.parts), -1)
    return replace(drawing, devices=tuple(map(tuple, parts.tolist())))


def _ids(sharding: Mapping[str, Any], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """The ids of the devices by their place in the mesh; their numbers in it if ids were not saved."""
    mesh = (sharding.get("device_mesh") or {}).get("mesh")
    flat = range(math.prod(sizes)) if mesh is None else np.array(mesh, dtype=object).reshape(-1)
    ids = [int(one["id"] if isinstance(one, dict) else one) for one in flat]
    return np.array(ids).reshape(sizes)
