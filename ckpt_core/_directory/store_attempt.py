"""One attempt to write a checkpoint into an object store; ``object_store`` has the protocol.

It writes data files with its token in their names, so that two attempts share no name. Small files stand in the
record itself; those of other processes than 0, and large ones, are ``.attempt.<token>.<name>``. Those are what ckpt
reads, for good; the names under which Orbax looks for the small files get copies.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Protocol

from ckpt_core._directory.backend import Attempt
from ckpt_core._errors import VISIBLE, CheckpointCorrupt, CheckpointError, CheckpointExists
from ckpt_core._format.packed import MOST_HELD_BYTES, MOST_PACKED_BYTES, apart, name_apart
from ckpt_core._format.packed import STAGING as STAGING
from ckpt_core._format.record import FileRecord, load_record

logger = logging.getLogger("ckpt_core")

RECORD = "ckpt.json"
COMMIT = "commit_success.txt"
DESCRIPTION = "_CHECKPOINT_METADATA"
OWNER = "owner"
PASSING = ".passing/"
_TOKEN = re.compile(rb'"token": ?"([0-9a-zA-Z]+)"')
FOREIGN_ATTEMPT_SECS = 24 * 3600.0
"""Age after which an attempt of a process on another host counts as left over."""
_HEAD_BYTES = 300
"""The token is among the first fields of a record."""


class Keys(Protocol):
    """The keys and values below one prefix of a store; every call blocks."""

    def get(self, key: str, first_bytes: int | None = None) -> bytes | None: ...
    def get_version(self, key: str) -> tuple[bytes | None, Any]: ...
    def put(self, key: str, value: bytes) -> None: ...
    def put_all(self, values: Mapping[str, bytes]) -> None: ...
    def put_if_unchanged(self, key: str, value: bytes, version: Any) -> bool: ...
    def list(self, prefix: str = "") -> list[str]: ...
    def delete(self, keys: Iterable[str]) -> None: ...


def attempts_in(present: Iterable[str]) -> dict[str, str]:
    """Token -> path of the checkpoint, ending with ``/`` if any, for each attempt among the keys."""
    found: dict[str, str] = {}
    for key in present:
        place, mark, rest = key.partition(STAGING)
        token, _, name = rest.partition(".")
        if mark and name == OWNER:
            found[token] = place
    return found


def is_of(key: str, token: str) -> bool:
    """Whether an attempt wrote this key: a small file, or a data file."""
    return key.startswith(apart(token)) or f"/{token}." in key


def token_of(record: bytes | None) -> str | None:
    """The token in a record; None if there is no record, or it is damaged."""
    found = _TOKEN.search((record or b"")[:_HEAD_BYTES])
    return found[1].decode() if found else None


def roll_forward(
    keys: Keys, token: str, known: Mapping[str, bytes] | None = None
) -> tuple[set[str], str | None]:
    """Copies the small files of a committed attempt to where Orbax looks for them; returns the names of the copies,
    and the last ``committed_token``. Any number of processes may do so at once, or long after the commit. One that
    sees another commit copies that one's files, and one that sees a deletion removes its copies, so that the last
    leaves no mixture. ``known`` is the content of the files, None to read them.
    """
    copied: set[str] = set()
    committed: str | None = token
    while committed:
        files = known if known is not None and committed == token else _small_files(keys, committed)
        copied |= {*files}
        commit, first = ({*files} & {name} for name in (COMMIT, DESCRIPTION))
        for part in (first, {*files} - first - commit):  # DESCRIPTION says whose the others are
            keys.put_all({name: files[name] for name in part})
        now = committed_token(keys)
        if now == committed:
            keys.put_all({name: files[name] for name in commit})
            now = committed_token(keys)
        if now == committed:
            return copied, committed
        committed = now
        if committed is None:
            keys.delete(copied - {DESCRIPTION})
            keys.delete(copied & {DESCRIPTION})
            committed = committed_token(keys)
    return copied, committed


def _small_files(keys: Keys, token: str) -> Mapping[str, bytes]:
    """Name -> content of the small files of the committed checkpoint, if it has this token still."""
    record = keys.get(RECORD)
    if record is None or token_of(record) != token:
        return {}
    files: dict[str, bytes] = {}
    with contextlib.suppress(CheckpointCorrupt):
        files.update(load_record(record).small_files)
    return files | _apart(keys, token)


def _apart(keys: Keys, token: str) -> dict[str, bytes]:
    """Name -> content of the attempt's small files that do not stand in its record."""
    names = [name_apart(token, key) for key in keys.list(apart(token))]
    wanted = [name for name in names if name != OWNER and not name.startswith(PASSING)]
    found = ((name, keys.get(apart(token, name))) for name in wanted)
    return {name: data for name, data in found if data is not None}


def committed_token(keys: Keys) -> str | None:
    """The token of the checkpoint that is there; empty if its record is damaged, None if there is none."""
    record = keys.get(RECORD, _HEAD_BYTES)
    return None if record is None else token_of(record) or ""


def settle(keys: Keys) -> None:
    """After copies were deleted: puts those of a checkpoint that was committed meanwhile again."""
    if token := committed_token(keys):
        roll_forward(keys, token)


def remove_attempt(keys: Keys, written: Iterable[str]) -> None:
    """Deletes the keys of attempts; their owners' last, as without them nobody would know whose the others are."""
    names = list(written)
    owners = [key for key in names if attempts_in([key])]
    keys.delete(key for key in names if key not in owners)
    keys.delete(owners)


@contextlib.contextmanager
def tidying() -> Generator[None]:
    """Logs what fails inside: no save fails because what nobody needs any more cannot be deleted."""
    try:
        yield
    except Exception as error:
        logger.warning("what nobody needs any more cannot be deleted: %s", error)


class StoreAttempt(Attempt):
    """One attempt; see ``Attempt``."""

    def __init__(
        self,
        target: str,
        keys: Keys,
        token: str,
        version: Any = None,
        replaced: Iterable[str] = (),
        before: bytes | None = None,
    ) -> None:
        self._target = target
        self._keys = keys
        self._token = token
        self._version = version  # of ``ckpt.json`` at the start; None in a process that joined
        self._replaced = {*replaced}  # keys of the checkpoint that the attempt replaces
        self._before = before  # content of ``ckpt.json`` at the start
        self._began = time.time()
        self.path = f"{target}/{STAGING}{token}"
        self.data_prefix = f"{token}."
        self._record = RECORD, b""
        self._held: dict[str, bytes] = {}
        self._apart: dict[str, bytes] = {}
        self._data: set[str] = set()  # names of data files; in a copy without its token
        self._passes = False
        self._deciding = False

    def write(self, name: str, data: bytes, *, until_commit: bool = False) -> FileRecord:
        if until_commit:
            self._passes = True
            self._keys.put(apart(self._token, PASSING + name), data)
        elif (
            self._version is None
            or len(data) > MOST_HELD_BYTES
            or len(data) + sum(map(len, self._held.values())) > MOST_PACKED_BYTES
        ):
            self._keys.put(apart(self._token, name), data)
            self._apart[name] = data
        else:
            self._held[name] = data
        return FileRecord.of(data)

    def read(self, name: str) -> bytes:
        for files in (self._held, self._apart):
            if name in files:
                return files[name]
        found = self._keys.get(apart(self._token, PASSING + name))
        if found is None:
            raise FileNotFoundError(f"{self._target}/{name}")
        return found

    def write_data(self, name: str, parts: Iterable[bytes]) -> None:
        self._data.add(name)
        self._keys.put(name, b"".join(parts))

    take = read

    def small_files(self) -> Mapping[str, bytes]:
        return self._held

    def files(self, known_bytes: Mapping[str, int]) -> dict[str, int]:
        return {name: len(data) for name, data in (self._held | self._apart).items()} | {
            **known_bytes
        }

    def make_durable(self, record_name: str, record: bytes) -> None:
        # Objects are durable when put returns; the record makes the checkpoint visible, in
        # commit().
        self._record = record_name, record

    def commit(self) -> None:
        record_name, record = self._record
        self._refuse_if_taken_for_dead()
        self._deciding = True
        try:
            # If the answer to the put is lost, its repetition fails although the first one succeeded.
            if not self._keys.put_if_unchanged(record_name, record, self._version) and (
                self._keys.get(record_name) != record
            ):
                self._deciding = False
                raise CheckpointExists(f"{self._target}: another writer committed it meanwhile")
            # Who takes an attempt for dead empties its owner's key, and then looks at the record; who commits one
            # that is old enough for that puts the record, and then looks at the key. So one of them sees the other.
            if time.time() - self._began > FOREIGN_ATTEMPT_SECS / 2:
                try:
                    self._refuse_if_taken_for_dead()
                except CheckpointError:
                    self._take_back(record_name, record)
                    raise
            if self._replaced:
                # until all is copied, Orbax would see a mixture
                with tidying():
                    self._keys.delete([COMMIT])
            known = self._held | self._apart
            if self._passes:
                known |= _apart(self._keys, self._token)
            self._tidy(*roll_forward(self._keys, self._token, known))
        except BaseException as error:
            if self._deciding:
                error.add_note(
                    f"the checkpoint may be there, {VISIBLE}: if so, ckpt reads it, and Orbax does when the "
                    "next writer there, such as a Checkpointer, has copied its small files"
                )
            raise

    def _refuse_if_taken_for_dead(self) -> None:
        if not self._keys.get(apart(self._token, OWNER)):
            raise CheckpointError(
                f"{self._target}: another writer took this one for dead, and removed what it had written: "
                "nothing was committed"
            )

    def _take_back(self, record_name: str, record: bytes) -> None:
        """Puts back what the record has replaced: its data may have been deleted before it was put."""
        there, version = self._keys.get_version(record_name)
        if there == record and self._before is not None:
            self._keys.put_if_unchanged(record_name, self._before, version)
        elif there == record:
            self._keys.delete([record_name])
        self._deciding = False

    def _tidy(self, copied: set[str], committed: str | None) -> None:
        """Deletes what nobody needs any more but the ``copied`` names, at last the owner's key; all of this attempt,
        if ``committed`` is the token of another one.
        """
        with tidying():
            if left := self._replaced - copied - {RECORD}:
                self._keys.delete(left)
                if committed_token(self._keys) != self._token:
                    settle(self._keys)
            if committed != self._token:
                remove_attempt(self._keys, self._mine())
            elif self._passes:
                self._keys.delete(self._keys.list(apart(self._token, PASSING)))
            self._keys.delete([apart(self._token, OWNER)])

    def _mine(self) -> list[str]:
        return [key for key in self._keys.list() if is_of(key, self._token)]

    def abort(self) -> None:
        # Who does not know whether the store has carried the put out, or will, deletes nothing.
        if self._deciding:
            return
        with contextlib.suppress(Exception):
            if committed_token(self._keys) != self._token:  # a copy has the token of its source
                remove_attempt(self._keys, {*self._mine(), *self._data})
