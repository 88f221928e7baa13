"""One save as it was asked for: plain values that every part of it reads."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_core import _processes
from ckpt_core._devices.staging import Copy
from ckpt_core._directory import Backend, resolve
from ckpt_core._fork import HOME_PID, forked
from ckpt_core._options import Options
from ckpt_core._processes import Processes
from ckpt_core._storage import backend_of

if TYPE_CHECKING:
    from ckpt_core._save.dedup_links import Links


class Guard(Protocol):
    """Who may write to a directory; process 0 asks it. Either may raise, and the save is undone."""

    def take(self) -> None:
        """Before the try begins, which removes what others have left."""
        ...

    def check(self) -> None:
        """Last before the commit, when everything is durable."""
        ...


@dataclass(frozen=True)
class RecordFields:
    """What goes into the record besides the items.

    Attributes:
        single: whether a bare tree was passed.
        metadata, metrics: the user's own.
    """

    single: bool
    metadata: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    def frozen(self) -> RecordFields:
        """The same as they are now, and as JSON gives them back.

        Raises:
            TypeError: JSON cannot hold the metadata.
        """
        return RecordFields(self.single, frozen_metadata(self.metadata), dict(self.metrics))


@dataclass(frozen=True)
class SaveJob:
    """One save.

    Attributes:
        target: where the checkpoint will be, absolute.
        local: whether that is in a file system.
        backend: how directories work there.
        fields: of the record.
        options: of the save.
        processes: that save together.
        overwrite: whether a checkpoint that is there is replaced.
        own: each process saves a checkpoint of its own: every shard that it holds, replicas included.
        step: for events.
        copy: copies host memory that the caller could change; None where nothing is copied.
        guard: asked who may write: before anything is written, and last before the commit.
        links: what a Checkpointer remembers of its last step, to share unchanged files with it.
    """

    target: str
    local: bool
    backend: Backend
    fields: RecordFields
    options: Options
    processes: Processes
    overwrite: bool = False
    own: bool = False
    step: int | None = None
    copy: Copy | None = None
    guard: Guard | None = None
    links: Links | None = None

    @functools.cached_property
    def writers(self) -> Processes:
        """The processes that write into one directory."""
        return Processes(0, 1) if self.own else self.processes


def save_job(
    path: str | os.PathLike[str], fields: RecordFields, options: Options, **more: Any
) -> SaveJob:
    """The job of saving to a path, for all processes of this run; ``more`` as in ``SaveJob``.

    Raises:
        ForkedProcess: this process is a forked child.
    """
    if os.getpid() != HOME_PID:
        raise forked()
    target, local = resolve(path)
    return SaveJob(target, local, backend_of(local), fields, options, _processes.this_run(), **more)


def frozen_metadata(metadata: Any) -> Any:
    """Metadata as it is now, and as JSON gives it back.

    Raises:
        TypeError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from error
