"""Attempts to write a checkpoint into an object store, and what dead ones left; ``object_store`` has the protocol.

An attempt writes data files with its token in their names, so that two attempts share none. Small files stand in the
record; those of other processes than 0, and large ones, are ``.attempt.<token>.<name>``. ckpt reads these for good;
under the names where Orbax looks lie copies.

A place holds the checkpoint of its record, and what attempts that may live have written. ``tidy`` deletes the rest. A
listing is not of one moment: nothing of an attempt is deleted before its owner and then the record were read. All
attempts share the names of copies: after some were deleted, those of a checkpoint committed meanwhile are put again
(``put_copies_again``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ckpt_core._directory.owner import lives
from ckpt_core._errors import VISIBLE, CheckpointCorrupt, CheckpointError, CheckpointExists
from ckpt_core._format.packed import MOST_HELD_BYTES, MOST_PACKED_BYTES, STAGING, apart, name_apart
from ckpt_core._format.record import FileRecord, load_record

logger = logging.getLogger("ckpt_core")

RECORD = "ckpt.json"
COMMIT = "commit_success.txt"
DESCRIPTION = "_CHECKPOINT_METADATA"
OWNER = "owner"
PASSING = ".passing/"
_OF_ATTEMPT = re.compile(r"(?:^|/)\.attempt\.([^./]+)\.|/d/([0-9a-f]{32})\.[0-9a-f]{32}$")
"""A small file of an attempt, or a data file."""
_TOKEN = re.compile(rb'"token": ?"([0-9a-zA-Z]+)"')
_HEAD_BYTES = 300  # the token is among the first fields of a record
FOREIGN_ATTEMPT_SECS = 24 * 3600.0  # age after which an attempt on another host counts as left over
_MARK = b'"requires":"ckpt.json"'
MARKED = b"{" + _MARK + b"}"
"""The description that a deletion puts where there is none of ckpt: what has one is nothing without a record."""
_COPY = re.compile(
    r"_CHECKPOINT_METADATA|commit_success\.txt|[^/]+/(_METADATA|_sharding|_strings\.json|manifest\.ocdbt|metadata|"
    r"commit_success\.txt|data\.json|metrics|(exact/)?process_[^/]+|(checksums|array_metadatas)/process_[0-9]+|"
    r"(ocdbt\.(linked|process_[0-9]+)/)?d/[0-9a-f.]+)"
)
"""Names of the copies for Orbax, of a checkpoint whose items are one level below it; and of data that `ckpt cp` brought."""


class Keys(Protocol):
    """The keys and values below one prefix of a store; every call blocks. A missing key has the value None, and a version."""

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


def token_in(key: str) -> str | None:
    """The token of the attempt that wrote a key under a name of its own; None for any other key."""
    found = _OF_ATTEMPT.search(key)
    return found and (found[1] or found[2])


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


def put_copies_again(keys: Keys) -> None:
    """After copies were deleted: puts those of a checkpoint that was committed meanwhile again."""
    if token := committed_token(keys):
        roll_forward(keys, token)


def remove_all(keys: Keys, names: Iterable[str]) -> None:
    """Deletes keys; last those by which the next one knows whose the others are: the description, and then owners."""
    names = list(names)
    owners = [key for key in names if attempts_in([key])]
    keys.delete(key for key in names if key != DESCRIPTION and key not in owners)
    keys.delete(key for key in names if key == DESCRIPTION)
    keys.delete(owners)


@contextlib.contextmanager
def log_failures() -> Generator[None]:
    """Logs what fails inside: no save fails because what nobody needs any more cannot be deleted."""
    try:
        yield
    except Exception as error:
        logger.warning("what nobody needs any more cannot be deleted: %s", error)


class StoreAttempt(contextlib.AbstractContextManager["StoreAttempt"]):
    """One attempt; ``LocalAttempt`` says what its methods do."""

    def __init__(
        self, target: str, keys: Keys, token: str, version: Any = None, replaced: Iterable[str] = ()
    ) -> None:
        self._target, self._keys, self._token = target, keys, token
        self._version = version  # of ``ckpt.json`` at the start; None in a process that joined
        self._replaced = {*replaced}  # keys of the checkpoint that the attempt replaces
        self.path = f"{target}/{STAGING}{token}"
        self.data_prefix = f"{token}."
        self._record = RECORD, b""
        self._held: dict[str, bytes] = {}
        self._apart: dict[str, bytes] = {}
        self._data: set[str] = set()  # names of data files; in a copy without its token
        self._passes = self._deciding = False

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.abort()

    def write(self, name: str, data: bytes, *, until_commit: bool = False) -> FileRecord:
        room_bytes = MOST_PACKED_BYTES - sum(map(len, self._held.values()))
        if until_commit:
            self._passes = True
            self._keys.put(apart(self._token, PASSING + name), data)
        elif self._version is None or len(data) > min(MOST_HELD_BYTES, room_bytes):
            self._keys.put(apart(self._token, name), data)
            self._apart[name] = data
        else:
            self._held[name] = data
        return FileRecord.of(data)

    def read(self, name: str) -> bytes:
        found = self._held.get(name, self._apart.get(name))
        if found is None:
            found = self._keys.get(apart(self._token, PASSING + name))
        if found is None:
            raise FileNotFoundError(f"{self._target}/{name}")
        return found

    take = read

    def write_data(self, name: str, parts: Iterable[bytes]) -> None:
        self._data.add(name)
        self._keys.put(name, b"".join(parts))

    def small_files(self) -> Mapping[str, bytes]:
        return self._held

    def files(self, known_bytes: Mapping[str, int]) -> dict[str, int]:
        own = {name: len(data) for name, data in (self._held | self._apart).items()}
        return {**own, **known_bytes}

    def make_durable(self, record_name: str, record: bytes) -> None:
        self._record = record_name, record

    def commit(self) -> None:
        record_name, record = self._record
        if not self._keys.get(apart(self._token, OWNER)):
            what = "another writer took this one for dead, and removed what it had written"
            raise CheckpointError(f"{self._target}: {what}: nothing was committed")
        self._deciding = True
        try:
            # If the answer to the put is lost, its repetition fails although the first one succeeded.
            if not self._keys.put_if_unchanged(record_name, record, self._version) and (
                self._keys.get(record_name) != record
            ):
                self._deciding = False
                raise CheckpointExists(f"{self._target}: another writer committed it meanwhile")
            if self._replaced:
                with log_failures():  # until all is copied, Orbax would see a mixture
                    self._keys.delete([COMMIT])
            known = self._held | self._apart
            if self._passes:
                known |= _apart(self._keys, self._token)
            self._clean_up(*roll_forward(self._keys, self._token, known))
        except BaseException as error:
            if self._deciding:
                error.add_note(
                    f"the checkpoint may be there, {VISIBLE}: if so, ckpt reads it, and Orbax does when the "
                    "next writer there, such as a Checkpointer, has copied its small files"
                )
            raise

    def _clean_up(self, copied: set[str], committed: str | None) -> None:
        """Deletes what nobody needs any more, at last the owner's key; all of this attempt if another one is ``committed``."""
        with log_failures():
            if left := self._replaced - copied - {RECORD}:
                self._keys.delete(left)
                if committed_token(self._keys) != self._token:
                    put_copies_again(self._keys)
            if committed != self._token:
                remove_all(self._keys, self._mine())
            elif self._passes:
                self._keys.delete(self._keys.list(apart(self._token, PASSING)))
            self._keys.delete([apart(self._token, OWNER)])

    def _mine(self) -> list[str]:
        return [key for key in self._keys.list() if token_in(key) == self._token]

    def abort(self) -> None:
        # Who does not know whether the store has carried the put out, or will, deletes nothing.
        if self._deciding:
            return
        with contextlib.suppress(Exception):
            if committed_token(self._keys) != self._token:  # a copy has the token of its source
                remove_all(self._keys, {*self._mine(), *self._data})


def tidy(keys: Keys, *, only_look: bool = False) -> list[str]:
    """Deletes what belongs neither to the checkpoint at a place nor to an attempt that may live, and finishes the
    copies of that checkpoint; returns what it deleted or, if it is to ``only_look``, would delete.
    """
    listed = keys.list()
    begun = attempts_in(listed)
    owner_of = {one: keys.get(apart(one, OWNER)) for one, place in begun.items() if not place}
    own = [folder for owner in owner_of.values() for folder in _own_folders(owner or b"")]
    others = tuple(folder for folder in folders(listed) if folder not in own)
    below = {token for token, place in begun.items() if place}
    present = [key for key in listed if not key.startswith(others) and token_in(key) not in below]
    for one in filter(None, map(token_in, present)):
        if one not in owner_of:
            owner_of[one] = keys.get(apart(one, OWNER))
    writers = {one: owner for one, owner in owner_of.items() if owner and owner[:1] != b"["}
    died = [one for one, owner in writers.items() if _is_dead(owner)]
    if died and not only_look:
        for token in died:  # who may only have hung commits nothing from here on
            keys.put(apart(token, OWNER), b"")
        return tidy(keys)  # by a listing that has all that they wrote
    # an attempt puts its owner's key first, and deletes it last
    ended = {token for token, owner in owner_of.items() if not owner or _is_dead(owner)}
    owners = [apart(token, OWNER) for token in ended if owner_of[token] is not None]
    record = keys.get(RECORD)
    committed = token_of(record)
    if record is not None:
        kept = files_of(record)
        if kept is None:  # it is damaged, and may be repaired
            return []
        ended -= {committed}
        gone = [key for key in present if token_in(key) in ended and key not in kept]
    elif is_left(keys, present):
        gone = [key for key in present if token_in(key) in {None, *ended} and key != RECORD]
    else:
        here = {token_in(key) for key in present if key.startswith(STAGING)}
        gone = [key for key in present if token_in(key) in ended & here]
    if not only_look and (gone or owner_of.get(committed or "") is not None):
        remove_all(keys, [key for key in gone if key not in owners])
        put_copies_again(keys)
        keys.delete(owners)  # at last: by them the next one finds what is unfinished here
    return gone


def _is_dead(owner: bytes) -> bool:
    """Whether the owner who put this is gone; a guess by age for one on another host."""
    if owner[:1] in (b"", b"["):  # what ``tidy`` puts, and a deletion
        return True
    process, _, rest = owner.decode(errors="replace").partition(" ")
    living = lives(process)
    if living is not None:
        return not living
    began = rest.partition(" ")[0]
    return began.isdigit() and time.time() - int(began) > FOREIGN_ATTEMPT_SECS


def _own_folders(owner: bytes) -> list[str]:
    """The folders of this checkpoint's own that look like checkpoints, from the owner's key of a deletion."""
    with contextlib.suppress(ValueError):
        found = json.loads(owner) if owner[:1] == b"[" else []
        return [one for one in found if isinstance(one, str)]
    return []


def is_marked(keys: Keys, present: Iterable[str]) -> bool:
    """Whether these are files of ckpt that are nothing without a record."""
    return DESCRIPTION in present and _MARK in (keys.get(DESCRIPTION) or b"")


def is_left(keys: Keys, present: Sequence[str]) -> bool:
    """Whether the files at a place without a record are left of a deletion, or may be copies of attempts that died
    there: when those began there was nothing else, but somebody may have put more since.
    """
    if is_marked(keys, present):
        return True
    others = (key for key in present if token_in(key) is None and key != RECORD)
    owners = [token for token, place in attempts_in(present).items() if not place]
    if not owners or not all(map(_COPY.fullmatch, others)):
        return False
    return all(_is_dead(keys.get(apart(token, OWNER)) or b"") for token in owners)


def files_of(record: bytes | None) -> Iterable[str] | None:
    """The names of the files of a checkpoint; None if its record is damaged."""
    try:
        return load_record(record).files if record else ()
    except CheckpointCorrupt:
        return None


def folders(present: Iterable[str]) -> list[str]:
    """The folders among these keys that look like checkpoints, ending with ``/``."""
    signs = (f"/{RECORD}", f"/{DESCRIPTION}")
    return sorted({key.rpartition("/")[0] + "/" for key in present if key.endswith(signs)})
