"""Checkpoints in an object store, which cannot rename: one conditional put of ``ckpt.json`` decides.

An attempt writes only under names of its own (``store_attempt``). Then it puts ``ckpt.json``, on the condition
that nobody has put or changed it since the attempt began. Before that put, readers see nothing of the attempt;
after it, the checkpoint exists, and ckpt reads the attempt's own files. The winner copies the small ones to the
names under which Orbax looks for them, ``commit_success.txt`` last, by which Orbax tells a finished checkpoint. If
it dies in between, the next writer there finishes the copies (``roll_forward``).

A deletion puts an owner's key of its own, and removes ``commit_success.txt``, ``ckpt.json``, all others, and at last the
description, which says that those are nothing without a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core._directory import paths
from ckpt_core._directory.owner import Claim, introduction, this_owner
from ckpt_core._directory.store_attempt import (
    COMMIT,
    DESCRIPTION,
    MARKED,
    OWNER,
    RECORD,
    Keys,
    StoreAttempt,
    attempts_in,
    files_of,
    folders,
    is_left,
    is_marked,
    log_failures,
    logger,
    tidy,
    token_in,
    token_of,
)
from ckpt_core._errors import CheckpointCorrupt, CheckpointError, CheckpointExists
from ckpt_core._format.packed import STAGING, apart, name_apart
from ckpt_core._format.untrusted import most_bytes
from ckpt_core._platform import ROOTS

_TREE = "_METADATA"
_NO_NAME = re.compile(r"[\x00-\x1f\x7f]|(^|/)\.{1,2}(/|$)")
"""What no request can carry as it is: XML has no control characters, and HTTP resolves ``..``."""
_UNLISTED = re.compile(r"\\|//")
"""What some servers take for ``/``. They list nothing there, so training would begin anew beside its steps."""


class ObjectStoreBackend:
    """Checkpoints as prefixes; ``PosixBackend`` says what its methods do. ``open_keys`` opens the keys and values below a URL."""

    def __init__(self, open_keys: Callable[[str], Keys]) -> None:
        self._open_keys = open_keys

    def _open(self, path: str) -> Keys:
        _refuse_names(path, _NO_NAME)
        return self._open_keys(path)

    def begin(self, path: str, *, overwrite: bool, durable: bool, token: str) -> StoreAttempt:
        _refuse_names(path, _UNLISTED)
        self._refuse_inside(path)
        keys = self._open(path)
        record, version = keys.get_version(RECORD)
        present = keys.list()
        if record is not None or COMMIT in present or _TREE in present:
            _refuse_another(path, keys, present, record)
        if record is not None and not overwrite:
            raise paths.already_there(path)
        left = record is None and is_left(keys, present)
        if left or any(key.startswith(STAGING) for key in present):
            with log_failures():
                tidy(keys)
            present = keys.list()
        replaced: list[str] = []
        if overwrite and (record is not None or _is_of_orbax(keys, present)):
            replaced = [key for key in present if token_in(key) in (None, token_of(record))]
        elif record is None and RECORD in present:
            raise CheckpointExists(f"{path}: another writer has just committed it")
        else:
            _refuse_others(path, present)
        owner = f"{this_owner()} {int(time.time())} {introduction()}, {secrets.token_hex(4)}"
        missing = version if record is None else None
        _put_owner(path, keys, apart(token, OWNER), owner.encode(), missing)
        return StoreAttempt(path, keys, token, version, replaced)

    def _refuse_inside(self, path: str) -> None:
        """Raises CheckpointExists if the path is inside of a checkpoint."""
        root, mark, rest = path.partition("://") if "://" in path else ("", "/", path[1:])
        names = rest.split("/")
        for length in range(len(names) - 1, 1, -1):
            around = root + mark + "/".join(names[:length])
            try:
                record = self._open(around).get(RECORD)
            except PermissionError:
                continue  # its credentials are for what lies below: a checkpoint around them is not theirs
            if record is not None:
                raise paths.lies_inside(path, around)

    def join(self, path: str, attempt_path: str, *, durable: bool) -> StoreAttempt:
        return StoreAttempt(path, self._open(path), attempt_path.rpartition(STAGING)[2])

    def read(self, path: str, name: str, limit_bytes: int | None = None) -> bytes | None:
        data = self._open(path).get(name)
        most = most_bytes(name) if limit_bytes is None else limit_bytes
        # after it was read: an object is not sparse, so a huge one is unlikely
        if data is not None and len(data) > most:
            what = f"has {len(data)} bytes, and can have {most} at most: it is damaged"
            raise CheckpointCorrupt(f"{path}/{name} {what}", file=name)
        return data

    def put(self, path: str, name: str, data: bytes) -> None:
        self._open(path).put(name, data)

    def remove(self, path: str, name: str) -> None:
        self._open(path).delete([name])

    def claim(self, path: str, name: str, data: bytes) -> Claim:
        _refuse_names(path, _UNLISTED)
        self.put(path, name, data)
        return Claim(None, False)

    def release(self, path: str, name: str, beginning: bytes) -> None:
        pass

    def reading(self, path: str, head: bytes) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # no locks here; Options.delete_grace_secs protects readers

    def files(self, path: str, known_bytes: Mapping[str, int] | None = None) -> dict[str, int]:
        keys = self._open(path)
        present = keys.list()
        token = token_of(keys.get(RECORD))
        known, found = known_bytes or {}, dict[str, int]()
        for key in present:
            name = name_apart(token, key) if token and key.startswith(apart(token)) else key
            if token_in(key) not in (None, token) and name not in known:
                continue  # of a save that is under way, or of one that this one has replaced
            if not name.startswith(".") and name not in found and name != OWNER:
                found[name] = known[name] if name in known else len(keys.get(key) or b"")
        return found

    def size(self, path: str, name: str) -> int | None:
        data = self._open(path).get(name)
        return None if data is None else len(data)

    def children(self, path: str) -> list[str]:
        return self.look(path).children

    def look(self, path: str) -> paths.Look:
        inside: dict[str, list[str]] = {}
        hidden: set[str] = set()
        for key in self._open(path).list():
            name, slash, rest = key.partition("/")
            if name.startswith("."):
                hidden.add(name)
            elif slash:
                inside.setdefault(name, []).append(rest)

        def is_checkpoint(name: str) -> bool:
            present = inside[name]
            return RECORD in present or _is_of_orbax(self._open(f"{path}/{name}"), present)

        return paths.Look(sorted(inside), is_checkpoint, frozenset(hidden))

    def exists(self, path: str) -> bool:
        return bool(self._open(path).list())

    def is_checkpoint(self, path: str) -> bool:
        keys = self._open(path)
        return keys.get(RECORD) is not None or _is_of_orbax(keys, keys.list())

    def replaced(self, path: str) -> None:
        return None

    def delete(self, path: str, trash: str | None = None) -> None:
        keys = self._open(path)
        present = keys.list()
        if trash is not None:
            parent, _, name = path.rpartition("/")
            self._copy(keys, present, f"{parent}/{trash}/{name}")
        record, nested = keys.get(RECORD), folders(present)
        own = nested and folders(files_of(record) or ())
        # if this is interrupted, the next clean-up finds it
        token = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:32]
        keys.put(apart(token, OWNER), json.dumps(own).encode())
        keys.delete([COMMIT])  # without it the checkpoint does not exist for Orbax
        if not is_marked(keys, present):
            keys.put(DESCRIPTION, MARKED)
        keys.delete([RECORD])  # and without that one not for us
        tidy(keys)

    def _copy(self, keys: Keys, present: list[str], target: str) -> None:
        """Copies all objects one by one, since a store does not rename; those by which it is a checkpoint come last."""
        if self._open(target).get(RECORD) is not None:  # of an earlier step with that number
            target = f"{target}.{secrets.token_hex(4)}"
        copy = self._open(target)
        for key in sorted(present, key=lambda key: (key == COMMIT, key == RECORD)):
            if (data := keys.get(key)) is not None:
                copy.put(key, data)

    def clean(self, path: str, *, only_look: bool = False) -> list[str]:
        """Also finishes what dead writers had committed and not yet copied, and what they had begun to delete."""
        found: list[str] = []
        present = self._open(path).list()
        for place in sorted({*attempts_in(present).values()}):
            keys = self._open(f"{path}/{place}".rstrip("/"))
            with log_failures():
                found += [place + key for key in tidy(keys, only_look=only_look)]
        return found


def _refuse_names(path: str, names: re.Pattern[str]) -> None:
    """Raises CheckpointError for names that stores do not all keep apart from others."""
    if found := names.search(path.partition("://")[2]):
        raise CheckpointError(
            f"{path!r} has {found[0]!r} in it, which stores do not all keep apart from other names: choose another "
            "path, of parts between single '/', without '\\', '.', '..' and control characters"
        )


_asked_of_conditions: set[str] = set()
"""Buckets that this process has written to, ``s3://bucket``: each is asked once."""


def _put_owner(path: str, keys: Keys, key: str, owner: bytes, missing: Any) -> None:
    """Puts the owner's key of an attempt; CheckpointExists if it is there: two processes copy one checkpoint to this path.
    Warns once of a store that ignores the conditions of a put. ``missing`` is the version of an absent key, if known.
    """
    bucket = "/".join(path.split("/")[:3])
    if path.startswith(ROOTS) and bucket not in _asked_of_conditions:
        logger.warning(
            "%s is in a bucket that %s mounts as a directory: two programs that write one step there may both be "
            "sure that it is theirs, and what is acknowledged is as safe as the mount makes it. The bucket's URL "
            "is safer, and faster",
            path,
            paths.mounted_bucket(path),
        )
        _asked_of_conditions.add(bucket)
    asked = bucket in _asked_of_conditions
    if missing is None and asked:
        keys.put(key, owner)
        return
    if missing is None:
        _, missing = keys.get_version(key)
    if not keys.put_if_unchanged(key, owner, missing) and keys.get(key) != owner:
        raise CheckpointExists(f"{path}: another process is copying the same checkpoint there")
    if asked:
        return
    try:
        ignored = keys.put_if_unchanged(key, owner, missing)  # it is there: this must be refused
    except BaseException:
        with contextlib.suppress(Exception):
            keys.delete([key])
        raise
    if ignored:
        warnings.warn(
            f"{bucket}: this store ignores conditional puts (If-None-Match): if two programs ever write one "
            "step there, an acknowledged checkpoint can be lost. See to it that only one does",
            RuntimeWarning,
            stacklevel=2,
        )
    _asked_of_conditions.add(bucket)


def _refuse_others(path: str, present: list[str]) -> None:
    """Raises CheckpointExists if anything but attempts is at a place without a checkpoint."""
    others = [key for key in present if token_in(key) is None]
    steps = {key.partition("/")[0] for key in others if key.partition("/")[2] in paths.SIGNS}
    if steps:
        raise CheckpointExists(
            f"{path} holds something else, other checkpoints ({', '.join(sorted(steps)[:5])}): "
            "save a step into it with ckpt.Checkpointer(path).save(step, ...), or choose another path"
        )
    if others:
        some = ", ".join(others[:3])
        raise CheckpointExists(f"{path} holds something else ({some}): choose another path")


def _refuse_another(path: str, keys: Keys, present: list[str], record: bytes | None) -> None:
    """Raises CheckpointExists for keys of somebody else with a checkpoint's names: they would be deleted."""
    known = {name for name in present if name in paths.SIGNS}

    def read(name: str) -> bytes | None:
        return record if name == RECORD else keys.get(name) if name in known else None

    if not paths.is_meant(read):
        raise CheckpointExists(
            f"{path} holds no checkpoint ({', '.join(sorted(present)[:5])}), whose {', '.join(sorted(known))} is "
            "another file of that name: choose another path, or move it away; overwrite=True replaces "
            "checkpoints only"
        )


def _is_of_orbax(keys: Keys, present: list[str]) -> bool:
    """Whether these are the keys of a checkpoint that Orbax finished, with ``commit_success.txt`` as the last one. One that was
    copied there from a disk has none, but its description has the time of its commit.
    """
    if is_marked(keys, present):
        return False
    if COMMIT in present:
        return True
    if DESCRIPTION not in present:
        return _TREE in present
    if any(key.endswith(f"/{COMMIT}") for key in present):
        return False
    with contextlib.suppress(ValueError, AttributeError):
        described = json.loads(keys.get(DESCRIPTION) or b"{}")
        return described.get("commit_timestamp_nsecs") is not None
    return False
