"""Checkpoints in an object store, which cannot rename: the commit is the write of the record.

A checkpoint exists only when ``ckpt.json`` does. That key is written with a conditional put, which
fails if it exists. If the reply to the put was lost, the client's retry fails although the first
put succeeded; therefore a failed put is followed by a comparison with the stored record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from ckpt_core._directory.locks import Claim
from ckpt_core._directory.owner import introduction
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointExists
from ckpt_core._format.limits import most_bytes

RECORD = "ckpt.json"
ATTEMPT = "ckpt.attempt"
"""Key written first: marks keys without a record as an unfinished attempt, which may be deleted.

Its value is the token of the attempt and the process that began it.
"""
_FOREIGN_SIGNS = ("commit_success.txt", "_CHECKPOINT_METADATA", "_METADATA")


class Keys(Protocol):
    """The keys and values below one prefix of a store."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> None: ...
    def put_if_absent(self, key: str, value: bytes) -> bool: ...
    def list(self, prefix: str = "") -> list[str]: ...
    def delete_all(self, prefix: str = "") -> None: ...


class ObjectStoreBackend:
    """Checkpoints as prefixes; see ``Backend``.

    Args:
        open_keys: opens the key-value view of the objects below a URL.
    """

    def __init__(self, open_keys: Callable[[str], Keys]) -> None:
        self._open = open_keys

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> StoreAttempt:
        keys = self._open(path)
        if keys.get(RECORD) is not None:
            if overwrite:
                raise CheckpointError(
                    f"{path}: an object store cannot replace a checkpoint in one step, so "
                    "overwrite=True would risk the old one: save to another name, or delete it first"
                )
            raise CheckpointExists(f"{path} exists already: choose another path")
        present = keys.list()
        if present and ATTEMPT not in present:
            raise CheckpointExists(
                f"{path} holds something else ({', '.join(present[:3])}): choose another path"
            )
        if present:
            keys.delete_all()  # an attempt that never committed
        keys.put(ATTEMPT, f"{token} {introduction()}".encode())
        return StoreAttempt(path, keys, token)

    def join(self, path: str, attempt_path: str, *, durable: bool) -> StoreAttempt:
        return StoreAttempt(path, self._open(path))

    def read(self, path: str, name: str, limit_bytes: int | None = None) -> bytes | None:
        # Unlike a sparse file, an object really stores all its bytes, so a huge one is unlikely:
        # read it, then check its size.
        data = self._open(path).get(name)
        most = most_bytes(name) if limit_bytes is None else limit_bytes
        if data is not None and len(data) > most:
            raise CheckpointCorrupt(
                f"{path}/{name} has {len(data)} bytes, and can have {most} at most: it is damaged",
                file=name,
            )
        return data

    def put(self, path: str, name: str, data: bytes) -> None:
        self._open(path).put(name, data)

    def claim(self, path: str, name: str, data: bytes) -> Claim:
        self.put(path, name, data)
        return Claim(None, False)

    def reading(self, path: str, head: bytes) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # no locks here; Options.delete_grace_secs protects readers

    def files(self, path: str) -> dict[str, int]:
        return _sizes(self._open(path))

    def size(self, path: str, name: str) -> int | None:
        data = self._open(path).get(name)
        return None if data is None else len(data)

    def children(self, path: str) -> list[str]:
        names = {key.partition("/")[0] for key in self._open(path).list() if "/" in key}
        return sorted(name for name in names if not name.startswith("."))

    def exists(self, path: str) -> bool:
        return bool(self._open(path).list())

    def is_checkpoint(self, path: str) -> bool:
        keys = self._open(path)
        if keys.get(RECORD) is not None:
            return True
        present = keys.list()
        return ATTEMPT not in present and any(key in _FOREIGN_SIGNS for key in present)

    def delete(self, path: str, trash: str | None = None) -> None:
        if trash is not None:
            raise CheckpointError(
                f"{path}: an object store cannot rename, so nothing can be moved to {trash!r}: delete it, and "
                "leave Options(trash_directory=) out there"
            )
        keys = self._open(path)
        keys.delete_all(RECORD)  # first, because without a record the checkpoint does not exist
        keys.delete_all()

    def clean(self, path: str) -> list[str]:
        return []  # attempts have no hidden names here; the next one at the same path deletes them

    def replaced(self, path: str) -> str | None:
        return None


def _sizes(keys: Keys, prefix: str = "", told: Mapping[str, int] | None = None) -> dict[str, int]:
    known = told or {}
    return {
        key: known[key] if key in known else len(keys.get(key) or b"") for key in keys.list(prefix)
    }


class StoreAttempt:
    """One attempt; see ``Attempt``.

    Args:
        path: URL of the checkpoint.
        keys: the objects below it.
        token: token of the attempt if this process began it; None if it joined it.
    """

    def __init__(self, path: str, keys: Keys, token: str | None = None) -> None:
        self._path = path
        self._keys = keys
        self._token = token
        self._record = RECORD, b""

    @property
    def path(self) -> str:
        return self._path

    def write(self, name: str, data: bytes) -> None:
        self._keys.put(name, data)

    def read(self, name: str) -> bytes:
        found = self._keys.get(name)
        if found is None:
            raise FileNotFoundError(f"{self._path}/{name}")
        return found

    def files(self, below: str = "", told: Mapping[str, int] | None = None) -> dict[str, int]:
        return _sizes(self._keys, f"{below}/" if below else "", told or {})

    def make_durable(self, record_name: str, record: bytes) -> None:
        # Objects are durable when put returns; the record makes the checkpoint visible, in
        # commit().
        self._record = record_name, record

    def commit(self) -> None:
        record_name, record = self._record
        token, who = self._current_attempt()
        if token != self._token:
            raise CheckpointError(
                f"{self._path}: another try ({who}, token {token or 'none'}) has begun to write here since, "
                "and removed what this one wrote: nothing was committed. Give each run a directory of "
                "its own"
            )
        if self._keys.put_if_absent(record_name, record):
            return
        if self._keys.get(record_name) != record:
            raise CheckpointExists(f"{self._path}: another writer committed it meanwhile")

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            if self._current_attempt()[0] == self._token and self._keys.get(RECORD) is None:
                self._keys.delete_all()

    def _current_attempt(self) -> tuple[str, str]:
        """Token of the attempt whose files are at the path, and the process that began it."""
        token, _, who = (self._keys.get(ATTEMPT) or b"").decode(errors="replace").partition(" ")
        return token, who or "an unknown one"
