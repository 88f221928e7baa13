"""Keys and values of an object store, for files that are not arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_core._directory import Backend, ObjectStoreBackend, PosixBackend
from ckpt_core._errors import CheckpointError
from ckpt_core._options import Options
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.failures import failure, settled
from ckpt_core._storage.location import Location, new_context, open_store

_OUT_OF_RANGE = "OUT_OF_RANGE"
_NO_SUCH_KEY = ".ckpt-probe"
_COUNTS = "/tensorstore/http/response_codes"
_REFUSALS = ("400", "401", "403")
_LISTINGS = 4
"""How often Google's store is asked for a listing, if other requests of the process are refused meanwhile."""


class KeyValues:
    """Keys and values below one location of an object store; every call blocks.

    Args:
        location: URL of the objects.
        timeout_secs: maximum time of a single request, with its repetitions.

    Raises, each of them:
        OSError: the store refused, or did not answer; see ``failures.refusal``.
        CheckpointError: any other failure.
    """

    def __init__(self, location: Location, timeout_secs: float = Options.timeout_secs) -> None:
        self._path = location.path
        self._timeout_secs = timeout_secs
        try:
            opening = open_store(location, new_context())
        except ValueError as error:  # no such name of a bucket
            raise failure(error, f"{self._path}: cannot open") from error
        self._store: Any = self._done("open", opening)

    def get(self, key: str, first_bytes: int | None = None) -> bytes | None:
        """The value, or its first bytes; None if there is no such key."""
        if first_bytes is not None:
            first = self._store.read(key, byte_range=slice(0, first_bytes))
            with contextlib.suppress(CheckpointError):  # the value is shorter
                found = self._done(f"read {key}", first)
                return bytes(found.value) if found.state == "value" else None
            return (self.get(key) or b"")[:first_bytes]
        found = self._done(f"read {key}", self._store.read(key))
        return bytes(found.value) if found.state == "value" else None

    def put(self, key: str, value: bytes) -> None:
        """Writes the value."""
        self._done(f"write {key}", self._store.write(key, value))

    def get_version(self, key: str) -> tuple[bytes | None, Any]:
        """As ``get``, with the version, which a missing key has too."""
        found = self._done(f"read {key}", self._store.read(key))
        return (bytes(found.value) if found.state == "value" else None), found.stamp.generation

    def put_all(self, values: Mapping[str, bytes]) -> None:
        """Writes all values, in parallel."""
        self._write_all("write", values)

    def put_if_unchanged(self, key: str, value: bytes, version: Any) -> bool:
        """Writes the value if the key has this version still; whether it was written."""
        writing = self._store.write(key, value, if_equal=version)
        return bool(self._done(f"write {key}", writing).generation)

    def list(self, prefix: str = "") -> list[str]:
        """Every key that begins with ``prefix``."""
        keys = self._range(prefix, prefix_end(prefix))
        if self._path.startswith("gs://"):
            keys += self._overlooked(keys, prefix)
        return [key.decode(errors="surrogateescape") for key in keys]

    def _range(self, first: str | bytes, end: str) -> list[bytes]:
        """The keys in a range; of Google's store, unless any request was refused meanwhile.

        TensorStore does not look at the status of Google's answer to a listing: a refusal whose body is JSON is
        a listing of nothing, and any other body cannot be parsed. But it counts the answers by status, those of
        the whole process. So if another request was refused meanwhile, the listing is tried again.
        """
        statuses: list[str] = []
        failed: Exception | None = None
        for _ in range(_LISTINGS if self._path.startswith("gs://") else 1):
            before = _refused()
            try:
                listing = self._store.list(ts.KvStore.KeyRange(first, end))
                found = list(self._done(f"list {first!r}", listing))
            except CheckpointError as error:
                failed, found = error, []
            statuses = [status for status, count in _refused().items() if count > before[status]]
            if not statuses:
                if failed is not None:
                    raise failed
                return found
        answer = ValueError(f"it was answered with [http_response_code='{statuses[0]}']")
        raise failure(answer, f"{self._path}: cannot list {first!r}") from failed

    def _overlooked(self, keys: list[bytes], prefix: str) -> list[bytes]:
        """The keys that a listing of Google's store left out.

        TensorStore 0.1.86 stops a listing without an error at the first page that the store does not have: a
        directory looks empty, or shorter than it is. So the listing continues after its last key until no key
        comes. If there was none at all, a read, whose refusal TensorStore reports by itself, comes before the
        last try.
        """
        found: list[bytes] = []
        while True:
            last = [*keys, *found][-1:]
            first = last[0] + b"\0" if last else prefix
            more = self._range(first, prefix_end(prefix))
            if not more:
                self.get(f"{prefix}{_NO_SUCH_KEY}")
                more = self._range(first, prefix_end(prefix)) if not last else []
            if not more:
                return found
            found += more

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes the keys, in parallel; those that do not exist are none of its business."""
        # not delete_range, which lists, and tells of a refusal no more than a listing does
        self._write_all("delete", dict.fromkeys(keys))

    def _write_all(self, doing: str, values: Mapping[str, bytes | None]) -> None:
        """Writes values, or deletes, in parallel; a failure is raised when no request is under way any more.

        A request that is carried out after the caller went on would meet what somebody has written since.
        """
        writing = [(key, self._store.write(key, value)) for key, value in values.items()]
        first: Exception | None = None
        for key, future in writing:
            try:
                self._done(f"{doing} {key}", future)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _done(self, doing: str, future: Any) -> Any:
        """The result of a request, once it is there."""
        return settled(future, f"{self._path}: cannot {doing}", self._timeout_secs)


def _refused() -> dict[str, int]:
    """How often stores have refused a request of this process, by HTTP status."""
    counts: dict[str, int] = dict.fromkeys(_REFUSALS, 0)
    for metric in ts.experimental_collect_matching_metrics(_COUNTS):
        for entry in metric["values"]:
            if entry.get("code") in counts:
                counts[entry["code"]] += int(entry["value"])
    return counts


def range_of(store: Any, key: str, future: Any, start: int, stop: int) -> bytes | None:
    """The bytes of a range whose read was started, fewer at the end of the value; None if there is no such key.

    If TensorStore finds the range to be outside of the value, all of the value is read: it may only be
    shorter, and ``rclone serve s3`` answers so that TensorStore takes the length of the range for that of
    the value.

    Args:
        store: TensorStore's key-value store.
        key: the key.
        future: of ``store.read(key, byte_range=slice(start, stop))``.
        start, stop: the range.

    Raises:
        ValueError: as TensorStore raises it.
    """
    error = future.exception()
    if error is None:
        found = future.result()
        return found.value if found.state == "value" else None
    if not isinstance(error, ValueError) or _OUT_OF_RANGE not in str(error):
        raise error
    whole = store.read(key).result()
    return whole.value[start:stop] if whole.state == "value" else None


def prefix_end(prefix: str) -> str:
    """The first key after all keys that begin with ``prefix``; empty for no end."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


def backend_of(local: bool, options: Options | None = None) -> Backend:
    """The backend for checkpoints in a file system (``local``) or an object store.

    Args:
        local: whether it is a file system.
        options: ``timeout_secs`` bounds a single request to a store, and ``storage_options`` say how to
            reach it.
    """
    if local:
        return PosixBackend()
    chosen = options or Options()

    def open_keys(url: str) -> KeyValues:
        place = Location(url, False, storage_options=chosen.storage_options)
        return KeyValues(place, chosen.timeout_secs)

    return ObjectStoreBackend(open_keys)
