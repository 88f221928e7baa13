"""Contexts, locations, and plain keys and values of a TensorStore store."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from ckpt_core._errors import CheckpointError
from ckpt_core._fork import HOME_PID, forked

_CACHE_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Location:
    """A directory of a file system, or a prefix of an object store.

    Attributes:
        path: absolute path, or URL (``memory://``, ``s3://``, ``gs://``), without a slash at the end.
        local: whether it is a path of a file system.
    """

    path: str
    local: bool

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.path.rstrip('/')}/{name}", self.local)

    def spec(self) -> dict[str, Any]:
        """TensorStore's spec of it."""
        if self.local:
            return {"driver": "file", "path": self.path.rstrip("/") + "/"}
        return dict(ts.KvStore.Spec(self.path.rstrip("/") + "/").to_json())


@functools.cache
def _process_wide() -> Any:
    """What must outlive one save: the content of ``memory://``, which belongs to a context."""
    return ts.Context({"memory_key_value_store": {}})


def new_context(*, durable: bool = True) -> Any:
    """A context for one save or load, to be dropped after it.

    One context for all arrays of a save, since each context opens the database anew; not one per
    process, since its cache would answer for directories that were replaced meanwhile.

    Raises:
        ForkedProcess: in a forked child.
    """
    if os.getpid() != HOME_PID:
        raise forked()
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": 16},
            "file_io_sync": durable,
        },
        _process_wide(),
    )


def database_spec(
    location: Location, *, target_data_file_bytes: int | None = None
) -> dict[str, Any]:
    """Spec of the OCDBT database that lies at a location.

    Values of up to 100 bytes stand in the index itself; the index stays small, so one read of it
    finds every array.
    """
    spec: dict[str, Any] = {"driver": "ocdbt", "base": location.spec()}
    if target_data_file_bytes is not None:
        spec |= {
            "target_data_file_size": target_data_file_bytes,
            "config": {
                "max_inline_value_bytes": 100,
                "max_decoded_node_bytes": 100_000_000,
                "manifest_kind": "single",
            },
            "assume_config": True,
        }
    return spec


class KeyValues:
    """Keys and values below one location of an object store; every call blocks."""

    def __init__(self, location: Location) -> None:
        self._store: Any = ts.KvStore.open(location.spec(), context=new_context()).result()

    def get(self, key: str) -> bytes | None:
        """The value, or None where there is no such key."""
        found = self._store.read(key).result()
        return bytes(found.value) if found.state == "value" else None

    def put(self, key: str, value: bytes) -> None:
        """Writes the value."""
        self._store.write(key, value).result()

    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Whether the value was written; False where something was there."""
        absent = self._store.read(key).result()
        if absent.state == "value":
            return False
        # the generation of a missing key makes the write conditional on its absence
        written = self._store.write(key, value, if_equal=absent.stamp.generation).result()
        return bool(written.generation)

    def list(self, prefix: str = "") -> list[str]:
        """Every key that begins with ``prefix``."""
        keys = self._store.list(ts.KvStore.KeyRange(prefix, prefix_end(prefix))).result()
        return [key.decode(errors="surrogateescape") for key in keys]

    def delete_all(self, prefix: str = "") -> None:
        """Deletes every key that begins with ``prefix``."""
        self._store.delete_range(ts.KvStore.KeyRange(prefix, prefix_end(prefix))).result()


def prefix_end(prefix: str) -> str:
    """The first key after all keys that begin with ``prefix``; empty for no end."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


_ERRNO = re.compile(r"os_error_code='(\d+)'")


def system_error(error: Exception, doing: str) -> Exception:
    """The error that a TensorStore failure stands for: an OSError where the system refused."""
    found = _ERRNO.search(str(error))
    if found is None:
        return CheckpointError(f"{doing}: {error}")
    number = int(found[1])
    return OSError(number, f"{doing}: {os.strerror(number)} ({error})")


def counters() -> dict[str, float]:
    """TensorStore's counters of this process since its start: name -> sum, zeros left out.

    Raises:
        ForkedProcess: in a forked child.
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
