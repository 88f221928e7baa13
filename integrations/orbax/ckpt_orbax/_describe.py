"""Checkpoints without their arrays: finding the items, and Orbax's description of them."""

from __future__ import annotations

import dataclasses
import datetime
import json
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo, ItemInfo
from ckpt_orbax._errors import InvalidLayoutError, NoCheckpointError
from ckpt_orbax._leaves import described
from ckpt_orbax._paths import ABSENT, as_path, as_text
from ckpt_orbax._plain import orbax_form

Described = TypeVar("Described")
STATE = "state"
"""Name of a pytree that was saved without one."""
AUTO = "AUTO"
"""Name that stands for the only or most likely pytree."""
_FIRST = (STATE, "pytree", "default")


class Timed:
    """When a checkpoint was saved."""

    init_timestamp_nsecs: int | None
    commit_timestamp_nsecs: int | None

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """When the save began."""
        return _as_time(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """When the checkpoint was committed."""
        return _as_time(self.commit_timestamp_nsecs)


def _as_time(nsecs: int | None) -> datetime.datetime | None:
    """Nanoseconds since 1970 as a time in UTC."""
    return None if nsecs is None else datetime.datetime.fromtimestamp(nsecs / 1e9, tz=datetime.UTC)


@dataclass(frozen=True)
class CheckpointMetadata(Timed, Generic[Described]):
    """A checkpoint without its arrays.

    Attributes:
        path: where it is.
        metadata: the saved tree with a description at each leaf, or such a tree for each name.
        init_timestamp_nsecs, commit_timestamp_nsecs: when the save began and was committed.
        custom_metadata: the value that was saved with it; an empty dict if there was none.
    """

    path: Any
    _: KW_ONLY
    metadata: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None


def inspected(path: str) -> CheckpointInfo:
    """``ckpt_core.inspect``, without the item that holds the metrics."""
    try:
        info = ckpt.inspect(path)
        items = {name: item for name, item in info.items.items() if not is_metrics(item)}
        return dataclasses.replace(info, items=items)
    except ckpt.CheckpointNotFound as error:
        raise NoCheckpointError(str(error)) from error


def is_metrics(item: ItemInfo) -> bool:
    """Whether an item holds the metrics of a step."""
    return item.name == "metrics" and item.form == "json"


def metrics_of(info: CheckpointInfo) -> Any:
    """The metrics of a step as they were saved; None without any."""
    if "metrics" in info.items and is_metrics(info.items["metrics"]):
        return ckpt.load(info.path, item="metrics")
    if info.metrics and info.format_version is None:
        return _orbax_metrics(info)
    return dict(info.metrics) or None


def _orbax_metrics(info: CheckpointInfo) -> Any:
    """The metrics of a step of Orbax, which ckpt knows as numbers: nested, and with their text and lists."""
    try:
        return json.loads((as_path(info.path) / "metrics" / "metrics").read_text())
    except (OSError, ValueError):
        return dict(info.metrics)


def pytree_item(info: CheckpointInfo, name: str | None) -> ItemInfo:
    """The pytree of this name; the only or most likely one for ``AUTO`` or None."""
    trees = [item for item in info.items.values() if item.form == "tree"]
    if name is None or name == AUTO:
        order = sorted(trees, key=lambda item: (_rank(item.name), item.name))
        if order:
            return order[0]
    elif name in info.items and info.items[name].form == "tree":
        return info.items[name]
    held = ", ".join(f"{item.name} ({item.form})" for item in info.items.values()) or "nothing"
    wanted = "no pytree" if name is None or name == AUTO else f"no pytree {name!r}"
    raise InvalidLayoutError(f"{info.path}: {wanted} in this checkpoint: it has {held}")


def _rank(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def tree_of(item: ItemInfo) -> Any:
    """The saved tree with a described leaf at each place."""
    shardings: dict[int, Any] = {}

    def describe(leaf: Any) -> Any:
        saved = leaf.sharding
        if id(saved) not in shardings:
            shardings[id(saved)] = sharding_of(saved)
        return described(leaf, shardings[id(saved)])

    return jax.tree.map(describe, orbax_form(item.tree))


def sharding_of(saved: dict[str, Any] | None) -> Any:
    """The saved sharding on the devices of this process; None if they are others."""
    if not saved or saved.get("sharding_type") != "NamedSharding":
        return None
    devices = {device.id: device for device in jax.devices()}
    try:
        ids = _ids(saved["device_mesh"]["mesh"])
        mesh = jax.sharding.Mesh(
            np.vectorize(devices.__getitem__, otypes=[object])(ids).reshape(saved["shape"]),
            tuple(saved["axis_names"]),
            # a program that is compiled for other types of axes may round otherwise
            axis_types=tuple(
                jax.sharding.AxisType[kind.rpartition(".")[2]]
                for kind in saved.get("axis_types") or ()
            )
            or None,
        )
        spec = [tuple(part) if isinstance(part, list) else part for part in saved["partition_spec"]]
        return jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(*spec), memory_kind=saved.get("memory_kind")
        )
    except (KeyError, TypeError, ValueError):
        return None


def _ids(mesh: Any) -> Any:
    if isinstance(mesh, dict):
        return mesh["id"]
    return np.array([_ids(part) for part in mesh])


def times_of(info: CheckpointInfo) -> dict[str, Any]:
    """When the save began and the checkpoint was committed, in nanoseconds since 1970."""
    ended = None if info.created_unix_secs is None else int(info.created_unix_secs * 1e9)
    began = None if ended is None else ended - int(sum(info.durations.values()) * 1e9)
    return {"init_timestamp_nsecs": began, "commit_timestamp_nsecs": ended}


def is_orbax_checkpoint(path: Any) -> bool:
    """Whether there is a checkpoint of ckpt or of Orbax at the path; raises OSError if the system cannot say."""
    try:
        return bool(ckpt.inspect(as_text(path)).items)
    except (ckpt.CheckpointError, ValueError):
        return False
    except OSError as error:
        if error.errno in ABSENT:  # a file, say
            return False
        raise
