"""Checkpoints in an object store, which cannot rename: one conditional put of ``ckpt.json`` decides.

An attempt writes only under names of its own: small files below ``.attempt.<token>/``, data files with the
token in their names. Then it puts ``ckpt.json``, on the condition that nobody has put or changed it since the
attempt began. Before that put, readers see nothing of the attempt; after it, the checkpoint exists. The winner
copies the small files to the names under which Orbax looks for them, ``commit_success.txt`` last, by which
Orbax tells a finished checkpoint. If it dies in between, the next writer there finishes the copies
(``roll_forward``), and readers take the small files from ``.attempt.<token>/`` meanwhile.

A deletion removes ``commit_success.txt`` first and ``ckpt.json`` next.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ckpt_core._directory.locks import Claim
from ckpt_core._directory.owner import introduction, lives, this_owner
from ckpt_core._errors import VISIBLE, CheckpointCorrupt, CheckpointError, CheckpointExists
from ckpt_core._format.limits import most_bytes

logger = logging.getLogger("ckpt_core")

RECORD = "ckpt.json"
COMMIT = "commit_success.txt"
_DESCRIPTION = "_CHECKPOINT_METADATA"
_TREE = "_METADATA"
_STAGING = ".attempt."
_OWNER = "owner"
_DELETED = ".deleted"
"""Key that a deletion puts before it removes the record: what is left beside it belongs to nobody."""
_TOKEN = re.compile(rb'"token": ?"([0-9a-zA-Z]+)"')
_HEAD_BYTES = 300
"""The token is among the first fields of a record."""
FOREIGN_ATTEMPT_SECS = 24 * 3600.0
"""Age after which an attempt of a process on another host counts as left over."""


class Keys(Protocol):
    """The keys and values below one prefix of a store; every call blocks."""

    def get(self, key: str) -> bytes | None: ...
    def get_version(self, key: str) -> tuple[bytes | None, Any]: ...
    def put(self, key: str, value: bytes) -> None: ...
    def put_all(self, values: Mapping[str, bytes]) -> None: ...
    def put_if_unchanged(self, key: str, value: bytes, version: Any) -> bool: ...
    def list(self, prefix: str = "") -> list[str]: ...
    def delete(self, keys: Iterable[str]) -> None: ...


class ObjectStoreBackend:
    """Checkpoints as prefixes; see ``Backend``.

    Args:
        open_keys: opens the key-value view of the objects below a URL.
    """

    def __init__(self, open_keys: Callable[[str], Keys]) -> None:
        self._open = open_keys

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> StoreAttempt:
        keys = self._open(path)
        record, version = keys.get_version(RECORD)
        if record is not None and not overwrite:
            raise CheckpointExists(
                f"{path} exists already: choose another path, or pass overwrite=True to replace it"
            )
        present = keys.list()
        replaced: list[str] = []
        if overwrite and (record is not None or _is_of_orbax(keys, present)):
            committed = _token_of(record)
            if committed in _attempts(present):
                roll_forward(keys, committed or "")
                present = keys.list()
            _, replaced = _split(present)
        else:
            _make_room(path, keys, present)
        owner = f"{this_owner()} {int(time.time())} {introduction()}"
        keys.put(f"{_STAGING}{token}/{_OWNER}", owner.encode())
        return StoreAttempt(path, keys, token, version, replaced)

    def join(self, path: str, attempt_path: str, *, durable: bool) -> StoreAttempt:
        return StoreAttempt(path, self._open(path), attempt_path.rpartition(_STAGING)[2])

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

    def read_staged(self, path: str, token: str, name: str, limit_bytes: int) -> bytes | None:
        return self.read(path, f"{_STAGING}{token}/{name}", limit_bytes)

    def put(self, path: str, name: str, data: bytes) -> None:
        self._open(path).put(name, data)

    def claim(self, path: str, name: str, data: bytes) -> Claim:
        self.put(path, name, data)
        return Claim(None, False)

    def reading(self, path: str, head: bytes) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # no locks here; Options.delete_grace_secs protects readers

    def files(self, path: str) -> dict[str, int]:
        keys = self._open(path)
        return _sizes(keys, (key for key in keys.list() if not key.startswith(".")))

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
        return keys.get(RECORD) is not None or _is_of_orbax(keys, keys.list())

    def delete(self, path: str, trash: str | None = None) -> None:
        if trash is not None:
            raise CheckpointError(
                f"{path}: an object store cannot rename, so nothing can be moved to {trash!r}: delete it, and "
                "leave Options(trash_directory=) out there"
            )
        keys = self._open(path)
        keys.delete([COMMIT])  # without it the checkpoint does not exist for Orbax
        keys.put(_DELETED, b"")
        keys.delete([RECORD])  # and without that one not for us
        _delete_rest(keys, keys.list())

    def clean(self, path: str) -> list[str]:
        """Also finishes what dead writers had committed and not yet copied."""
        keys = self._open(path)
        present = keys.list()
        removed = _remove_dead_attempts(keys, present)
        for token, place in _attempts(present).items():
            below = self._open(f"{path}/{place}".rstrip("/"))
            if _token_of(below.get(RECORD)) == token:
                roll_forward(below, token)
        return removed

    def replaced(self, path: str) -> str | None:
        return None


def _make_room(path: str, keys: Keys, present: list[str]) -> None:
    """Before an attempt where there is no checkpoint: removes what dead writers left.

    Raises:
        CheckpointExists: there is something else.
    """
    if _DELETED in present:  # the deletion of an earlier checkpoint was interrupted
        _delete_rest(keys, present)
        return
    _remove_dead_attempts(keys, present)
    _, others = _split(present)
    if others:
        raise CheckpointExists(
            f"{path} holds something else ({', '.join(others[:3])}): choose another path"
        )


def _delete_rest(keys: Keys, present: list[str]) -> None:
    """Deletes all but attempts that may be running; the mark of the deletion last."""
    _, others = _split(present)
    keys.delete(key for key in others if key != _DELETED)
    keys.delete([_DELETED])


def _attempts(present: Iterable[str]) -> dict[str, str]:
    """Token -> path of the checkpoint, ending with ``/`` if any, for each attempt among the keys."""
    found: dict[str, str] = {}
    for key in present:
        place, mark, rest = key.partition(_STAGING)
        if mark and rest.partition("/")[2] == _OWNER:
            found[rest.partition("/")[0]] = place
    return found


def _split(present: list[str]) -> tuple[list[str], list[str]]:
    """The keys that attempts wrote, and the others."""
    attempts = _attempts(present)
    written = {
        key
        for key in present
        if any(
            key.startswith(place) and _is_of(key[len(place) :], token)
            for token, place in attempts.items()
        )
    }
    return sorted(written), [key for key in present if key not in written]


def _is_of(key: str, token: str) -> bool:
    """Whether an attempt wrote this key: a small file, or a data file."""
    return key.startswith(f"{_STAGING}{token}/") or f"/{token}." in key


def _remove_dead_attempts(keys: Keys, present: list[str]) -> list[str]:
    """Deletes what attempts of dead processes left, below all checkpoints; returns the keys."""
    removed: list[str] = []
    for token, place in _attempts(present).items():
        owner = (keys.get(f"{place}{_STAGING}{token}/{_OWNER}") or b"").decode(errors="replace")
        record = keys.get(f"{place}{RECORD}")
        if _is_dead(owner) and _token_of(record) != token:
            removed += [
                key for key in present if key.startswith(place) and _is_of(key[len(place) :], token)
            ]
    keys.delete(removed)
    return removed


def _is_dead(owner: str) -> bool:
    """Whether the process that began an attempt is gone; a guess by age for one on another host."""
    process, _, rest = owner.partition(" ")
    living = lives(process)
    if living is not None:
        return not living
    began = rest.partition(" ")[0]
    return began.isdigit() and time.time() - int(began) > FOREIGN_ATTEMPT_SECS


def _token_of(record: bytes | None) -> str | None:
    """The token in a record; None if there is no record, or it is damaged."""
    found = _TOKEN.search((record or b"")[:_HEAD_BYTES])
    return found[1].decode() if found else None


def _is_of_orbax(keys: Keys, present: list[str]) -> bool:
    """Whether these are the keys of a checkpoint that Orbax finished.

    In a store Orbax puts ``commit_success.txt`` last; of one that was copied there from a disk, the
    description has the time of its commit.
    """
    if COMMIT in present:
        return True
    if _DELETED in present:
        return False
    if _DESCRIPTION not in present:
        _, others = _split(present)  # older versions of Orbax describe the items only
        return any(key.partition("/")[2] == _TREE or key == _TREE for key in others)
    with contextlib.suppress(ValueError, AttributeError):
        described = json.loads(keys.get(_DESCRIPTION) or b"{}")
        return described.get("commit_timestamp_nsecs") is not None
    return False


def roll_forward(keys: Keys, token: str, known: Mapping[str, bytes] | None = None) -> set[str]:
    """Copies the small files of a committed attempt to where Orbax looks for them; returns their names.

    Does nothing if that is done already: the originals are deleted last. It may run more than once, and
    in several processes.

    Args:
        keys: the keys of the checkpoint.
        token: token of the attempt, from the record.
        known: content of some of the files, which is then not read.
    """
    staging = f"{_STAGING}{token}/"
    staged = keys.list(staging)
    files = dict(known or {})
    for name in (key.removeprefix(staging) for key in staged):
        if name != _OWNER and name not in files and (data := keys.get(staging + name)) is not None:
            files[name] = data
    last = {name: data for name, data in files.items() if name == COMMIT}
    keys.put_all({name: data for name, data in files.items() if name != COMMIT})
    keys.put_all(last)
    _delete_if_allowed(keys, staged)
    return {*files}


def _delete_if_allowed(keys: Keys, names: Iterable[str]) -> None:
    """Deletes what is no longer needed; a save that is committed does not fail if that is refused."""
    try:
        keys.delete(names)
    except Exception as error:
        logger.warning("what a save no longer needs cannot be deleted: %s", error)


def _sizes(
    keys: Keys, names: Iterable[str], told: Mapping[str, int] | None = None
) -> dict[str, int]:
    known = told or {}
    return {key: known[key] if key in known else len(keys.get(key) or b"") for key in names}


class StoreAttempt:
    """One attempt; see ``Attempt``.

    Args:
        target: URL of the checkpoint.
        keys: the objects below it.
        token: token of the attempt.
        version: version of ``ckpt.json`` when the attempt began; None in a process that joined it.
        replaced: keys of the checkpoint that the attempt replaces.
    """

    def __init__(
        self,
        target: str,
        keys: Keys,
        token: str,
        version: Any = None,
        replaced: Iterable[str] = (),
    ) -> None:
        self._target = self.data_path = target
        self._keys = keys
        self._token = token
        self._version = version
        self._replaced = {*replaced}
        self._staging = f"{_STAGING}{token}/"
        self.path = f"{target}/{_STAGING}{token}"
        self.data_prefix = f"{token}."
        self._record = RECORD, b""
        self._written: dict[str, bytes] = {}
        self._visible = False

    def write(self, name: str, data: bytes) -> None:
        self._keys.put(self._staging + name, data)
        self._written[name] = data

    def read(self, name: str) -> bytes:
        if name in self._written:
            return self._written[name]
        found = self._keys.get(name if f"/{self._token}." in name else self._staging + name)
        if found is None:
            raise FileNotFoundError(f"{self._target}/{name}")
        return found

    def files(self, below: str = "", told: Mapping[str, int] | None = None) -> dict[str, int]:
        folder = f"{below}/" if below else ""
        small = [key.removeprefix(self._staging) for key in self._keys.list(self._staging + folder)]
        data = [key for key in self._keys.list(folder) if f"/{self._token}." in key]
        found = [name for name in small if name != _OWNER] + data
        known = told or {}
        return {name: known[name] if name in known else len(self.read(name)) for name in found}

    def make_durable(self, record_name: str, record: bytes) -> None:
        # Objects are durable when put returns; the record makes the checkpoint visible, in
        # commit().
        self._record = record_name, record

    def commit(self) -> None:
        record_name, record = self._record
        if self._keys.get(self._staging + _OWNER) is None:
            raise CheckpointError(
                f"{self._target}: another writer took this one for dead, and removed what it had written: "
                "nothing was committed"
            )
        # If the answer to the put is lost, its repetition fails although the first one succeeded.
        if not self._keys.put_if_unchanged(record_name, record, self._version) and (
            self._keys.get(record_name) != record
        ):
            raise CheckpointExists(f"{self._target}: another writer committed it meanwhile")
        self._visible = True
        try:
            if self._replaced:
                # until all is copied, Orbax would see a mixture
                _delete_if_allowed(self._keys, [COMMIT])
            copied = roll_forward(self._keys, self._token, self._written)
        except BaseException as error:
            error.add_note(
                f"the checkpoint is {VISIBLE}: ckpt reads it, Orbax does not before the next writer there, "
                "such as a Checkpointer, has finished the copies of its small files"
            )
            raise
        _delete_if_allowed(self._keys, self._replaced - copied - {record_name})

    def abort(self) -> None:
        if self._visible:
            return
        with contextlib.suppress(Exception):
            self._keys.delete(key for key in self._keys.list() if _is_of(key, self._token))
