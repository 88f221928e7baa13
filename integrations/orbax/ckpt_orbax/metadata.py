"""What a checkpoint says of itself without its arrays: of each leaf, of a tree, of a step, of the run."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo, ItemInfo, LeafInfo
from ckpt_orbax._leaves import ZEROS, AbstractArray, orbax_form, saved_dtype
from ckpt_orbax._paths import ABSENT, as_path, as_text

Tree = TypeVar("Tree")


@dataclass(frozen=True, kw_only=True)
class Described(Generic[Tree]):
    """A checkpoint without its arrays: the saved tree with a description at each leaf, or such a tree for each name; when
    the save began and was committed; the value that was saved with it.
    """

    metadata: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None

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
class CheckpointMetadata(Described[Tree]):
    """A checkpoint without its arrays, and where it is."""

    path: Any


@dataclass(frozen=True)
class ShardingMetadata:
    """A saved sharding as JSON; it may be of devices that are not here."""

    saved: dict[str, Any]

    def to_jax_sharding(self) -> jax.sharding.Sharding:
        """The sharding on the devices of this process; ValueError if they are not those of the save."""
        found = sharding_of(self.saved)
        if found is not None:
            return found
        for device in jax.local_devices():  # one of another process could not be used here
            if self.saved.get("device_str") in (str(device), f"{device.platform}:{device.id}"):
                return jax.sharding.SingleDeviceSharding(device)
        what = "the devices of this sharding are not here"
        raise ValueError(f"{what}: {self.saved}: give another one")


@dataclass
class Metadata:
    """A saved leaf: its name, and the directory of its item."""

    name: str
    directory: Any


@dataclass
class ArrayMetadata(Metadata):
    """A saved array. It can be a leaf of a target."""

    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: Any = None


@dataclass
class ScalarMetadata(ArrayMetadata):
    """A saved number."""


@dataclass
class StringMetadata(Metadata):
    """A saved text."""


@dataclass(eq=False)
class TreeMetadata(Mapping[Any, Any]):
    """A saved tree of dicts and lists with a ``Metadata`` at each leaf; also a pytree, and indexed as the tree. The
    ``custom_metadata`` of a step is in ``metadata(step)``.
    """

    tree: Any
    custom_metadata = None

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Any:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)


jax.tree_util.register_dataclass(TreeMetadata, ["tree"], [])


def tree_in(given: Any) -> Any:
    """The tree of a ``TreeMetadata``; anything else as it is."""
    return given.tree if isinstance(given, TreeMetadata) else given


@dataclass
class StepMetadata:
    """What a step says of itself. ``item_metadata`` is a ``TreeMetadata``, or a Composite with one for each item, None for
    items that are no trees. ``item_handlers`` and ``performance_metrics`` are empty: see ``ckpt_core.inspect``.
    """

    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    performance_metrics: dict[str, float] = field(default_factory=dict[str, float])
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class RootMetadata:
    """What was said of the whole run when its directory was made."""

    internal_metadata: dict[str, Any] | None = field(default_factory=dict[str, Any])
    custom_metadata: dict[str, Any] | None = field(default_factory=dict[str, Any])


def described_step(info: CheckpointInfo, item_metadata: Any) -> StepMetadata:
    """What a checkpoint says of itself, with what is said of its items."""
    return StepMetadata(
        item_metadata=item_metadata,
        metrics=metrics_of(info) or {},
        **times_of(info),
        custom_metadata=custom_metadata_of(info),
    )


TO_RESUME = "ckpt_only_to_resume"
"""In the metadata of a step that its policy did not keep, and that stays until the next save: its number, since programs save
again what metadata they find.
"""


def only_to_resume(steps: Sequence[tuple[int, Any]], *, also_all: bool = False) -> set[int]:
    """The steps, of the two newest, that Orbax would not have kept; none if those were all (a copy), unless ``also_all``."""
    found = {step for step, path in sorted(steps)[-2:] if _is_marked(step, path)}
    return found if also_all or len(found) < len(steps) else set()


def _is_marked(step: int, path: Any) -> bool:
    try:
        metadata = ckpt.inspect(as_text(path)).metadata
    except (ckpt.CheckpointError, OSError, ValueError):
        return False
    return isinstance(metadata, dict) and metadata.get(TO_RESUME) == step


def custom_metadata_of(info: CheckpointInfo) -> Any:
    """What was saved as ``custom_metadata=``."""
    found = {} if info.metadata is None else info.metadata
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key != TO_RESUME}
    return found


def get_step_metadata(path: Any) -> StepMetadata:
    """What the directory of a step says of itself, without its items; FileNotFoundError if there is no checkpoint."""
    return described_step(ckpt.inspect(as_text(path)), None)


def described_tree(info: CheckpointInfo, item: ItemInfo) -> TreeMetadata | None:
    """A saved tree with a ``Metadata`` at each leaf; None for an item of another form."""
    if item.form != "tree":
        return None
    directory = as_path(info.path) / item.name if item.name else as_path(info.path)
    tree = orbax_form(item.tree)
    return TreeMetadata(jax.tree.map(lambda leaf: _described(leaf, directory), tree))


def _described(leaf: LeafInfo, directory: Any) -> Metadata:
    name = leaf.path.replace("/", ".").replace("~1", "/").replace("~0", "~")
    if leaf.kind == "str":
        return StringMetadata(name, directory)
    if leaf.kind in ZEROS:
        return ScalarMetadata(name, directory, dtype=np.dtype(type(ZEROS[leaf.kind])))
    sharding = ShardingMetadata(leaf.sharding) if leaf.sharding else None
    return ArrayMetadata(name, directory, leaf.shape, sharding, saved_dtype(leaf))


def tree_of(item: ItemInfo) -> Any:
    """The saved tree with a described leaf at each place."""
    shardings: dict[int, Any] = {}

    def describe(leaf: Any) -> Any:
        if leaf.kind in ZEROS or leaf.kind == "str":
            return ZEROS.get(leaf.kind, "")
        if leaf.kind not in ("jax", "key"):
            return AbstractArray(leaf.shape, saved_dtype(leaf))
        saved = leaf.sharding
        if id(saved) not in shardings:
            shardings[id(saved)] = sharding_of(saved)
        return jax.ShapeDtypeStruct(leaf.shape, saved_dtype(leaf), sharding=shardings[id(saved)])

    return jax.tree.map(describe, orbax_form(item.tree))


def sharding_of(saved: dict[str, Any] | None) -> Any:
    """The saved sharding on the devices of this process; None if they are others."""
    if not saved or saved.get("sharding_type") != "NamedSharding":
        return None
    here = {device.id: device for device in jax.devices()}
    try:
        devices = [here[one["id"]] for one in np.ravel(saved["device_mesh"]["mesh"])]
        kinds = [kind.rpartition(".")[2] for kind in saved.get("axis_types") or ()]
        mesh = jax.sharding.Mesh(
            np.array(devices, object).reshape(saved["shape"]),
            tuple(saved["axis_names"]),
            # a program that is compiled for other types of axes may round otherwise
            axis_types=tuple(jax.sharding.AxisType[kind] for kind in kinds) or None,
        )
        parts = [tuple(one) if isinstance(one, list) else one for one in saved["partition_spec"]]
        spec, memory = jax.sharding.PartitionSpec(*parts), saved.get("memory_kind")
        return jax.sharding.NamedSharding(mesh, spec, memory_kind=memory)
    except (KeyError, TypeError, ValueError):
        return None


def is_metrics(item: ItemInfo) -> bool:
    """Whether an item holds the metrics of a step."""
    return item.name == "metrics" and item.form == "json"


def metrics_of(info: CheckpointInfo) -> Any:
    """The metrics of a step as they were saved; None without any."""
    if "metrics" in info.items and is_metrics(info.items["metrics"]):
        return ckpt.load(info.path, item="metrics")
    if info.metrics and info.format_version is None:
        with contextlib.suppress(OSError, ValueError):  # of Orbax: with text and lists, too
            return json.loads((as_path(info.path) / "metrics" / "metrics").read_text())
    return dict(info.metrics) or None


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
