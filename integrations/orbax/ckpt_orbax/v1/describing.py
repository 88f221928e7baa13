"""``metadata`` and its forms: a checkpoint without its arrays."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

from ckpt_core import CheckpointInfo
from ckpt_orbax._paths import as_path, as_text
from ckpt_orbax.v1 import _files
from ckpt_orbax.v1._context import Context, get_context
from ckpt_orbax.v1._describe import inspected, pytree_item, times_of, tree_of
from ckpt_orbax.v1._engine import refuse_unsupported
from ckpt_orbax.v1._names import AUTO, check_name

Described = TypeVar("Described")
PyTreeMetadata = Any
"""A saved tree with a description at each leaf: containers are dicts and lists."""


@dataclass(frozen=True)
class CheckpointMetadata(Generic[Described]):
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

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """When the save began."""
        return as_time(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """When the checkpoint was committed."""
        return as_time(self.commit_timestamp_nsecs)


def as_time(nsecs: int | None) -> datetime.datetime | None:
    """Nanoseconds since 1970 as a time in UTC."""
    if nsecs is None:
        return None
    return datetime.datetime.fromtimestamp(nsecs / 1e9, tz=datetime.UTC)


def metadata(path: Any, checkpointable_name: str | None = AUTO) -> CheckpointMetadata[Any]:
    """The tree of a checkpoint with shape, dtype and sharding at each leaf; a target for ``load``.

    Raises:
        InvalidLayoutError: there is no checkpoint, or no such pytree.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> import numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ocp.save(path, {"w": np.ones(2)}, custom_metadata={"lr": 0.1})
        >>> found = ocp.metadata(path)
        >>> found.metadata["w"].shape, found.custom_metadata
        ((2,), {'lr': 0.1})
    """
    check_name(checkpointable_name)
    return _described(path, lambda info, _: tree_of(pytree_item(info, checkpointable_name)))


def checkpointables_metadata(path: Any) -> CheckpointMetadata[dict[str, Any]]:
    """As ``metadata``, for each checkpointable; None for those without a description."""
    return _described(
        path,
        lambda info, context: {
            name: tree_of(item)
            if item.form == "tree"
            else _files.describe_item(info, name, context)
            for name, item in info.items.items()
        },
    )


def _described(
    path: Any, describe: Callable[[CheckpointInfo, Context], Any]
) -> CheckpointMetadata[Any]:
    context = get_context()
    refuse_unsupported(context)
    info = inspected(as_text(path))
    return CheckpointMetadata(
        as_path(path, context.file.path_class),
        metadata=describe(info, context),
        **times_of(info),
        custom_metadata={} if info.metadata is None else info.metadata,
    )


def pytree_metadata(*arguments: Any, **named: Any) -> CheckpointMetadata[Any]:
    """Deprecated name of ``metadata``."""
    warnings.warn("Use `metadata` instead.", DeprecationWarning, stacklevel=2)
    return metadata(*arguments, **named)
