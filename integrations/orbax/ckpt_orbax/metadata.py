"""What a checkpoint says of itself without its arrays: of each leaf, of a tree, of a step, of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo, ItemInfo, LeafInfo
from ckpt_orbax._describe import metrics_of, sharding_of, times_of
from ckpt_orbax._leaves import saved_dtype
from ckpt_orbax._paths import as_path, as_text
from ckpt_orbax._plain import orbax_form


@dataclass(frozen=True)
class ShardingMetadata:
    """A saved sharding, which may be of devices that are not here.

    Attributes:
        saved: the sharding as JSON.
    """

    saved: dict[str, Any]

    def to_jax_sharding(self) -> jax.sharding.Sharding:
        """The sharding on the devices of this process.

        Raises:
            ValueError: they are not those of the save.
        """
        found = sharding_of(self.saved) or self._of_one_device()
        if found is None:
            raise ValueError(
                f"the devices of this sharding are not here: {self.saved}: give another one"
            )
        return found

    def _of_one_device(self) -> jax.sharding.Sharding | None:
        name = self.saved.get("device_str")
        for device in jax.local_devices():  # one of another process could not be used here
            if name in (str(device), f"{device.platform}:{device.id}"):
                return jax.sharding.SingleDeviceSharding(device)
        return None


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


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata(Mapping[Any, Any]):
    """A saved tree with a ``Metadata`` at each leaf; also a pytree, and indexed as the tree.

    Attributes:
        tree: of dicts and lists.
        custom_metadata: None; ``metadata(step).custom_metadata`` has that of the step.
    """

    custom_metadata = None

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Any:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __repr__(self) -> str:
        return f"TreeMetadata({self.tree})"

    def tree_flatten_with_keys(self) -> Any:
        """For jax."""
        return [(jax.tree_util.GetAttrKey("tree"), self.tree)], None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> TreeMetadata:
        """For jax."""
        return cls(*children)


@dataclass
class StepMetadata:
    """What a step says of itself.

    Attributes:
        item_handlers: always empty; the forms of the items are ckpt's own.
        item_metadata: a ``TreeMetadata``, or a Composite with one for each item; None for items that
            are no trees.
        metrics: the metrics of the step.
        performance_metrics: always empty; see ``ckpt_core.inspect``.
        init_timestamp_nsecs, commit_timestamp_nsecs: when the save began and was committed.
        custom_metadata: what was saved as ``custom_metadata=``.
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
    """What a checkpoint says of itself.

    Args:
        info: of ``inspect``.
        item_metadata: of its items.
    """
    return StepMetadata(
        item_metadata=item_metadata,
        metrics=metrics_of(info) or {},
        **times_of(info),
        custom_metadata=info.metadata or {},
    )


def get_step_metadata(path: Any) -> StepMetadata:
    """What the directory of a step says of itself, without its items.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    return described_step(ckpt.inspect(as_text(path)), None)


def described_tree(info: CheckpointInfo, item: ItemInfo) -> TreeMetadata | None:
    """A saved tree with a ``Metadata`` at each leaf; None for an item of another form."""
    if item.form != "tree":
        return None
    directory = as_path(info.path) / item.name if item.name else as_path(info.path)
    return TreeMetadata(
        jax.tree.map(lambda leaf: _described(leaf, directory), orbax_form(item.tree))
    )


_NUMBERS = {"int": np.dtype(np.int64), "float": np.dtype(np.float64), "bool": np.dtype(np.bool_)}


def _described(leaf: LeafInfo, directory: Any) -> Metadata:
    name = leaf.path.replace("/", ".").replace("~1", "/").replace("~0", "~")
    match leaf.kind:
        case "str":
            return StringMetadata(name, directory)
        case "int" | "float" | "bool":
            return ScalarMetadata(name, directory, dtype=_NUMBERS[leaf.kind])
        case _:
            return ArrayMetadata(
                name,
                directory,
                shape=leaf.shape,
                sharding=ShardingMetadata(leaf.sharding) if leaf.sharding else None,
                dtype=saved_dtype(leaf),
            )


__all__ = [
    "ArrayMetadata",
    "Metadata",
    "RootMetadata",
    "ScalarMetadata",
    "ShardingMetadata",
    "StepMetadata",
    "StringMetadata",
    "TreeMetadata",
    "get_step_metadata",
]
