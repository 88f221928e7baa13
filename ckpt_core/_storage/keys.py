"""Keys and values of an object store, for files that are not arrays."""

from __future__ import annotations

from typing import Any

from ckpt_core._directory import Backend, ObjectStoreBackend, PosixBackend
from ckpt_core._storage._tensorstore import ts
from ckpt_core._storage.writer import Location, new_context


class KeyValues:
    """Keys and values below one location of an object store; every call blocks."""

    def __init__(self, location: Location) -> None:
        self._store: Any = ts.KvStore.open(location.spec(), context=new_context()).result()

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is no such key."""
        found = self._store.read(key).result()
        return bytes(found.value) if found.state == "value" else None

    def put(self, key: str, value: bytes) -> None:
        """Writes the value."""
        self._store.write(key, value).result()

    def put_if_absent(self, key: str, value: bytes) -> bool:
        """Writes the value if the key does not exist; whether it was written."""
        absent = self._store.read(key).result()
        if absent.state == "value":
            return False
        # `if_equal` with the generation of a missing key: the write fails if the key exists by
        # then.
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


def backend_of(local: bool) -> Backend:
    """The backend for checkpoints in a file system (``local``) or an object store."""
    return (
        PosixBackend() if local else ObjectStoreBackend(lambda url: KeyValues(Location(url, False)))
    )
