"""Keys and values of an object store, for files that are not arrays."""

from __future__ import annotations

from typing import Any

from ckpt_core._directory import Backend, ObjectStoreBackend, PosixBackend
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.failures import settled
from ckpt_core._storage.location import Location, new_context

_NO_SUCH_KEY = ".ckpt-probe"


class KeyValues:
    """Keys and values below one location of an object store; every call blocks.

    Raises, each of them:
        OSError: the store refused, or did not answer; see ``failures.refusal``.
        CheckpointError: any other failure.
    """

    def __init__(self, location: Location) -> None:
        self._path = location.path
        self._store: Any = self._done(
            "open", ts.KvStore.open(location.spec(), context=new_context())
        )

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is no such key."""
        found = self._done(f"read {key}", self._store.read(key))
        return bytes(found.value) if found.state == "value" else None

    def put(self, key: str, value: bytes) -> None:
        """Writes the value."""
        self._done(f"write {key}", self._store.write(key, value))

    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Writes the value if the key does not exist; whether it was written."""
        absent = self._done(f"read {key}", self._store.read(key))
        if absent.state == "value":
            return False
        # `if_equal` with the generation of a missing key: the write fails if the key exists by
        # then.
        writing = self._store.write(key, value, if_equal=absent.stamp.generation)
        return bool(self._done(f"write {key}", writing).generation)

    def list(self, prefix: str = "") -> list[str]:
        """Every key that begins with ``prefix``."""
        keys = self._range(prefix, prefix_end(prefix))
        if self._path.startswith("gs://"):
            keys += self._overlooked(keys, prefix)
        return [key.decode(errors="surrogateescape") for key in keys]

    def _range(self, first: str | bytes, end: str) -> list[bytes]:
        return list(
            self._done(f"list {first!r}", self._store.list(ts.KvStore.KeyRange(first, end)))
        )

    def _overlooked(self, keys: list[bytes], prefix: str) -> list[bytes]:
        """The keys that a listing of Google's store left out.

        TensorStore 0.1.86 stops a listing without an error at the first page that the store refuses (status
        401, 403 or 404): a directory looks empty, or shorter than it is. So the listing continues after its
        last key until no key comes. If there was none at all, a read, whose refusal TensorStore does report,
        comes before the last try.
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

    def delete_all(self, prefix: str = "") -> None:
        """Deletes every key that begins with ``prefix``."""
        # not delete_range, which lists, and tells of a refusal no more than a listing does
        deleting = [(key, self._store.write(key, None)) for key in self.list(prefix)]
        for key, future in deleting:
            self._done(f"delete {key}", future)

    def _done(self, doing: str, future: Any) -> Any:
        """The result of a request, once it is there."""
        return settled(future, f"{self._path}: cannot {doing}")


def prefix_end(prefix: str) -> str:
    """The first key after all keys that begin with ``prefix``; empty for no end."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


def backend_of(local: bool) -> Backend:
    """The backend for checkpoints in a file system (``local``) or an object store."""
    return (
        PosixBackend() if local else ObjectStoreBackend(lambda url: KeyValues(Location(url, False)))
    )
