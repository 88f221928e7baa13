"""Where an item's database lies, and how TensorStore opens it."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

from ckpt_core._errors import CheckpointError
from ckpt_core._fork import HOME_PID, forked
from ckpt_core._layout.writers import INLINE_BYTES
from ckpt_core._storage._tensorstore import ts

_CACHE_BYTES = 100_000_000
_NODE_BYTES = 64 * 1024
"""Maximum B+tree node (about 600 keys): small, so that partial loads read few nodes."""
_IO_THREADS = min(16, max(4, os.cpu_count() or 1))
"""More threads than cores write no faster, and would slow the training step down."""


@dataclass(frozen=True, slots=True)
class Location:
    """A directory of a file system, or a prefix of an object store.

    Attributes:
        path: absolute path, or URL (``memory://``, ``s3://``, ``gs://``), without a trailing slash.
        local: True for a path in a file system.
    """

    path: str
    local: bool

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.path.rstrip('/')}/{name}", self.local)

    def spec(self) -> dict[str, Any]:
        """TensorStore's spec of the location.

        Raises:
            CheckpointError: the path is not valid UTF-8.
        """
        if self.local:
            if any("\udc80" <= character <= "\udcff" for character in self.path):
                raise CheckpointError(
                    f"{self.path!r} is no UTF-8, and TensorStore, which writes and reads the arrays, takes "
                    "no other paths: give the directory another name"
                )
            return {"driver": "file", "path": self.path.rstrip("/") + "/"}
        return dict(ts.KvStore.Spec(self.path.rstrip("/") + "/").to_json())


@functools.cache
def _process_wide() -> Any:
    """Parent context of the process: keeps the content of ``memory://`` between saves and loads."""
    return ts.Context({"memory_key_value_store": {}})


def new_context(*, durable: bool = True) -> Any:
    """A new TensorStore context for one save or load.

    Use one context for all arrays of a save, because each context opens the database again. Do not
    reuse it for the next one: its cache may have data of a directory that was replaced meanwhile.

    Args:
        durable: fsync the files that are written.

    Raises:
        ForkedProcess: called in a forked child.
    """
    if os.getpid() != HOME_PID:
        raise forked()
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": _IO_THREADS},
            "file_io_sync": durable,
        },
        _process_wide(),
    )


def database_spec(
    location: Location, *, target_data_file_bytes: int | None = None
) -> dict[str, Any]:
    """Spec of the OCDBT database at a location; it stores values of up to 100 bytes in the index.

    Args:
        location: location of the database.
        target_data_file_bytes: for writing: size at which TensorStore begins another data file.
    """
    spec: dict[str, Any] = {"driver": "ocdbt", "base": location.spec()}
    if target_data_file_bytes is not None:
        spec |= {
            "target_data_file_size": target_data_file_bytes,
            "config": {
                "max_inline_value_bytes": INLINE_BYTES,
                "max_decoded_node_bytes": _NODE_BYTES,
                "manifest_kind": "single",
            },
            "assume_config": True,
        }
    return spec


def counters() -> dict[str, float]:
    """TensorStore's metrics since the start of this process: name -> sum; without unused ones.

    Raises:
        ForkedProcess: called in a forked child.
    """
    if os.getpid() != HOME_PID:
        raise forked()
    found: dict[str, float] = {}
    for metric in ts.experimental_collect_matching_metrics("/tensorstore/"):
        values = [
            float(entry["value"])
            for entry in metric["values"]
            if isinstance(entry.get("value"), int | float)
        ]
        if values:
            found[metric["name"].removeprefix("/tensorstore/")] = sum(values)
    return found
