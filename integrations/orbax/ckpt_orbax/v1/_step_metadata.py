"""What ``training.Checkpointer`` says of a step and of the whole run."""

from __future__ import annotations

import datetime
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

from ckpt_orbax.v1 import describing

Described = TypeVar("Described")


@dataclass(frozen=True)
class CheckpointMetadata(Generic[Described]):
    """One step of a run.

    Attributes:
        step: its number.
        path: its directory.
        metadata: what ``metadata`` and ``checkpointables_metadata`` read; else None.
        init_timestamp_nsecs, commit_timestamp_nsecs: when the save began and was committed.
        custom_metadata: the value that was saved with the step.
        metrics: the metrics that were saved with the step.
    """

    step: int
    path: Any
    _: KW_ONLY
    metadata: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None
    metrics: Any = None

    @property
    def time(self) -> datetime.datetime:
        """When the step was committed, or, until then, its save began; the beginning of 1970 if neither is known."""
        nsecs = self.commit_timestamp_nsecs or self.init_timestamp_nsecs or 0
        return datetime.datetime.fromtimestamp(nsecs / 1e9, tz=datetime.UTC)

    init_timestamp = describing.CheckpointMetadata.init_timestamp
    commit_timestamp = describing.CheckpointMetadata.commit_timestamp


@dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """What was said of the whole run when its directory was made."""

    directory: Any
    custom_metadata: Any = None
